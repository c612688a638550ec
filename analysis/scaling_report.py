"""Every configuration of a study beside its baseline, for machines: scaling_report.json.

    python -m analysis.scaling_report logs/STUDY [--baseline NAME] [--scaling strong|weak]
        [--predict CLUSTER] [--out FILE]

One entry per configuration: n runs, mean, stdev, median and the mean's 95 % interval (Student's t
over the runs) of the steady step time and tokens/s; speedup_vs_1gpu and scaling_efficiency from the
medians, as analysis.scaling has them; or invalid_comparison with what differs. speedup_vs_1gpu is
null where the baseline itself has more GPUs; speedup_vs_baseline is then what there is. With
--predict, predicted_by says what predicted_s of an entry was made of, and predicted_error is
predicted over the measured median, less one. Runs that could not be used are in left_out, one
line each. The scaling is weak where only the batch per GPU is the same everywhere, else strong.
parallel.sweep writes this file at its end; after Slurm's jobs, run this command. Exits 2 when
nothing could be read.
"""

if not __package__:
    import as_script

import sys
from pathlib import Path

from analysis.logs.load import load
from analysis.measured.report_document import FILE, report
from analysis.measured.run_flags import parser_of
from base.errors import command_line, printable
from base.files import add_force_flag
from base.storage import as_json, check_output, output

MARK = '"step_time_rule":'


@command_line("analysis.scaling_report")
def main(argv: list[str] | None = None) -> int:
    """Write the report and say in one line what is in it."""
    flags = {"paths": "", "baseline": "the study's own"}
    names = ("baseline", "scaling", "predict")
    parser = parser_of("analysis.scaling_report", __doc__, *names, **flags)
    parser.add_argument("folder", type=Path, metavar="DIR", help="the folder of a study's runs")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help=f"file to write (default: DIR/{FILE})"
    )
    add_force_flag(parser)
    given = parser.parse_args(argv)
    out = given.out or given.folder / FILE
    check_output(out, MARK, given.force)
    records, refused = load([given.folder])
    found = report(records, refused, given.baseline, given.scaling, given.predict)
    with output(out, MARK, given.force) as file:
        file.write_text(as_json(found))
    for line in found["left_out"]:
        print(printable(f"left out: {line}"))
    invalid = sum("invalid_comparison" in entry for entry in found["configurations"])
    said = f"{out}: {len(found['configurations'])} configurations against {found['baseline']}"
    print(printable(said + (f", {invalid} of them invalid comparisons" if invalid else "")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
