"""The batches of a step: which sequences it sees, and how they are made ahead of their use.

A sequence starts anywhere in its split's stream of tokens, so it crosses the ends of documents.
Which sequences step t sees depends on (seed, t) alone, never on the layout.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from parallel.config.run_spec import RunSpec
from parallel.engines import Batch
from parallel.token_files import Tokens

MEASURED = 1024  # sequences whose documents are measured


def offsets(n_tokens: int, seq_len: int, global_batch: int, seed: int, step: int) -> np.ndarray:
    """Returns where each of the step's `global_batch` sequences starts, from (seed, step) alone."""
    generator = np.random.Generator(np.random.Philox(key=[seed, step]))
    return generator.integers(0, n_tokens - seq_len, size=global_batch)


def batches(tokens: Tokens, spec: RunSpec, dp_rank: int, step: int) -> Iterator[Batch]:
    """Yields this dp rank's n_micro micro-batches of the step: (tokens, labels), [micro_batch,
    seq_len].

    Micro-batch m is rows [m * dp * micro_batch, ...) of the step's global batch, dp ranks side by
    side, so every layout with the same global batch sees the same sequences.
    """
    layout = spec.layout
    starts = offsets(len(tokens.ids), spec.seq_len, layout.global_batch, spec.seed, step)
    per_micro = starts.reshape(layout.n_micro, layout.dp, layout.micro_batch)
    for micro in range(layout.n_micro):
        yield tokens.batch(per_micro[micro, dp_rank], spec.seq_len, spec.model.vocab_size)


def attended_seq_len(tokens: Tokens, spec: RunSpec) -> float:
    """Returns the length of whole sequences in which attention would do as much work as in this
    run's documents, where it ends with each.

    It is the mean over sequences of the sum of the squares of the documents' lengths, over seq_len,
    as measured on the sequences of the run's first steps.
    """
    global_batch, squares = spec.layout.global_batch, []
    for step in range(min(spec.steps, -(-MEASURED // global_batch))):
        for start in offsets(len(tokens.ids), spec.seq_len, global_batch, spec.seed, step):
            is_end = tokens.ids[start : start + spec.seq_len - 1] == spec.end_of_text
            lengths = np.diff(np.flatnonzero(is_end) + 1, prepend=0, append=spec.seq_len)
            squares.append(float(np.square(lengths).sum()))
    return float(np.mean(squares)) / spec.seq_len


def unread(spec: RunSpec, stage: int, device: torch.device) -> Batch | None:
    """Returns what pipeline stage `stage` (from 0) takes in place of every micro-batch, made once
    on its device; None where it reads micro-batches. The stages between first and last read no
    tokens and no labels; where documents end, all of them read the tokens."""
    if stage in (0, spec.layout.pp - 1) or spec.end_of_text is not None:
        return None
    zeros_BS = torch.zeros(spec.layout.micro_batch, spec.seq_len, dtype=torch.int64, device=device)
    return zeros_BS, zeros_BS


@contextmanager
def ahead(items: Iterator[Any], device: torch.device) -> Iterator[Iterator[Any]]:
    """Yields what an iterator gives, each item made by a thread while the one before it is used.

    A step ends by waiting for the device. Without the thread the device would then wait for the
    next step's first batch. `device` is the one whose pinned memory the items are made in. What
    making an item raises is raised where it is taken.
    """
    on_gpu = device.type == "cuda"  # a thread begins on GPU 0, whichever is the process's own
    start = (torch.cuda.set_device, (device,)) if on_gpu else (None, ())
    with ThreadPoolExecutor(1, "batches", *start) as pool:

        def taken(following: Future) -> Iterator[Any]:
            while (item := following.result()) is not None:
                following = pool.submit(next, items, None)
                yield item

        yield taken(pool.submit(next, items, None))
