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
from functools import cache
from pathlib import Path
from typing import NamedTuple

from analysis.logs.parsing.json_values import known, mapping, text, whole
from analysis.logs.parsing.setting_names import state
from analysis.logs.record import Record
from base.files import parse_json
from models.gpus import find_gpu
from parallel.config.axes import SET_AXES

RESULT = re.compile(r"result_([\w-]{0,60}?)(\d{0,9})(?:\.txt|\.log)?$", re.IGNORECASE)
_ROUND = re.compile(r"(?:^|[_\W])v(\d{1,2}\.\d)(?:$|[_\W])")
_CONFIG = re.compile(
    r"config_(?P<card>.*?)_(?P<nodes>\d{1,5})x(?P<each>\d{1,4})x(?P<batch>\d{1,6})"
    r"(?:x(?P<tp>\d{1,4})x(?P<pp>\d{1,4}))?(?P<rest>[x_.].*)?$",
    re.IGNORECASE,
)
_NAMED = re.compile(r"(?:(?<![a-z])|(?<=x))(tp|pp|cp|vpp|vp|mbs)(\d{1,4})(?!\d)", re.IGNORECASE)
_CARD = re.compile(r"(?:GB|GH|MI|[BHAL])\d{2,3}[SX]?", re.IGNORECASE)
# `64xNVIDIA DGX H100`, `1xXE9680x8H100-SXM-80GB`, `gaudi-256`; `8xH200` may be cards or nodes.
_GPUS = re.compile(r"(\d{1,5})x(?:[A-Z]\w{2,40}x(\d{1,2})(?=[A-Z])|NVIDIA (DGX) [ABH]\d{3}$)")
_CARDS = re.compile(r"(?:gaudi|tpu-v\w{1,4})-(\d{1,6})")
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
    about.round = place.round
    about.submitter = place.submitter or about.submitter
    about.benchmark = about.benchmark or place.benchmark
    about.system = place.system or about.platform
    if place.repeat is not None and about.system:
        record.repeat = place.repeat
        names = (about.round, about.submitter, about.system, about.benchmark)
        record.configuration = " ".join(filter(None, names))
        record.run = f"{record.configuration} {place.repeat}"
    if place.top:
        _system(record, place.top / "systems" / f"{place.system}.json")
    named = re.sub(r"^\d+x|-\d+$", "", about.platform).strip()
    about.accelerator = about.accelerator or named
    card = find_gpu(about.accelerator)
    state(record, {"gpu_type": card.name if card else about.accelerator or None}, "config")


def _system(record: Record, path: Path) -> None:
    """Nodes and accelerators by `systems/SYSTEM.json`, whose numbers may be texts."""
    if not path.is_file():
        return
    try:
        system = mapping(parse_json(path.read_text("utf-8-sig", "replace")))
    except (OSError, ValueError) as error:
        record.notes.append(f"{path.name} cannot be read: {error}")
        return
    about = record.submission
    about.accelerator = (text(system.get("accelerator_model_name")) or "").strip()
    keys = ("number_of_nodes", "accelerators_per_node")
    about.nodes, each = (whole(known(system.get(key))) for key in keys)
    if about.nodes and each:
        state(record, {"gpus": about.nodes * each}, "config")


def read_names(record: Record, path: Path) -> None:
    """Fill what is still unknown from what the log calls the system, and from the name of the
    configuration: the weakest evidence."""
    about, place = record.submission, place_of(path)
    if record.gpus is None:
        gpus = None
        if cards := _CARDS.match(about.platform):
            gpus = int(cards[1])
        elif match := _GPUS.match(about.platform):
            gpus = int(match[1]) * int(match[2] or _DGX)
        if gpus:
            record.notes.append(f"{gpus} GPUs are read from the system's name {about.platform}")
        state(record, {"gpus": gpus}, "from name")
    if place.top:
        _layout(record, place)


@cache
def _configurations(top: Path, benchmark: str) -> list[re.Match[str]]:
    """The configurations of one benchmark whose names state a layout."""
    names = {path.name for path in top.glob(f"benchmark*/{benchmark}/**/config_*")}
    return [match for name in sorted(names) if (match := _CONFIG.match(name))]


def _sizes(configuration: re.Match[str], benchmark: str) -> dict[str, int]:
    """tp, pp, cp, vpp and mbs by a configuration's name; empty where it does not state tp and pp.

    Its fifth number is pp; for LoRA, which needs no pipeline, some submitters write cp there."""
    sizes = {key.lower(): int(n) for key, n in _NAMED.findall(configuration["rest"] or "")}
    if "vp" in sizes:
        sizes["vpp"] = sizes.pop("vp")
    if configuration["tp"] and "tp" not in sizes and not benchmark.endswith("_lora"):
        sizes |= {"tp": int(configuration["tp"]), "pp": int(configuration["pp"])}
    return sizes if {"tp", "pp"} <= set(sizes) else {}


def _layout(record: Record, place: Place) -> None:
    """tp, pp, cp and the micro-batch by the one configuration whose name fits the log."""
    layouts: dict[tuple[tuple[str, int], ...], str] = {}
    for configuration in _configurations(place.top, place.benchmark):
        sizes = _sizes(configuration, place.benchmark)
        if sizes and _fits(record, configuration, sizes):
            layouts[tuple(sorted(sizes.items()))] = configuration[0]
            gpus = int(configuration["nodes"]) * int(configuration["each"])
    if record.tp is None and layouts:
        names = ", ".join(layouts.values())
        only = f"layout from the name of {names}"
        many = f"the layout is not known: these configurations fit: {names}"
        record.notes.append(only if len(layouts) == 1 else many)
    if len(layouts) == 1:
        sizes = dict(*layouts)
        facts = {name: sizes.get(name) for name in SET_AXES}
        state(record, facts | {"micro_batch": sizes.get("mbs"), "gpus": gpus}, "from name")


def _fits(record: Record, configuration: re.Match[str], sizes: dict[str, int]) -> bool:
    """Whether a configuration can be this run's: it has its card and GPUs, and

        tp x pp x cp x global batch = GPUs x micro-batch x accumulation steps

    with the log's accumulation; where it has none, the sequences that the name has."""
    about, nodes = record.submission, configuration["nodes"]
    gpus = int(nodes) * int(configuration["each"])
    card = _CARD.search(configuration["card"].upper())
    cards = _CARD.findall(f"{about.accelerator} {about.system} {about.platform}".upper())
    if record.gpus != gpus and (record.gpus or not about.platform.startswith(f"{nodes}x")):
        return False
    if card and cards and card[0] not in cards:
        return False
    if any(getattr(record, name) not in (None, sizes[name]) for name in ("tp", "pp")):
        return False
    batch = int(configuration["batch"])
    if record.n_micro:
        batch = (record.micro_batch or sizes.get("mbs", 1)) * record.n_micro
    split = sizes["tp"] * sizes["pp"] * sizes.get("cp", 1)
    return split * (record.global_batch or 0) == gpus * batch
