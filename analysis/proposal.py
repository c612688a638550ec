"""The performance section of a proposal for computing time, as Markdown with one picture.

    python -m analysis.proposal PATH... --tokens 2e12 [--size GPUS] [--plot FILE.svg]

Strong and weak scaling by node and GPU beside the ideal; Amdahl's, Gustafson's and the Universal
Scalability Law's parameters with 95 % intervals, their limit and the next two doublings; hours,
GPU-hours, node-hours and kWh for the tokens, at each measured size and at --size; what was
measured, on which machine, how sure it is; five sentences of method. `-` is what no run states;
a note names the flag that gives it. Runs that cannot be compared are left out and named.
Exits 2 when nothing could be read.
"""

import sys
from pathlib import Path

from analysis.common.table import show
from analysis.logs.fact_options import facts_of
from analysis.logs.load import load
from analysis.runs import proposals
from analysis.runs.proposal_parts import Part, Request
from analysis.runs.run_options import parser_of, percent, terms_of, unheeded
from base.bounds import check_flags
from base.errors import UsageError, command_line, warn
from base.files import add_force_flag
from base.storage import output

PICTURES = ("svg", "png")


def _draw(path: Path, parts: list[Part], force: bool) -> None:
    """Writes the picture of the first part and of those with its baseline, of the kind that the
    file's name has."""
    from analysis.pages import charts  # here: --help needs no charts

    kind = path.suffix.lower().removeprefix(".")
    if kind not in PICTURES:
        raise UsageError(f"--plot {path}: name a file .svg or .png")
    shown = [part for part in parts if part.base.record is parts[0].base.record]
    content = charts.pictures(charts.laws(*proposals.drawn(shown)))[kind]
    with output(path, charts.MARK, force) as file:
        file.write_bytes(content)
    titles = [f"not drawn: {part.title}" for part in parts if part not in shown]
    warn("analysis.proposal", f"wrote {path}", *titles)


@command_line("analysis.proposal")
def main(argv: list[str] | None = None) -> int:
    groups = ("baseline", "scaling", "any_commit", "times", "facts", "table")
    parser = parser_of("analysis.proposal", __doc__, *groups)
    parser.set_defaults(format="markdown")
    add = parser.add_argument
    tokens = "tokens to train on, as 2e12"
    add("--tokens", type=float, required=True, metavar="N", help=tokens)
    size = "the GPUs to train on, where that size was not measured: each law predicts it"
    add("--size", type=int, metavar="GPUS", help=size)
    node = "GPUs of a node, where no run states them"
    add("--gpus-per-node", type=int, metavar="N", help=node)
    watts = "what a GPU draws with its share of the node (default: what runs of ours measured of"
    add("--gpu-watts", type=float, metavar="W", help=f"{watts} the GPUs alone)")
    noise = "standard deviation of a run's time, where runs are not repeated"
    add("--noise", type=percent, metavar="SHARE%", help=noise)
    add("--machine", metavar="WORDS", help="the machine, where no run states it")
    add("--libraries", metavar="WORDS", help="libraries and versions, where no run states them")
    add("--plot", type=Path, metavar="FILE", help="draw the scaling as FILE.svg or FILE.png")
    add_force_flag(parser)
    flags = parser.parse_args(argv)
    check_flags(
        flags,
        tokens=(1, 1e18),
        size=(1, 10**9),
        gpus_per_node=(1, 10**6),
        gpu_watts=(1, 1e6),
        noise=(1e-6, 1),
    )
    records, refused = load(flags.paths, facts_of(flags))
    warn("analysis.proposal", *unheeded(records, facts_of(flags)))
    names = Request.__dataclass_fields__
    request = Request(**{name: getattr(flags, name) for name in names})
    tables, parts = proposals.tables(records, refused, terms_of(flags), request)
    if flags.plot:
        _draw(flags.plot, parts, flags.force)
        if flags.format == "markdown":
            print(f"![Speedup against GPUs, measured and by each law]({flags.plot.name})\n")
    show(tables, flags.format, flags.columns)
    return 0


if __name__ == "__main__":
    sys.exit(main())
