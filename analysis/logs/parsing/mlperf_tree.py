"""What the folders around an MLPerf result say of it.

    training_results_v4.1/                       the round
      NVIDIA/                                    the submitter
        results/eos_n64_ngc24.09_nemo/gpt3/      the system and the benchmark
          result_0.txt result_1.txt ...          repeats of one run
          power/result_0/node_0.txt sw_0.txt     power readings of a node; of a switch
        systems/eos_n64_ngc24.09_nemo.json       nodes, accelerators of a node
        benchmarks/gpt3/.../config_DGXH100_64x8x128x4x8_mbs2.sh

The layout stands in the configuration's name: nodes x GPUs of a node x sequences of a step and dp
rank, then `tp4pp1cp2` or `x tp x pp`; `mbs` is the micro-batch (1 where it is left out).
"""

import os
import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from analysis.logs.parsing.json_values import known, mapping, real, text, whole
from analysis.logs.parsing.setting_names import state
from analysis.logs.record import Record
from base.files import check_file, parse_json
from models.gpus import find_gpu
from parallel.config.axes import SET_AXES

RESULT = re.compile(r"result_([\w-]{0,60}?)(\d{0,9})(?:\.txt|\.log)?$", re.IGNORECASE)
_ROUND = re.compile(r"(?:^|[_\W])v(\d{1,2}\.\d)(?:$|[_\W])")
_CONFIG = re.compile(
    r"config_(?P<card>.*?)_(?P<nodes>\d{1,5})x(?P<each>\d{1,4})x(?P<batch>\d{1,6})"
    r"(?:x(?P<tp>\d{1,4})x(?P<pp>\d{1,4}))?(?P<rest>[x_.].*)?$",
    re.IGNORECASE,
)
_NAMED = re.compile(r"(?:(?<![a-z])|(?<=x))(tp|pp|cp|vpp|vp|ep|mbs)(\d{1,4})(?!\d)", re.IGNORECASE)
_CARD = re.compile(r"(?:GB|GH|MI|[BHAL])\d{2,3}[SX]?", re.IGNORECASE)
# `64xNVIDIA DGX H100`, `1xXE9680x8H100-SXM-80GB`, `7x8xH100-SXM5-80GB`: nodes, cards of a node.
_NODES = re.compile(r"(\d{1,5})x(?:.{0,40}?x(\d{1,2})(?=[A-Z])|(\d{1,2})x(?=[A-Z])|.*?(DGX))?")
# `8xH200`: cards or nodes; a DGX with a Grace has 4 cards a tray and 72 a rack.
_EITHER = re.compile(
    rf"\d{{1,5}}x[ _]?(?:(?:NVIDIA|AMD|Instinct|Intel)[ _-]?)*(?:{_CARD.pattern}|Gaudi)"
)
_GRACE = re.compile(r"\bG[BH]\d{2,3}|NVL", re.IGNORECASE)
_CARDS = re.compile(r"(?:gaudi|tpu-v(\w{1,4}))-(\d{1,6})")
_COUNT = re.compile(r"^\d+x|(?<=gaudi)-\d+$|(?<=tpu-v\w\w)-\d+$")
_DGX = 8  # cards
# Google names slices of these versions by TensorCores, two a chip; of the others by chips.
_CORES = ("2", "3", "4", "5p")
_WATTS = (50, 500_000)  # a node that draws less was not measured, or in kW; one with more, in mW
_POWER = re.compile(rb":::MLL(?:OG)? (\{[^\r\n]{1,4000}\})")


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
    parts = Path(os.path.abspath(path)).parts
    rounds = [match[1] for part in parts[:-1] if (match := _ROUND.search(part))]
    name = RESULT.search(parts[-1])
    version, repeat = f"v{rounds[-1]}" if rounds else "", int(name[2] or 0) if name else None
    folders, flat = list(parts[:-1]), parts[-1].split("__")
    if "results" in folders:
        at = len(folders) - 1 - folders[::-1].index("results")
        # MLPerf HPC has results/SYSTEM/strong/BENCHMARK.
        below = [part for part in folders[at + 1 :] if part not in ("strong", "weak")] + ["", ""]
        return Place(version, folders[at - 1], below[0], below[1], repeat, Path(*folders[:at]))
    if name and len(flat) == 4:
        return Place(version, *flat[:3], repeat, None)
    return Place(version, "", "", "", repeat, None)


def read_place(record: Record, path: Path) -> None:
    """Fill what the result's path says, the system's JSON, and the power logs beside it."""
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
        _system(record, place)
    about.accelerator = about.accelerator or _COUNT.sub("", about.platform).strip()
    card = find_gpu(about.accelerator)
    state(record, {"gpu_type": card.name if card else about.accelerator or None}, "config")
    _power(record, path)
    _scaled(record, path)


