"""Every published log that failed is judged so, at its line; no log that ended well is."""

import csv
import re

import pytest

from analysis.logs.readers import read
from analysis.logs.record import Refusal
from analysis.logs.verdict import judge, timed
from tests.conftest import SHARED

LOGS = SHARED / "logs"
TRUTH = LOGS / "truth.csv"
VERDICTS = {  # a word of the independent judgement -> ours
    "OOM": "OOM",
    "cancelled": "cancelled",
    "KeyboardInterrupt": "cancelled",
    "time limit": "timeout",
    "launcher error": "no data",
    "traceback": "traceback",
}


def truths():
    if not TRUTH.is_file():
        return []
    with TRUTH.open(newline="") as lines:
        return list(csv.DictReader(lines))


@pytest.mark.skipif(not TRUTH.is_file(), reason=f"no raw logs at {LOGS}")
def test_the_verdicts_agree_with_the_independent_ones():
    wrong, failed = [], 0
    for truth in truths():
        try:
            record = read(LOGS / truth["path"])
        except Refusal:
            continue  # which files are refused, and why, is the readers' own test
        judgement = judge(record, timed(record))
        said = (judgement.verdict, judgement.line_no)
        if truth["failed"] == "yes":
            failed += 1
            kind = next(v for word, v in VERDICTS.items() if word in truth["fail_kind"])
            if said != (kind, int(truth["fail_line_no"])):
                wrong.append((truth["path"], said, kind, truth["fail_line_no"]))
        elif judgement.verdict == "diverged":  # its proof is the last loss, and no word of an end
            last = re.findall(r"loss\W{1,6}([\w.+-]+)", (LOGS / truth["path"]).read_text())[-1]
            if last not in ("nan", "inf"):
                wrong.append((truth["path"], said, last, ""))
        elif judgement.verdict not in ("complete", "stopped early", "end unknown", "no data"):
            wrong.append((truth["path"], said, "no failure", ""))
    assert wrong == []
    assert failed >= 10
