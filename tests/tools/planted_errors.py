"""How many planted errors does analysis.audit find, and how often is it wrong about clean rows?

    python tests/tools/planted_errors.py FILE.csv... [--errors 500] [--seed 0]

Takes the tables that the audit finds nothing in, plants one error at a time into one row, and asks
whether the audit then finds something in that row (or says that it equals another). The kinds: a
number in another unit (x 1000, / 1000, x 60, x 100), two digits swapped, another number of GPUs,
tokens/s left over from another row, and the results of another row copied. An error is planted
only where it changes what the row says by more than its printed digits: two equal digits swapped
are none. Only rows with a layout, a batch, a sequence, a time and tokens/s are used: where a number
stands alone, no table can show that it is wrong. Prints one line a kind.
"""

import csv
import random
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from analysis.published.audited import audit_paths
from analysis.published.findings import Finding
from analysis.published.read_tables import meaning
from base.errors import Parser, UsageError, command_line

NEEDED = ("gpus", "tp", "pp", "dp", "seq_len", "global_batch", "step_s")
RATES = ("tokens_per_s", "tflops", "mfu")
FACTORS = {"unit": (1000, 0.001, 60, 100), "gpus": (2, 0.5, 4, 8)}
KINDS = ("unit", "digits", "gpus", "stale", "copied")
Table = list[dict[str, str]]


def audit(rows: Table, name: str) -> list[Finding]:
    """What the audit finds in rows."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        return audit_paths([path]).findings


def plant(chance: random.Random, kind: str, rows: Table, at: int, names: dict[str, str]) -> bool:
    """Plant one error in rows[at]; whether the row says something else now."""
    row, other, before = rows[at], chance.choice(rows), dict(rows[at])
    printed = [names[k] for k in ("step_s", *RATES) if k in names and row[names[k]]]
    if kind in ("stale", "copied"):
        cells = [names["tokens_per_s"]] if kind == "stale" else printed
        row.update({cell: other[cell] for cell in cells})
        return row != before
    cell = names["gpus"] if kind == "gpus" else chance.choice(printed)
    if kind in FACTORS:
        row[cell] = f"{float(row[cell]) * chance.choice(FACTORS[kind]):.6g}"
    elif pairs := list(re.finditer(r"(?=(\d)(?!\1)\d)", row[cell])):
        i = chance.choice(pairs).start()
        row[cell] = row[cell][:i] + row[cell][i : i + 2][::-1] + row[cell][i + 2 :]
    return row != before


@command_line("planted_errors")
def main(argv: list[str] | None = None) -> int:
    """Plant, audit, count."""
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--errors", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    chance = random.Random(arguments.seed)
    clean: list[tuple[str, Table, dict[str, str]]] = []
    alarms = audited = 0
    for path in arguments.files:
        with path.open(newline="", encoding="utf-8") as lines:
            rows = list(csv.DictReader(lines))
        names = {meaning(heading, {}): heading for heading in rows[0]}
        wrong = [finding.line - 2 for finding in audit(rows, path.name)]
        audited, alarms = audited + len(rows), alarms + len(wrong)
        needed = [names.get(k, "") for k in (*NEEDED, "tokens_per_s")]
        rows = [row for i, row in enumerate(rows) if i not in wrong and all(map(row.get, needed))]
        # Large tables in pieces, so that 500 audits take minutes.
        for start in range(0, len(rows), 60):
            piece = rows[start : start + 60]
            if len(piece) > 3 and not audit(piece, path.name):
                clean.append((path.name, piece, names))
    if not clean:
        raise UsageError("no table has whole rows: layout, batch, sequence, time and tokens/s")
    tried, caught = Counter(), Counter()
    while tried.total() < arguments.errors:
        kind = KINDS[tried.total() % len(KINDS)]
        name, piece, names = chance.choice(clean)
        rows = [dict(row) for row in piece]
        at = chance.randrange(len(rows))
        if not plant(chance, kind, rows, at, names):
            continue
        tried[kind] += 1
        where = f"line {at + 2}"
        caught[kind] += any(f.line == at + 2 or where in f.message for f in audit(rows, name))
    for kind in KINDS:
        print(f"{kind:8} {caught[kind]:4} of {tried[kind]:4}")
    share = caught.total() / tried.total()
    print(f"all      {caught.total():4} of {tried.total():4} = {share:.1%}")
    print(f"rows audited before planting: {audited}; findings there: {alarms}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
