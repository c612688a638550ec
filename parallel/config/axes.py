"""The axes over which a step is split, listed once. What names, checks, records or shows them
iterates over these lists. Torch-free.
"""

from collections.abc import Iterable, Mapping
from typing import Any

AXES = ("tp", "cp", "pp", "vpp", "dp")  # in the order of names and tables
# Of experts alone, which are split otherwise over the tp x cp x dp ranks of a stage. What is said
# of a dense model does not mention them.
EXPERT_AXES = ("ep", "etp")
# How a pipeline cuts layers that it does not divide (names of Megatron-LM). What is said of a run
# whose stages are equal does not mention them.
UNEVEN = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
UNEVEN += ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
RANK_AXES = ("tp", "cp", "dp", "pp")  # those whose product is the ranks, the fastest first
MODEL_AXES = tuple(axis for axis in RANK_AXES if axis != "dp")  # dp follows from them and the ranks
SET_AXES = tuple(axis for axis in AXES if axis != "dp")  # those that are settings of a run
SELDOM = ("cp", *EXPERT_AXES)  # left out of a table in which every row has 1 of it


def shown_axes(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Returns the axes that a table of these rows shows: one of SELDOM only where a row has more
    than 1."""
    rows = list(rows)
    return [
        axis
        for axis in (*AXES, *EXPERT_AXES)
        if axis not in SELDOM or any((row.get(axis) or 1) > 1 for row in rows)
    ]
