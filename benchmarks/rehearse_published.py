"""Rehearses rank 0 of published runs whose GB are known, and writes both as a Markdown table.

    python benchmarks/rehearse_published.py [--out logs/2-core-cpu/rehearsed_published.md]

The runs: the tuning of BLOOM and of a 1.3B model (bigscience, Megatron-DeepSpeed), Jean Zay's 52B,
and one of NeMo's. Each is trained by today's engine of the same kind, not by the code of its time.
Of a file's rows of one pipeline length and precision, the first that the engine can do is taken.
Without the folder shared/published beside the repository, bigscience's are left out.
"""

import argparse
import contextlib
import csv
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from analysis.common.table import Column, Table, writing  # noqa: E402
from base.errors import Parser, UsageError, command_line  # noqa: E402
from models.memory import GB  # noqa: E402
from parallel.config.settings import RunSpec, resolve  # noqa: E402
from parallel.rehearse import Processes, memory_rows, shortened, unable  # noqa: E402

OURS, SHARED = ROOT / "logs" / "published", ROOT.parent / "shared" / "published"
FILES = [SHARED / "bigscience_tr11_a100.csv", SHARED / "bigscience_tr3m_1b3_v100.csv"]
FILES += [OURS / "seed003_jeanzay_v100.csv", OURS / "dgx_h100.csv"]


def run_of(row: dict[str, str]) -> RunSpec:
    """A published row as a run of ours.

    Raises:
        UsageError: the engine does not have this layout.
        ValueError: a size is not published.
    """
    integer = {k: int(row[k]) for k in ("layers", "hidden", "vocab", "seq", "gpus")}
    sizes = {k: int(row[k] or 1) for k in ("tp", "pp", "cp", "micro_batch", "global_batch")}
    deepspeed = "deepspeed" in row["engine"].lower()
    settings: dict[str, Any] = {
        "engine": "deepspeed_pipe" if deepspeed else "megatron",
        "n_layer": integer["layers"],
        "hidden": integer["hidden"],
        "n_head": int(row["heads"] or 32),  # no byte of a recomputed layer depends on them
        "n_kv_head": int(row["kv_heads"] or 0),
        "ffn_hidden": int(row["ffn"] or 0),
        "vocab_size": integer["vocab"],
        "max_seq_len": integer["seq"],
        "gpus": integer["gpus"],
        "activation": "swiglu" if row["glu"] == "1" else "gelu",
        "zero_stage": int(row["zero_stage"] or 0),
        "recompute": row["act_recompute"] or "none",
        "precision": row["precision"],
        "sequence_parallel": row["seq_parallel"] == "1",
        **sizes,
    }
    return resolve((row["id"], settings))


def runs_of(path: Path) -> list[tuple[dict[str, str], RunSpec]]:
    """The rows with GB and their runs, of a pipeline length and precision the first that can be."""
    found: dict[tuple[str, ...], tuple[dict[str, str], RunSpec]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["mem_gb"] and row["status"] == "ok":
                with contextlib.suppress(UsageError, ValueError):
                    spec = run_of(row)
                    if not unable(spec):
                        found.setdefault((row["pp"], row["precision"]), (row, spec))
    return list(found.values())


def rehearsed(row: dict[str, str], spec: RunSpec, processes: Processes) -> dict[str, Any]:
    """A row of the table.

    Raises:
        UsageError: rank 0 could not train a step.
    """
    rank = processes.rehearse(spec, 0)
    if rank.error:
        raise UsageError(f"{row['id']}: {rank.error}")
    *_, (_, ours, formula) = memory_rows(spec, 0, rank.peak)
    published = float(row["mem_gb"])
    return (
        {name: row[name] for name in ("id", "layers", "hidden", "precision")}
        | {name: int(row[name] or 1) for name in ("tp", "pp", "dp", "micro_batch")}
        | {"published": published, "rehearsed": ours / GB, "formula": formula / GB}
        | {"rest": published - ours / GB}
    )


def table(found: list[dict[str, Any]], missing: list[str]) -> Table:
    """Published beside rehearsed."""
    return Table(
        [
            Column("id", "row"),
            Column("layers", "layers"),
            Column("hidden", "hidden"),
            Column("precision", "precision"),
            *(Column(k, k, "d") for k in ("tp", "pp", "dp")),
            Column("micro_batch", "mbs", "d"),
            Column("published", "published GB", ".0f"),
            Column("rehearsed", "rehearsed tensors GB", ".1f"),
            Column("formula", "formula GB", ".1f"),
            Column("rest", "rest GB", "+.1f"),
        ],
        sorted(found, key=lambda row: row["id"]),
        "Published peaks of rank 0 beside its rehearsed tensors",
        [
            "rest: the CUDA context, NCCL and what the allocator wastes (the planner's: 4.2 GB"
            " and 5 % of the activations), and what their code held otherwise than today's",
            *([f"not rehearsed: {', '.join(missing)}"] if missing else []),
        ],
    )


@command_line("rehearse_published")
def main(argv: list[str] | None = None) -> int:
    parser = Parser(
        prog="python benchmarks/rehearse_published.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    out = ROOT / "logs" / "2-core-cpu" / "rehearsed_published.md"
    parser.add_argument("--out", type=Path, default=out, metavar="FILE.md")
    arguments = parser.parse_args(argv)
    runs = [run for path in FILES if path.exists() for run in runs_of(path)]
    runs.sort(key=lambda run: run[1].model.n_layer / run[1].pp * shortened(run[1], 0).grad_accum)
    processes = Processes([spec for _, spec in runs])
    found: list[dict[str, Any]] = []
    for at, (row, spec) in enumerate(runs):
        found.append(rehearsed(row, spec, processes))
        print(f"{row['id']}: {found[-1]['rehearsed']:.1f} GB", flush=True)
        made = table(found, [later["id"] for later, _ in runs[at + 1 :]])
        with writing(arguments.out):  # after each: a stopped one says what is missing
            arguments.out.write_text(made.render("markdown"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