def _scaled(record: Record, path: Path) -> None:
    """Note what the review multiplies a benchmark's official score by."""
    file = path.parent / "scaling.json"
    if not file.is_file():
        return
    try:
        factor = known(mapping(parse_json(file.read_text())).get("scaling_factor"))
    except (OSError, ValueError):
        factor = None
    times = f"x {factor:g}" if factor else "x a factor that cannot be read"
    said = f"scaling.json: MLPerf's own score is the time {times}, which is not applied here"
    record.notes.append(said)


def read_names(record: Record, path: Path) -> None:
    """Fill what is still unknown from what the log calls the system, and from the name of the
    configuration: the weakest evidence."""
    about, place = record.submission, place_of(path)
    name, gpus, nodes = about.platform or place.system, None, about.nodes
    if cards := _CARDS.search(name):
        gpus = int(cards[2]) // (2 if cards[1] in _CORES else 1)
    elif (found := _NODES.match(name)) and not _EITHER.match(name):
        nodes = nodes or int(found[1])
        each = found[2] or found[3] or (_DGX if found[4] and not _GRACE.search(name) else None)
        gpus = int(found[1]) * int(each) if each else None
        if each and about.platform and nodes != int(found[1]):
            said = f"the system's JSON has {nodes} nodes ({record.gpus} GPUs, which are used)"
            record.notes.append(f"{said}, the log's submission_platform is {name}")
    if gpus and record.gpus is None:
        record.notes.append(f"{gpus} GPUs are read from the system's name {name}")
    state(record, {"gpus": gpus}, "from name")
    if place.top and (record.gpus or nodes):
        _layout(record, place, nodes)


def _system(record: Record, place: Place) -> None:
    """Nodes and accelerators by `systems/SYSTEM.json`."""
    systems = _descriptions(place.top)
    said = systems.get(f"{place.system}.json".lower())
    if said is None:  # another spelling of its name
        alike = {name: said for name, said in systems.items() if _called(said, name, place.system)}
        if len(alike) != 1:
            return
        name, said = alike.popitem()
        record.notes.append(f"the system {place.system} is described by {name}")
    if isinstance(said, str):
        record.notes.append(said)
        return
    about = record.submission
    about.accelerator = (text(said.get("accelerator_model_name")) or "").strip()
    nodes, each = (_count(said.get(k)) for k in ("number_of_nodes", "accelerators_per_node"))
    about.nodes = nodes
    if nodes and each:
        state(record, {"gpus": nodes * each}, "config")


@cache
def _descriptions(top: Path) -> dict[str, dict[str, Any] | str]:
    """The systems' JSON files by their names in small letters; a reason where one cannot be read"""
    found: dict[str, dict[str, Any] | str] = {}
    for path in sorted((top / "systems").glob("*.[jJ][sS][oO][nN]")):
        try:
            found[path.name.lower()] = mapping(parse_json(path.read_text("utf-8-sig", "replace")))
        except (OSError, ValueError) as error:
            found[path.name.lower()] = f"{path.name} cannot be read: {error}"
    return found


def _called(said: dict[str, Any] | str, name: str, system: str) -> bool:
    """Whether a description is that of a system, but for capitals and punctuation."""
    names = {name.removesuffix(".json"), "" if isinstance(said, str) else said.get("system_name")}
    return _plain(system) in {_plain(text(one) or "") for one in names}


def _plain(name: str) -> str:
    return re.sub(r"[\W_]", "", name.lower())


def _count(value: Any) -> int | None:
    return whole(value) or whole(known(value))


class _Named(NamedTuple):
    """A configuration's file and what its name says."""

    name: str
    card: str
    nodes: int
    each: int
    batch: int
    sizes: dict[str, int]


@cache
def _configurations(top: Path, benchmark: str) -> tuple[_Named, ...]:
    """The configurations of one benchmark whose names state a layout."""
    found: dict[str, _Named | None] = {}
    for folder in (top / "benchmarks" / benchmark, top / "benchmark" / benchmark, top / "results"):
        for _, _, names in os.walk(folder):
            for name in names:
                if name not in found and (match := _CONFIG.match(name)):
                    found[name] = _parsed(name, match, benchmark)
    return tuple(named for named in found.values() if named)


def _parsed(name: str, match: re.Match[str], benchmark: str) -> _Named | None:
    sizes = {key.lower(): int(n) for key, n in _NAMED.findall(match["rest"] or "")}
    if "vp" in sizes:
        sizes["vpp"] = sizes.pop("vp")
    # The fifth number is pp; for LoRA, which needs no pipeline, some submitters write cp there.
    if match["tp"] and not sizes.keys() & {"tp", "pp"} and not benchmark.endswith("_lora"):
        sizes |= {"tp": int(match["tp"]), "pp": int(match["pp"])}
    if not {"tp", "pp"} <= set(sizes):
        return None
    whole_numbers = (int(match[key]) for key in ("nodes", "each", "batch"))
    return _Named(name, match["card"], *whole_numbers, sizes)


