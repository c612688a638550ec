"""Predict the runs of a table before their results are known, and keep what was predicted.

    python -m benchmarks.planner.record LAYOUTS.csv... [--fitted-on FILE.csv...] [--out FOLDER]
    python -m benchmarks.planner.record --check [--out FOLDER]

LAYOUTS.csv has the columns of logs/published without results; a file of logs/predictions is one,
too, so that a later model can predict it again. FOLDER/<name>.csv gets a row for each of its rows:
id, seconds, low, high (they hold 80 %), fits (yes, no, - where what the row says leaves the memory
open), why
(what speaks against the run), predicted_gb (what PyTorch allocates at the peak, where every tensor
is counted), and the layout. --fitted-on gives published rows of the same cards; the constants of
each card are fitted on the times of at most --rows of its rows. Without it, and for other cards,
the card's priors are used. With it the files are <name>-fitted.csv, without the layouts, and
<name>-fitted.toml, the constants; with several cards <name>-fitted-CARD.toml. made.csv says of each
file which model made it: a hash of the planner's code and constants, and the commit.

--check prints which files today's code would write otherwise.
"""

import csv
import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np

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
MODEL = (
    *(f"analysis/planner/{name}.py" for name in ("engines", "fitting", "columns")),
    "analysis/planner/runs.py",
    *(f"analysis/planner/memory/{name}.py" for name in ("pipeline", "model_states", "peak")),
    *(f"analysis/planner/memory/{name}.py" for name in ("activations", "output", "buffers")),
    *(f"analysis/planner/timemodel/{name}.py" for name in ("machine", "compute", "links", "layer")),
    *(f"analysis/planner/timemodel/{name}.py" for name in ("stages", "replicas", "step")),
    *("models/gpus.py", "models/gpus.toml", "models/headroom.py", "analysis/logs/published_csv.py"),
    *(f"analysis/published/{name}.py" for name in ("published_runs", "unstated")),
    "benchmarks/planner/published_rows.py",
)


def model_hash() -> str:
    """A hash of the files that a prediction follows from."""
    digest = hashlib.sha256()
    for path in MODEL:
        digest.update((ROOT / path).read_bytes())
    return digest.hexdigest()[:12]


def predicted(rows: Rows, fits: dict[str, fitting.Fit]) -> dict[str, dict[str, str]]:
    """What is predicted of each row, by id; `fits`: constants by card, else the priors."""
    predictions = {}
    cards = np.array(rows.gpu)
    limit = np.array([planning_gpu(name).memory_gb for name in rows.gpu])
    limit = np.where(np.isfinite(rows.gpu_memory_gb), rows.gpu_memory_gb, limit)
    allocated = rows.allocated
    full, start, fp8 = peaks(rows.x) / GIB, rows.can_start, rows.x.fp8
    for card in np.unique(cards):
        here = np.flatnonzero(cards == card)
        fit = fits.get(card) or fitting.prior_fit(fitting.priors_of(card))
        x, machine = rows.x.take(here), rows.machine.take(here)
        seconds = fit.seconds(x, machine)
        low, high = fit.interval(seconds, x, machine)
        for i, *times in zip(here, seconds, low, high, strict=True):
            fit_in, why = "yes", ""
            if not start[i]:
                fit_in, why = "no", "its engine cannot start it"
            elif not np.isfinite(full[i]):
                fit_in, why = "-", "no formula counts the bytes of its parts"
            elif fp8[i]:
                fit_in, why = "-", "fp8: whether its weights are in bf16, too, is not published"
            elif full[i] > limit[i]:
                fit_in, why = "no", f"needs {full[i]:.0f} of {limit[i]:.0f} GB"
            texts = [f"{t:.5g}" for t in times]
            gb = f"{allocated[i]:.4g}" if np.isfinite(allocated[i]) else ""
            predictions[rows.ids[i]] = dict(zip(FOUND, (*texts, fit_in, why, gb), strict=True))
    for name, why in rows.left_out:
        predictions[name] = dict(zip(FOUND, ("", "", "", "no", why, ""), strict=True))
    return predictions


