"""Predicts the runs of a table before their results are known, and keeps what was predicted.

    python -m benchmarks.planner.record LAYOUTS.csv... [--fitted-on FILE.csv...] [--out FOLDER]
    python -m benchmarks.planner.record --check [--out FOLDER]

LAYOUTS.csv has the columns of logs/published without results; a file of logs/predictions is one,
too, so that a later model can predict it again. logs/predictions/README.md says what the columns
of FOLDER/<name>.csv are. --fitted-on gives published rows of the same cards; the constants of each
card are fitted on the times of at most --rows of its rows. Without it, and for other cards, the
card's priors are used. With it the files are <name>-fitted.csv, without the layouts, and
<name>-fitted.toml, the constants; with several cards <name>-fitted-CARD.toml.

--check prints which files today's code would write otherwise.
"""

import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas

from analysis.logs.published_csv import column_name
from analysis.planner import calibration, fitting
from analysis.planner.memory.peak import peaks
from base.errors import Parser, command_line
from base.files import ROOT
from base.units import GIB
from benchmarks.planner.held_out import fit_some, scored
from benchmarks.planner.published_rows import NEEDED, Rows, read_rows
from models.gpus import planning_gpu

FOLDER = ROOT / "logs" / "predictions"
FOUND = ("seconds", "low", "high", "fits", "why", "predicted_gb")
RESULTS = {"step_s", "tokens_per_s", "tflops", "mfu", "memory_gb", "status"}
# What a prediction follows from, beside the reading of logs.
MODEL = sorted(
    [
        *(ROOT / "analysis/planner").glob("memory/*.py"),
        *(ROOT / "analysis/planner").glob("timemodel/*.py"),
        *(
            ROOT / f"analysis/planner/{name}.py"
            for name in ("engines", "certainty", "fitting", "columns", "messages", "runs")
        ),
        *(ROOT / "models" / name for name in ("gpus.py", "gpus.toml", "headroom.py")),
        ROOT / "analysis/planner/widths.toml",
        ROOT / "analysis/logs/published_csv.py",
        *(ROOT / f"analysis/published/{name}.py" for name in ("published_runs", "unstated")),
        ROOT / "benchmarks/planner/published_rows.py",
    ]
)


def model_hash() -> str:
    """Returns a hash of the files that a prediction follows from."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in MODEL)).hexdigest()[:12]


def predicted(rows: Rows, fits: dict[str, fitting.Fit]) -> dict[str, dict[str, str]]:
    """Returns what is predicted of each row, by id; `fits` has constants by card, where they are
    not the card's priors."""
    predictions = {}
    limit = np.array([planning_gpu(name).memory_gb for name in rows.gpu])
    limit = np.where(np.isfinite(rows.gpu_memory_gb), rows.gpu_memory_gb, limit)
    allocated, needed, can_start = rows.allocated, peaks(rows.steps) / GIB, rows.can_start
    for card in np.unique(rows.gpu):
        index = np.flatnonzero(rows.gpu == card)
        fit = fits.get(card) or fitting.card_fit(card)
        steps, machine = rows.steps.take(index), rows.machine.take(index)
        seconds = fit.seconds(steps, machine)
        low, high = fit.interval(seconds, steps, machine)
        for i, *times in zip(index, seconds, low, high, strict=True):
            fits_in, reason = "yes", ""
            if not can_start[i]:
                fits_in, reason = "no", "its engine cannot start it"
            elif not np.isfinite(needed[i]):
                fits_in, reason = "-", "no formula counts the bytes of its parts"
            elif rows.steps.fp8[i]:
                fits_in, reason = "-", "fp8: whether its weights are in bf16, too, is not published"
            elif needed[i] > limit[i]:
                fits_in, reason = "no", f"needs {needed[i]:.0f} of {limit[i]:.0f} GB"
            gigabytes = f"{allocated[i]:.4g}" if np.isfinite(allocated[i]) else ""
            values = (*(f"{time:.5g}" for time in times), fits_in, reason, gigabytes)
            predictions[rows.ids[i]] = dict(zip(FOUND, values, strict=True))
    for name, reason in rows.left_out:
        predictions[name] = dict.fromkeys(FOUND, "") | {"fits": "no", "why": reason}
    return predictions


