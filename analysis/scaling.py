"""Strong and weak scaling curves over repeats, against a baseline of any number of GPUs.

    python -m analysis.scaling PATH... [--baseline NAME] [--scaling weak] [--predict CLUSTER]

One row per number of GPUs: the median over the repeats at that size with their spread, speedup,
efficiency and Karp and Flatt's serial share; below, the serial share that Amdahl's law (strong)
or Gustafson's (weak) fits to all rows. A run whose fixed work is not the baseline's, or whose
commit is not (unless --any-commit), is left out of the fit and says what differs. Exits 2 when
nothing could be read.
"""

if not __package__:
    import as_script

import sys

from analysis.common.tables import show
from analysis.logs.flags import facts_of
from analysis.measured import scaling
from analysis.measured.flags import parser_of
from models.errors import command_line


@command_line("analysis.scaling")
def main(argv: list[str] | None = None) -> int:
    """Print the scaling curve of what is at the paths."""
    flags = ("baseline", "scaling", "any_commit", "times", "facts", "predict", "table")
    parser = parser_of("analysis.scaling", __doc__, *flags, baseline="fewest GPUs")
    given = parser.parse_args(argv)
    shown = scaling.report(
        given.paths,
        given.baseline,
        given.scaling,
        facts=facts_of(given),
        window=given.window,
        rule=given.rule,
        any_commit=given.any_commit,
        predict=given.predict,
    )
    show([shown], given.format, given.columns)
    return 0


if __name__ == "__main__":
    sys.exit(main())
