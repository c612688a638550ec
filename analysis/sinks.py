"""Give the curves of runs to TensorBoard, W&B, MLflow, trackio, OpenTelemetry and Prometheus.

    python -m analysis.sinks PATH... --tensorboard [--wandb] [--mlflow] [--trackio] [--otlp]
        [--openmetrics] [--out DIR]

PATH is a run folder, a log of any format that analysis.tflops reads, or a folder of them. The
points, tags and settings are those that parallel.train writes with the same flags. They go to
DIR/TOOL/RUN; W&B, MLflow and trackio keep all runs together in DIR/TOOL, or at the server that
their variables name (WANDB_MODE=online, MLFLOW_TRACKING_URI, TRACKIO_SERVER_URL). docs/curves.md
says how to look at them.

The same command again writes only steps that are new: DIR/TOOL/RUN/.written.json says which are
there. A run of the same name with other losses is refused; give it another DIR. Exits 1 when a tool
failed or a run was refused, 2 when nothing could be read.
"""

if not __package__:
    import as_script

import re
import sys
from pathlib import Path

from analysis.logs.record import Record
from analysis.measured.flags import load_given, parser_of
from analysis.measured.points import described_as, end_of, points_of
from models.errors import UsageError, command_line, printable, warn
from models.files import named_folder
from parallel.config.settings import add_flags
from parallel.record.sinks import TOOLS, Point, Writer, require

NAME = "analysis.sinks"


@command_line(NAME)
def main(argv: list[str] | None = None) -> int:
    """Write what is asked for; 0 when every tool has every run."""
    parser = parser_of(NAME, __doc__, "facts")
    add_flags(parser, tuple(TOOLS))
    parser.add_argument(
        "--out",
        type=named_folder,
        default=Path("curves"),
        metavar="DIR",
        help="the folder of all tools (default: curves)",
    )
    given = parser.parse_args(argv)
    tools = [tool for tool in TOOLS if getattr(given, tool, False)]
    if not tools:
        raise UsageError(f"say which tools: {', '.join(f'--{tool}' for tool in TOOLS)}")
    require(tools)
    failed, parts = 0, {}
    for record in load_given(NAME, given):
        part = re.sub(r"[^\w.+=-]+", "-", described_as(record).name).strip("-.") or "run"
        if part in parts:
            raise UsageError(
                f"{record.source} and {parts[part]} would both be {given.out}/*/{part}"
            )
        parts[part] = record.source
        points, said = points_of(record)
        for line in said:
            warn(NAME, f"{part}: {line}")
        if not points:
            warn(NAME, f"{part}: no step in {record.source}: nothing to write")
        for tool in tools if points else ():
            failed += not _write(tool, record, points, given.out, part)
    return int(failed > 0)


def _write(tool: str, record: Record, points: list[Point], out: Path, part: str) -> bool:
    """Give a tool the points of a run that it has not got, and say so in a line; whether it took
    them."""
    writer = Writer(tool, described_as(record), out, part)
    if not writer.is_of(points):
        warn(
            NAME,
            f"{out / tool / part} holds another run of that name (its losses up to step"
            f" {writer.last_step} differ from those of {record.source}): give another --out",
        )
        return False
    try:
        new = writer.write(points)
        writer.close(end_of(record))
    except Exception as error:  # a tool's library raises what it likes
        warn(NAME, f"{part}: {tool} failed: {type(error).__name__}: {error}")
        return False
    had = len(points) - new
    print(printable(f"{part}: {tool}: {new} steps written, {had} were there: {out / tool}"))
    return True


if __name__ == "__main__":
    sys.exit(main())
