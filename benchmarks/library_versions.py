"""How fast training is with other versions of the libraries: the same runs, in turns.

    python benchmarks/library_versions.py NAME=PYTHON[:FOLDER...] ... [--repeats 3]
        [--study slurm/parity.toml] [--only RUN ...] [--out logs/library-versions]

PYTHON is an interpreter that has the libraries (.venv/bin/python); folders after it come first on
its module path (`pip install --no-deps --target FOLDER megatron-core==0.17.1` makes one). Each
repeat trains the runs once with each, and begins with the next one. Prints, and writes to
OUT/result.md, a Markdown table: the step time with the first, and for each other one its time over
the first's, the median of the repeats and the lowest and highest. Ends with 1 when a run failed.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1]))

from base.errors import Parser, command_line
from base.files import ROOT


def step_times(python: str, folders: list[str], study: Path, only: list[str], logs: Path) -> dict:
    """Run -> seconds of a step, trained now with this interpreter. What failed is left out."""
    path = os.pathsep.join([str(ROOT), *folders])
    environment = os.environ | {"PYTHONPATH": path}
    sweep = [python, "-m", "parallel.sweep", str(study), "--logs", str(logs)]
    subprocess.run([*sweep, *(["--only", *only] if only else [])], env=environment, cwd=ROOT)
    read = [sys.executable, "-m", "analysis.tflops", str(logs / study.stem), "--format", "json"]
    done = subprocess.run(read, cwd=ROOT, capture_output=True, check=True)
    rows = json.loads(done.stdout)
    return {Path(row["source"]).name: row["steady_step_s"] for row in rows if row["steady_step_s"]}


@command_line("benchmarks/library_versions.py")
def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python benchmarks/library_versions.py", description=__doc__)
    parser.add_argument("sides", nargs="+", metavar="NAME=PYTHON[:FOLDER...]")
    parser.add_argument("--repeats", type=int, default=3, metavar="N")
    parser.add_argument("--study", type=Path, default=ROOT / "slurm/parity.toml")
    parser.add_argument("--only", nargs="+", default=[], metavar="RUN")
    parser.add_argument("--out", type=Path, default=ROOT / "logs/library-versions")
    arguments = parser.parse_args(argv)
    sides = {}
    for side in arguments.sides:
        name, _, paths = side.partition("=")
        sides[name] = [str(Path(path).absolute()) for path in paths.split(":")]
    times: dict[str, dict[str, list[float]]] = {name: {} for name in sides}
    for repeat in range(arguments.repeats):
        names = list(sides)
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            python, *folders = sides[name]
            logs = arguments.out.absolute() / name / str(repeat)
            for run, step_s in step_times(
                python, folders, arguments.study, arguments.only, logs
            ).items():
                times[name].setdefault(run, []).append(step_s)
    first, *others = sides
    lines = [f"| run | {first}, s/iter | {' | '.join(f'{name} / {first}' for name in others)} |"]
    lines.append("| --- | ---: |" + " ---: |" * len(others))
    complete = True
    for run, base in times[first].items():
        cells = [f"{median(base):.4f}"]
        for name in others:
            mine = times[name].get(run, [])
            if len(mine) != len(base):
                complete = False
                cells.append(f"- ({len(base) - len(mine)} of {len(base)} runs have no step time)")
                continue
            ratios = [m / b for m, b in zip(mine, base, strict=True)]
            cells.append(f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
        lines.append(f"| {run} | {' | '.join(cells)} |")
    (arguments.out / "result.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return 0 if complete else 1


if __name__ == "__main__":
    sys.exit(main())