def _layout(record: Record, place: Place, nodes: int | None) -> None:
    """tp, pp, cp and the micro-batch by the one configuration whose name fits the log."""
    known = _configurations(place.top, place.benchmark)
    fit = [named for named in known if _fits(record, place, nodes, named)]
    layouts = {tuple(sorted(c.sizes.items())): c for c in fit}
    if len(layouts) > 1:
        if record.tp is None:
            names = ", ".join(sorted(c.name for c in fit))
            record.notes.append(f"the layout is not known: these configurations fit: {names}")
        return
    for named in layouts.values():
        stated = record.tp is not None
        facts = {k: v for k, v in named.sizes.items() if k in SET_AXES}
        facts |= {"micro_batch": named.sizes.get("mbs"), "gpus": named.nodes * named.each}
        state(record, facts, "from name")
        if not stated:
            record.notes.append(f"layout from the name of {named.name}")


def _fits(record: Record, place: Place, nodes: int | None, named: _Named) -> bool:
    """Whether a configuration can be this run's: its GPUs, its card, and

        tp x pp x cp x global batch = GPUs x micro-batch x accumulation steps

    with the log's accumulation; where it has none, the sequences that the name has."""
    about, sizes = record.submission, named.sizes
    gpus = named.nodes * named.each
    if record.gpus not in (None, gpus) or (record.gpus is None and nodes != named.nodes):
        return False
    if about.nodes not in (None, named.nodes):
        return False
    if any(getattr(record, k) not in (None, sizes.get(k)) for k in ("tp", "pp")):
        return False
    words = f"{about.accelerator} {place.system} {about.platform}".upper()
    card = _CARD.search(named.card.upper())
    if card and (cards := _CARD.findall(words)) and card[0] not in cards:
        return False
    if not card and named.card.upper() not in words:
        return False
    batch, split = record.global_batch, sizes["tp"] * sizes["pp"] * sizes.get("cp", 1)
    if not batch:
        return True
    if record.n_micro:
        return split * batch == gpus * (record.micro_batch or sizes.get("mbs", 1)) * record.n_micro
    return split * batch == gpus * named.batch


def _power(record: Record, path: Path) -> None:
    """Joules of the run: of each node, the mean of its readings times the run's time, as the
    result summarizer of mlcommons/logging computes them."""
    about, seconds = record.submission, record.totals.get("wall_s")
    folder = path.parent / "power" / path.stem
    if not folder.is_dir():
        folder = path.parent / "power" / path.name
    if not folder.is_dir() or not seconds:
        return
    joules, nodes = 0.0, 0
    for file in sorted(folder.iterdir()):
        if not file.name.startswith(("node", "sw")) or not file.is_file():
            continue
        watts = _watts(file)
        if watts is None:
            said = f"{file.name} of the power logs has no reading of {_WATTS[0]} to {_WATTS[1]} W"
            record.notes.append(f"{said}: the energy is unknown")
            return
        joules += watts * seconds
        nodes += file.name.startswith("node")
    if about.nodes and nodes != about.nodes:
        said = f"the power logs are of {nodes} nodes, the system has {about.nodes}"
        record.notes.append(f"{said}: the energy is unknown")
    elif nodes:
        about.energy_j = joules


def _watts(path: Path) -> float | None:
    """Mean power of one node or switch over its measurement, watts."""
    started = stopped = before = None
    joules, estimate, efficiency = 0.0, None, 1.0
    lines = []
    for match in _POWER.finditer(check_file(path).read_bytes()):
        try:
            line = mapping(parse_json(match[1]))
        except ValueError:
            continue
        value = line.get("value")
        number = known(mapping(value).get("value") if isinstance(value, dict) else value)
        lines.append((real(line.get("time_ms")) / 1000, text(line.get("key")), number))
    for now, key, number in sorted(lines, key=lambda line: line[0]):
        if key == "power_measurement_start":
            started = before = now
        elif key == "power_measurement_stop":
            stopped = stopped or now
        elif key == "power_reading" and number is not None and before is not None:
            if stopped is None:
                joules, before = joules + number * (now - before), now
        elif key == "conversion_eff" and number:
            efficiency = number
        elif key == "interconnect_power_est" and number is not None:
            estimate = number
    if estimate is not None:
        return efficiency * estimate
    stopped = stopped or before
    if started is None or stopped is None or stopped <= started:
        return None
    watts = efficiency * joules / (stopped - started)
    return watts if _WATTS[0] < watts < _WATTS[1] else None
