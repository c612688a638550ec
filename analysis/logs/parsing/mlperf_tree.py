"""What the folders around an MLPerf result say of it.

    training_results_v4.1/                       the round
      NVIDIA/                                    the submitter
        results/eos_n64_ngc24.09_nemo/gpt3/      the system and the benchmark
          result_0.txt result_1.txt ...          repeats of one run
        systems/eos_n64_ngc24.09_nemo.json       nodes, accelerators of a node
        benchmarks/gpt3/.../config_DGXH100_64x8x128x4x8_mbs2.sh

The layout stands in the configuration's name: nodes x GPUs of a node x sequences of a step and dp
rank, then `tp4pp1cp2` or `x tp x pp`; `mbs` is the micro-batch (1 where it is left out).
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from analysis.logs.parsing.json_values import known, mapping, text, whole
from analysis.logs.parsing.setting_names import state
from analysis.logs.record import Record
from base.files import parse_json
from models.gpus import find_gpu

RESULT = re.compile(r"result_([\w-]{0,60}?)(\d{0,9})(?:\.txt|\.log)?$", re.IGNORECASE)
_ROUND = re.compile(r"(?:^|[_\W])v(\d{1,2}\.\d)(?:$|[_\W])")
_CONFIG = re.compile(
    r"config_.*?_(?P<nodes>\d{1,5})x(?P<each>\d{1,4})x(?P<batch>\d{1,6})x"
    r"(?:tp(?P<tp>\d{1,4})pp(?P<pp>\d{1,4})cp(?P<cp>\d{1,4})|(?P<tensor>\d{1,4})x(?P<stages>\d{1,4}))"
    r"(?:_mbs(?P<mbs>\d{1,4}))?(?!\d)"
)
# `64xNVIDIA DGX H100`, `1xXE9680x8H100-SXM-80GB`, `gaudi-256`; `8xH200` may be cards or nodes.
_GPUS = re.compile(
    r"(?P<nodes>\d{1,5})x(?:[A-Z]\w{2,40}x(?P<each>\d{1,2})(?=[A-Z])|NVIDIA DGX [ABH]\d{3}$)"
    r"|(?:gaudi|tpu-v\w{1,4})-(?P<cards>\d{1,6})"
)
_DGX = 8  # cards


class Place(NamedTuple):
    """Where a result lies: its round, submitter, system and benchmark ("" where unknown), its
    number, and the submitter's folder."""

    round: str
    submitter: str
    system: str
    benchmark: str
    repeat: int | None
    top: Path | None


def is_result(path: Path) -> bool:
    """Whether a path is that of a result in a tree of them: `results/SYSTEM/BENCHMARK/result_0.txt`
    at any depth."""
    return bool(RESULT.match(path.name)) and "results" in path.parts[:-1]


def place_of(path: Path) -> Place:
    """What the path of a result says, at any depth: `.../SUBMITTER/results/SYSTEM/BENCHMARK/`, or
    one name `SUBMITTER__SYSTEM__BENCHMARK__result_0.txt`."""
    *folders, file = Path(os.path.abspath(path)).parts
    rounds = [match[1] for folder in folders if (match := _ROUND.search(folder))]
    name, flat = RESULT.search(file), file.split("__")
    version, repeat = f"v{rounds[-1]}" if rounds else "", int(name[2] or 0) if name else None
    if "results" in folders:
        at = len(folders) - 1 - folders[::-1].index("results")
        system, benchmark = [*folders[at + 1 :], "", ""][:2]
        return Place(version, folders[at - 1], system, benchmark, repeat, Path(*folders[:at]))
    if name and len(flat) == 4:
        return Place(version, *flat[:3], repeat, None)
    return Place(version, "", "", "", repeat, None)


def read_place(record: Record, path: Path) -> None:
    """Fill what the result's path and the system's JSON say."""
    about, place = record.submission, place_of(path)
    about.round, about.system = place.round, place.system or about.platform
    about.submitter = place.submitter or about.submitter
    about.benchmark = about.benchmark or place.benchmark
    if place.repeat is not None and about.system:
        record.repeat = place.repeat
        names = (about.round, about.submitter, about.system, about.benchmark)
        record.configuration = " ".join(filter(None, names))
        record.run = f"{record.configuration} {place.repeat}"
    if place.top and (system := place.top / "systems" / f"{place.system}.json").is_file():
        _system(record, system)
    about.accelerator = about.accelerator or re.sub(r"^\d+x|-\d+$", "", about.platform).strip()
    card = find_gpu(about.accelerator)
    state(record, {"gpu_type": card.name if card else about.accelerator or None}, "config")


def _system(record: Record, path: Path) -> None:
    """Nodes and accelerators by `systems/SYSTEM.json`, whose numbers may be texts."""
    try:
        system = mapping(parse_json(path.read_text("utf-8-sig", "replace")))
    except (OSError, ValueError) as error:
        record.notes.append(f"{path.name} cannot be read: {error}")
        return
    about = record.submission
    about.accelerator = (text(system.get("accelerator_model_name")) or "").strip()
    about.nodes = whole(known(system.get("number_of_nodes")))
    each = whole(known(system.get("accelerators_per_node")))
    if about.nodes and each:
        state(record, {"gpus": about.nodes * each}, "config")


def read_names(record: Record, path: Path) -> None:
    """Fill what is still unknown from what the log calls the system, and from the name of the
    configuration: the weakest evidence."""
    about, place = record.submission, place_of(path)
    if record.gpus is None and (match := _GPUS.match(about.platform)):
        gpus = int(match["cards"] or 0) or int(match["nodes"]) * int(match["each"] or _DGX)
        record.notes.append(f"{gpus} GPUs are read from the system's name {about.platform}")
        state(record, {"gpus": gpus}, "from name")
    if place.top and record.gpus and record.global_batch and record.tp is None:
        _layout(record, place.top.glob(f"benchmark*/{place.benchmark}/**/config_*"))


def _layout(record: Record, configurations: Iterable[Path]) -> None:
    """tp, pp, cp and the micro-batch by the one configuration whose name has the run's GPUs and

        tp x pp x cp x global batch = GPUs x micro-batch x accumulation steps

    with the log's accumulation; where it has none, the sequences that the name has."""
    layouts: dict[tuple[int | None, ...], str] = {}
    for match in filter(None, (_CONFIG.match(path.name) for path in configurations)):
        if match["tensor"] and record.submission.benchmark.endswith("_lora"):
            continue  # some submitters write cp there, not pp
        sizes = {name: int(size or 1) for name, size in match.groupdict().items()}
        tp, pp, cp = sizes["tp"] * sizes["tensor"], sizes["pp"] * sizes["stages"], sizes["cp"]
        sequences = sizes["batch"]
        if record.n_micro:
            sequences = (record.micro_batch or sizes["mbs"]) * record.n_micro
        fits = tp * pp * cp * record.global_batch == record.gpus * sequences
        if fits and record.gpus == sizes["nodes"] * sizes["each"]:
            layouts[tp, pp, cp, sizes["mbs"] if match["mbs"] else None] = match.string
    names = ", ".join(sorted(layouts.values()))
    if len(layouts) == 1:
        facts = zip(("tp", "pp", "cp", "micro_batch"), *layouts, strict=True)
        state(record, dict(facts), "from name")
        record.notes.append(f"layout from the name of {names}")
    elif layouts:
        record.notes.append(f"the layout is not known: these configurations fit: {names}")
