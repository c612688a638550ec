"""What the commands on runs share: their flags, and how they read the runs at their paths."""

import argparse
import math
import re
from pathlib import Path
from typing import Any

from analysis.common import convergence
from analysis.common.table import add_table_flags
from analysis.common.terminal import who
from analysis.logs.fact_options import add_fact_options, add_time_options, facts_of, flag_of
from analysis.logs.load import load
from analysis.logs.naming import name_of
from analysis.logs.record import Record
from analysis.runs.fairness import Terms
from base.errors import Parser, warn, warn_at_end
from base.files import add_force_flag
from models.flops import CONVENTIONS, DEFAULT_CONVENTION
from models.gpus import peak_tflops


def percent(text: str) -> float:
    """Returns the share that `3%` states; it is an argparse `type`."""
    if not re.fullmatch(r"\d{1,3}(\.\d{1,3})? ?%", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no share in percent, as 3%")
    return float(text.rstrip("% ")) / 100


def _loss(text: str) -> float:
    """Returns the loss that a number states; it is an argparse `type`."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is no loss, as 2.5")
    return value


LOGS = "log, run or folder; - is standard input"
GROUPS = {"times": add_time_options, "facts": add_fact_options, "table": add_table_flags}
GROUPS["force"] = add_force_flag
OWN = {
    "baseline": {
        "metavar": "NAME",
        "help": "the run to compare with: its name or path; or a configuration or an MLPerf system,"
        " which is its first repeat; times are of all repeats of it that have one",
    },
    "scaling": {
        "choices": ("strong", "weak"),
        "help": "what stays the same: the global batch, or the batch per GPU (default: weak"
        " where the runs share the batch per GPU alone)",
    },
    "any_commit": {"action": "store_true", "help": "compare runs of different commits, too"},
    "critical_batch": {
        "type": convergence.stated,
        "metavar": "B",
        "help": f"of weak scaling: {convergence.STATES}",
    },
    "target_loss": {
        "type": _loss,
        "metavar": "NATS",
        "help": "of weak scaling: fit the critical batch to the samples at which the runs' own"
        " losses, each the mean over the last tenth of the samples so far, reached this one",
    },
    "convention": {
        "choices": tuple(CONVENTIONS),
        "help": "the formula for FLOPs; docs/read-logs.md says which program prints which (default:"
        f" {DEFAULT_CONVENTION}; where a log does not state the model's sizes, 6n; where neither"
        " can be computed, as it prints them)",
    },
    "at_most": {
        "type": percent,
        "metavar": "SHARE%",
        "help": "a gate: exit 1 only where B is slower by more than this beyond the noise of both,"
        " 2 where that cannot be known, else 0; their commits may differ (docs/ci-gate.md)",
    },
    "golden": {
        "type": Path,
        "metavar": "FILE",
        "help": "the reference, in A's place: written from B's runs where there is no such file",
    },
    "loss_bar": {
        "type": _loss,
        "metavar": "NATS",
        "help": "of logs: by how much losses of equal runs may differ (default: that of fp32 runs)",
    },
    "grad_norm_bar": {
        "type": float,
        "metavar": "SHARE",
        "help": "of logs: by which share gradient norms of equal runs may differ",
    },
    "check": {
        "action": "store_true",
        "help": "exit 1 also when one is not verified or cannot be read",
    },
    "pop": {
        "action": "store_true",
        "help": "in place of the efficiency that was lost: POP's tree, whose factors multiply, and"
        " the flag that acts on a low one",
    },
    "extrap": {
        "type": Path,
        "metavar": "FILE",
        "help": "write every part of a step by GPUs as Extra-P reads it (extrap --json FILE)",
    },
    "predict": {"metavar": "NAME|FILE", "help": "show the time predicted for this cluster, too"},
}


def parser_of(
    command: str,
    description: str,
    *flags: str,
    paths: str = LOGS,
) -> Parser:
    """Returns the parser of `python -m COMMAND PATH...` with these flags of OWN and GROUPS, in this
    order. `paths` is the help text of PATH.
    """
    parser = Parser(prog=f"python -m {command}", description=description)
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help=paths)
    for flag in flags:
        if flag in GROUPS:
            GROUPS[flag](parser)
        else:
            parser.add_argument("--" + flag.replace("_", "-"), **OWN[flag])
    return parser


def terms_of(arguments: argparse.Namespace) -> Terms:
    """Returns the terms that a command line states; those of which it has no flag stay open."""
    return Terms(**{k: v for k, v in vars(arguments).items() if k in Terms.__dataclass_fields__})


def load_runs(command: str, arguments: argparse.Namespace) -> list[Record]:
    """Returns the runs at the paths of the command line. stderr gets a line for each log that is
    refused, and at the end their number."""
    records, refused = load(arguments.paths, facts_of(arguments))
    warn(command, *refused, *unheeded(records, facts_of(arguments)))
    if refused:
        n = len(records)
        warn_at_end(command, f"{len(refused)} not read, {n} read; the reasons stand above")
    return records


def unheeded(records: list[Record], facts: dict[str, Any]) -> list[str]:
    """Returns a line for each fact of the command line that some log states otherwise."""
    lines = []
    for name, value in facts.items():
        logged = {
            name_of(record): peak_tflops(record.gpu_type, record.precision)
            if name == "peak_tflops"
            else getattr(record, name, record.model.get(name))
            for record in records
        }
        differing = {run: known for run, known in logged.items() if known not in (None, value)}
        if differing:
            runs = who(list(differing), len(records))
            known = ", ".join(dict.fromkeys(map(str, differing.values())))
            lines.append(f"{flag_of(name)} {value} is not used for {runs}: known is {known}")
    return lines
