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

from analysis.common.tables import Column, Table, writing  # noqa: E402
from models.errors import Parser, UsageError, command_line  # noqa: E402
from models.memory import GB  # noqa: E402
from parallel.config.settings import RunSpec, resolve  # noqa: E402
from parallel.rehearse import Processes, memory_rows, unable  # noqa: E402

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


def table(files: list[Path]) -> Table:
    """Published beside rehearsed."""
    processes = Processes({"megatron", "deepspeed_pipe"})
    found, notes = [], []
    for path in files:
        if not path.exists():
            notes.append(f"{path.name} is not here")
            continue
        for row, spec in runs_of(path):
            rank = processes.rehearse(spec, 0)
            print(f"{row['id']}: {rank.error or f'{rank.seconds:.0f} s'}", file=sys.stderr)
            if rank.error:
                notes.append(f"{row['id']} cannot be rehearsed: {rank.error}")
                continue
            *_, (_, ours, formula) = memory_rows(spec, 0, rank.peak)
            published = float(row["mem_gb"])
            found.append(
                {name: row[name] for name in ("id", "layers", "hidden", "precision")}
                | {name: int(row[name] or 1) for name in ("tp", "pp", "dp", "micro_batch")}
                | {"published": published, "rehearsed": ours / GB, "formula": formula / GB}
                | {"rest": published - ours / GB}
            )
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
        found,
        "Published peaks of rank 0 beside its rehearsed tensors",
        [
            "rest: the CUDA context, NCCL and what the allocator wastes (the planner's: 4.2 GB"
            " and 5 % of the activations), and what their code held otherwise than today's",
            *notes,
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
    made = table(FILES).render("markdown")
    with writing(arguments.out):
        arguments.out.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
