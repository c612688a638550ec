"""What the folders around an MLPerf result say of it.

    training_results_v4.1/                       the round
      NVIDIA/                                    the submitter
        results/eos_n64_ngc24.09_nemo/gpt3/      the system and the benchmark
          result_0.txt result_1.txt ...          repeats of one run
        systems/eos_n64_ngc24.09_nemo.json       nodes, accelerators of a node
        benchmarks/gpt3/.../config_DGXH100_64x8x128x4x8_mbs2.sh

The layout stands in the configuration's name: nodes x GPUs of a node x sequences of a step and dp
rank, then `tp4pp1cp2` or `x tp x pp`, with experts `ep8` behind
it; `mbs` is the micro-batch (1 where it is left out).
"""

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path

from analysis.logs.parsing.json_values import integer, known, mapping, text
from analysis.logs.parsing.setting_names import state
from analysis.logs.record import Record
from models.gpus import find_gpu

RESULT = re.compile(r"result_([\w-]{0,60}?)(\d{0,9})(?:\.txt|\.log)?$", re.IGNORECASE)
_ROUND = re.compile(r"(?:^|[_\W])v(\d{1,2}\.\d)(?=$|[_\W])")
_CONFIG = re.compile(
    r"config_.*?_(?P<nodes>\d{1,5})x(?P<each>\d{1,4})x(?P<batch>\d{1,6})x(?:tp)?(?P<tp>\d{1,4})"
    r"(?:pp|x)(?P<pp>\d{1,4})(?:cp(?P<cp>\d{1,4}))?(?:ep(?P<ep>\d{1,4}))?"
    r"(?:etp(?P<etp>\d{1,4}))?(?:_mbs(?P<mbs>\d{1,4}))?(?!\d)"
)
# `64xNVIDIA DGX H100`, `1xXE9680x8H100-SXM-80GB`, `gaudi-256`; `8xH200` may be cards or nodes.
_GPUS = re.compile(
    r"(?P<nodes>\d{1,5})x(?:[A-Z]\w{2,40}x(?P<each>\d{1,2})(?=[A-Z])|NVIDIA DGX [ABH]\d{3}$)"
    r"|(?:gaudi|tpu-v\w{1,4})-(?P<cards>\d{1,6})"
)


def is_result(path: Path) -> bool:
    """Returns whether a path is that of a result in a tree of them:
    `results/SYSTEM/BENCHMARK/result_0.txt` at any depth."""
    return bool(RESULT.match(path.name)) and "results" in path.parts[:-1]


def read_place(record: Record, path: Path) -> None:
    """Fills what the result's path says, at any depth (`.../SUBMITTER/results/SYSTEM/BENCHMARK/`,
    or one name `SUBMITTER__SYSTEM__BENCHMARK__result_0.txt`), and the system's JSON."""
    submission = record.submission
    *folders, file = Path(os.path.abspath(path)).parts
    rounds = _ROUND.findall("/".join(folders))
    submission.round = f"v{rounds[-1]}" if rounds else ""
    result, flat_parts = RESULT.search(file), file.split("__")
    system, accelerator = "", ""
    if "results" in folders:
        at = len(folders) - 1 - folders[::-1].index("results")
        submission.submitter, submission.top = folders[at - 1], Path(*folders[:at])
        system, submission.folder = [*folders[at + 1 :], "", ""][:2]
        accelerator = _system(record, submission.top / "systems" / f"{system}.json")
    elif result and len(flat_parts) == 4:
        submission.submitter, system, submission.folder, _ = flat_parts
    submission.system = system or submission.platform
    submission.benchmark = submission.benchmark or submission.folder
    if result and submission.system:
        record.repeat = int(result[2] or 0)
        names = (submission.round, submission.submitter, submission.system, submission.benchmark)
        record.configuration = " ".join(filter(None, names))
        record.run = f"{record.configuration} {record.repeat}"
    accelerator = accelerator or re.sub(r"^\d+x|-\d+$", "", submission.platform).strip()
    card = find_gpu(accelerator)
    state(record, {"gpu_type": card.name if card else accelerator or None}, "config")


def _system(record: Record, path: Path) -> str:
    """Fills the number of GPUs from `systems/SYSTEM.json`, whose numbers may be texts. Returns the
    accelerator's name there; empty where the file has none or cannot be read."""
    if not path.is_file():
        return ""
    try:
        system = mapping(json.loads(path.read_text("utf-8-sig", "replace")))
    except (OSError, ValueError) as error:
        record.note(f"{path.name} cannot be read: {error}")
        return ""
    nodes = integer(known(system.get("number_of_nodes"))) or 0
    gpus_per_node = integer(known(system.get("accelerators_per_node"))) or 0
    state(record, {"gpus": nodes * gpus_per_node or None}, "config")
    record.submission.gpus_per_node = gpus_per_node or None
    return (text(system.get("accelerator_model_name")) or "").strip()


def read_names(record: Record) -> None:
    """Fills what is still unknown from what the log calls the system, and from the name of the
    configuration, which are the weakest evidence."""
    submission = record.submission
    if record.gpus is None and (match := _GPUS.match(submission.platform)):
        gpus = int(match["cards"] or 0) or int(match["nodes"]) * int(match["each"] or 8)
        record.note(f"{gpus} GPUs are read from the system's name {submission.platform}")
        state(record, {"gpus": gpus}, "from name")
    if submission.top and record.gpus and record.global_batch and record.tp is None:
        _layout(record, submission.top.glob(f"benchmark*/{submission.folder}/**/config_*"))


def _layout(record: Record, configurations: Iterable[Path]) -> None:
    """Fills tp, pp, cp and the micro-batch from the one configuration whose name has the run's GPUs
    and for which

        tp x pp x cp x global batch = GPUs x micro-batch x accumulation steps

    with the log's accumulation; where it has none, the sequences that the name has."""
    layouts: dict[tuple[int | None, ...], str] = {}
    for match in filter(None, (_CONFIG.match(path.name) for path in configurations)):
        if not match["cp"] and record.submission.benchmark.endswith("_lora"):
            continue  # some submitters write cp there, not pp
        sizes = {name: int(size or 1) for name, size in match.groupdict().items()}
        sequences = sizes["batch"]
        if record.n_micro:
            sequences = (record.micro_batch or sizes["mbs"]) * record.n_micro
        ranks = sizes["tp"] * sizes["pp"] * sizes["cp"]
        fits = ranks * record.global_batch == record.gpus * sequences
        if fits and record.gpus == sizes["nodes"] * sizes["each"]:
            named = {name: sizes[name] if match[name] else None for name in ("mbs", "ep", "etp")}
            layout = (sizes["tp"], sizes["pp"], sizes["cp"], *named.values())
            layouts[layout] = match.string
    names = ", ".join(sorted(layouts.values()))
    if len(layouts) == 1:
        facts = zip(("tp", "pp", "cp", "micro_batch", "ep", "etp"), *layouts, strict=True)
        state(record, dict(facts), "from name")
        record.note(f"layout from the name of {names}")
    elif layouts:
        record.note(f"the layout is not known: these configurations fit: {names}")