def record(path: Path, fitted_on: list[Path], count: int, out: Path) -> None:
    """Write the predictions of one table, and its line of made.csv."""
    with path.open(newline="") as stream:
        layouts = list(csv.DictReader(stream))
    columns = [c for c in layouts[0] if c not in ("id", *FOUND) and any(r[c] for r in layouts)]
    if results := [c for c in columns if column_name(c) in RESULTS]:
        sys.exit(f"{path} has results: {', '.join(results)}")
    name = path.stem.removesuffix("-fitted") + ("-fitted" if fitted_on else "")
    columns = [] if fitted_on else columns  # they stand in <name>.csv
    fits = {}
    out.mkdir(parents=True, exist_ok=True)
    if fitted_on:
        seen = read_rows(fitted_on)
        known = scored(seen)
        cards = sorted({seen.gpu[i] for i in known})
        for card in cards:
            index = np.array([i for i in known if seen.gpu[i] == card])
            fit, chosen = fit_some(seen, index, count, card)
            fits[card] = fit
            i = chosen[0]
            where = seen.gpu[i], seen.gpu[i], int(seen.gpus_per_node[i])
            size, flash = float(seen.gpu_memory_gb[i]), bool(seen.x.flash[i])
            cluster = calibration.Calibration(*where, size, fit, flash=flash)
            source = f"fitted for predictions on record of {name}"
            of_card = f"-{card.replace(' ', '-')}" if len(cards) > 1 else ""
            calibration.write(
                out / f"{name}{of_card}.toml", cluster, source, [seen.ids[k] for k in chosen]
            )
    predictions = predicted(read_rows([path], tuple(n for n in NEEDED if n != "step_s")), fits)
    with (out / f"{name}.csv").open("w", newline="") as stream:
        write = csv.writer(stream, lineterminator="\n")
        write.writerow(["id", *FOUND, *columns])
        for row in layouts:
            values = predictions[row["id"]]
            write.writerow([row["id"], *values.values(), *(row[c] for c in columns)])
    _note(out / "made.csv", name, len(layouts), fitted_on, count if fitted_on else 0)


def _commit() -> str:
    """The last commit that changed the model; with a + where its files were changed since."""
    last, changed = (
        subprocess.run(["git", *what, "--", *MODEL], cwd=ROOT, capture_output=True, text=True)
        for what in (["log", "-1", "--format=%h", "--abbrev=10"], ["status", "--porcelain"])
    )
    return last.stdout.strip() + ("+" if changed.stdout.strip() else "")


def _note(path: Path, name: str, rows: int, fitted_on: list[Path], count: int) -> None:
    """Put the file's line into made.csv, in the place of an older one."""
    head = ["file", "rows", "fitted_on", "fitted_rows", "model", "commit"]
    lines = list(csv.DictReader(path.open(newline=""))) if path.exists() else []
    values = (name, rows, " ".join(p.name for p in fitted_on), count, model_hash(), _commit())
    lines = [line for line in lines if line["file"] != name]
    lines.append(dict(zip(head, map(str, values), strict=True)))
    with path.open("w", newline="") as stream:
        write = csv.DictWriter(stream, head, lineterminator="\n")
        write.writeheader()
        write.writerows(sorted(lines, key=lambda line: line["file"]))


def stale(out: Path) -> list[str]:
    """Files of `out` that another model than today's made."""
    with (out / "made.csv").open(newline="") as stream:
        return [r["file"] for r in csv.DictReader(stream) if r["model"] != model_hash()]


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
        old = stale(arguments.out)
        print("\n".join(old) or "all were made by today's model")
        return bool(old)
    for path in arguments.layouts:
        record(path, arguments.fitted_on, arguments.rows, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