def record(path: Path, fitted_on: list[Path], count: int, out: Path) -> None:
    """Writes the predictions of one table, and its line of made.csv."""
    layouts = pandas.read_csv(path, dtype=str, keep_default_na=False)
    columns = [c for c in layouts if c not in ("id", *FOUND) and layouts[c].any()]
    if results := [c for c in columns if column_name(c) in RESULTS]:
        sys.exit(f"{path} has results: {', '.join(results)}")
    name = path.stem.removesuffix("-fitted") + ("-fitted" if fitted_on else "")
    columns = [] if fitted_on else columns  # they stand in <name>.csv
    out.mkdir(parents=True, exist_ok=True)
    fits = _fits(name, fitted_on, count, out) if fitted_on else {}
    predictions = predicted(read_rows([path], tuple(n for n in NEEDED if n != "step_s")), fits)
    found = pandas.DataFrame([predictions[name] for name in layouts.id], columns=FOUND)
    table = pandas.concat([layouts.id, found, layouts[columns]], axis=1)
    table.to_csv(out / f"{name}.csv", index=False)
    values = {"file": name, "rows": len(layouts), "fitted_on": " ".join(p.name for p in fitted_on)}
    values |= {"fitted_rows": count if fitted_on else 0, "model": model_hash(), "commit": _commit()}
    made, line = out / "made.csv", pandas.DataFrame([values])
    if made.exists():
        older = pandas.read_csv(made, dtype=str, keep_default_na=False)
        line = pandas.concat([older[older.file != name], line])
    line.sort_values("file").to_csv(made, index=False)


def _fits(name: str, fitted_on: list[Path], count: int, out: Path) -> dict[str, fitting.Fit]:
    """Returns the constants of each card, fitted on at most `count` of its rows in the tables
    `fitted_on`, and writes them to a file each."""
    rows, fits = read_rows(fitted_on), {}
    usable = scored(rows)
    cards = np.unique(rows.gpu[usable])
    for card in cards.tolist():
        fits[card], chosen = fit_some(rows, usable[rows.gpu[usable] == card], count, card)
        i = chosen[0]
        facts = {"gpus_per_node": int(rows.gpus_per_node[i]), "flash": bool(rows.steps.flash[i])}
        facts |= {"gpu": card, "gpu_memory_gb": float(rows.gpu_memory_gb[i])}
        cluster = calibration.Calibration(name=card, fit=fits[card], **facts)
        source = f"fitted for predictions on record of {name}"
        of_card = f"-{card.replace(' ', '-')}" if len(cards) > 1 else ""
        ids = [rows.ids[k] for k in chosen]
        calibration.write(out / f"{name}{of_card}.toml", cluster, source, ids)
    return fits


def _commit() -> str:
    """Returns the last commit that changed the model; with a + where its files were changed
    since."""
    last, changed = (
        subprocess.run(["git", *words, "--", *MODEL], cwd=ROOT, capture_output=True, text=True)
        for words in (["log", "-1", "--format=%h", "--abbrev=10"], ["status", "--porcelain"])
    )
    return last.stdout.strip() + ("+" if changed.stdout.strip() else "")


@command_line("record")
def main(argv: list[str] | None = None) -> int:
    parser = Parser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("layouts", nargs="*", type=Path)
    add("--fitted-on", nargs="+", type=Path, default=[])
    add("--rows", type=int, default=fitting.MAX_ROWS, help="rows to fit at most")
    add("--out", type=Path, default=FOLDER)
    add("--check", action="store_true", help="print which files an older model made")
    arguments = parser.parse_args(argv)
    if arguments.check:
        made = pandas.read_csv(arguments.out / "made.csv")
        old = made.file[made.model != model_hash()].tolist()
        print("\n".join(old) or "all were made by today's model")
        return bool(old)
    for path in arguments.layouts:
        record(path, arguments.fitted_on, arguments.rows, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
