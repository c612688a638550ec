"""Where the time of a profiled run went: top ranges, kernels and collectives.

    python -m analysis.profile PATH... [--top 10] [--format json]

PATH is a run folder, whose profiles/ and <jobid>.profiles/ are read; a folder of such runs; or one
profile: `nsys stats` text or a torch.profiler trace. A share is of the sum of its kind (ranges,
kernels, collectives), as nsys prints it. A range inside another counts in both; in a trace, ranges
of one name count as the time that they cover together. If a trace says how long the profiled steps
were, `of time` is the share of that. A profile shows what takes the time, not how fast the run is.
A file that cannot be read is named in one line, and the rest is still reported; then it exits 2.
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis.common.table import Column, Table, by_key, show
from analysis.common.terminal import cut
from analysis.logs.parsing.logfile import Log
from analysis.logs.readers import nsys, torch_trace
from analysis.logs.record import Refusal
from analysis.runs.run_options import parser_of
from base.bounds import check_flags
from base.errors import Reading, command_line, warn
from base.files import below

_BESIDE = (".nsys-rep", ".qdrep", ".qdstrm", ".sqlite")  # Nsight's own: `nsys stats` reads them
# What a table is called by old and new versions of nsys.
_KINDS = {
    "range": ("nvtx_sum", "nvtxsum", "nvtx_pushpop_sum", "nvtxppsum"),
    "kernel": ("cuda_gpu_kern_sum", "gpukernsum"),
    "operator": ("cpu_op_sum",),
    "cuda": ("cuda_api_sum", "cudaapisum"),
}
# A call into the library itself, one per collective: NCCL:ncclAllReduce, gloo:all_reduce.
_LIBRARY = re.compile(r"^(?:nccl|gloo|mpi):|^nccl", re.I)
_ALL_REDUCE = re.compile(r"all_?reduce", re.I)
# Kernels of cuBLAS (nvjet on Hopper), CUTLASS and Tensile (Cijk); without kernels the operators.
_GEMMS = {
    "kernel": re.compile(r"gemm|nvjet|^Cijk_", re.I),
    "operator": re.compile(r"^aten::(mm|addmm|bmm|baddbmm)$"),
}
_COLUMNS = [
    *by_key(("kind", "name")),
    Column("share", "share", ".1%"),
    Column("of_time", "of time", ".1%", seldom=True),
    Column("instances", "instances", ",d"),
    Column("total_s", "total s", ".4g"),
    Column("mean_ms", "mean ms", ".4g"),
]


@dataclass
class Profile:
    """A profile's rows, by kind, the longest first: name, share (0 to 1), instances, total_s,
    mean_ms and, of a trace, of_time."""

    rows: list[dict[str, Any]]
    rank: int | None = None
    steps: int | None = None
    profiled_s: float | None = None

    def matching(self, kind: str, pattern: re.Pattern[str]) -> list[dict[str, Any]]:
        """Returns the rows of a kind whose name has the pattern."""
        return [row for row in self.rows if row["kind"] == kind and pattern.search(row["name"])]


def read_profile(path: Path) -> Profile:
    """Reads one profile. Raises: Refusal: missing, cut off, or no profile that is known."""
    with Log(path) as log:
        head = log.head
        text = b"Total Time (ns)" in head and log.text()
    if text:
        tables = nsys.tables(text, str(path))
        if not tables:
            raise Refusal(str(path), "nsys stats without a table that is known")
        return Profile(_rows(tables))
    if head.lstrip()[:1] == b"{" or path.suffix == ".gz":
        trace = torch_trace.read_trace(path)
        rows, seconds = _rows(trace.tables), trace.profiled_s or None
        for row in rows:
            if seconds and row["kind"] in ("range", "kernel"):
                row["of_time"] = row["total_s"] / seconds
        return Profile(rows, trace.rank, trace.steps or None, seconds)
    if b"nvtx_sum" in head or b"stats report" in head:
        raise Refusal(str(path), "truncated: nsys stats that ends before its first table")
    raise Refusal(str(path), "no profile that is known: neither nsys stats' text nor torch's trace")


def _rows(tables: dict[str, list[nsys.Row]]) -> list[dict[str, Any]]:
    """Returns one row a range, kernel or copy, of each kind the longest first."""
    rows = []
    for kind, names in _KINDS.items():
        entries = []
        for row in next((tables[name] for name in names if name in tables), []):
            name = row.get("Range", row.get("Name", row.get("Operation")))
            n = row.get("Instances", row.get("Num Calls", row.get("Count")))
            total_s = row.get("Total Time (s)")
            if None in (name, n, total_s):
                continue
            entry = {"kind": kind, "name": str(name), "share": float(row["Time (%)"]) / 100}
            entry |= {"instances": int(n), "total_s": float(total_s)}
            entries.append(entry | {"mean_ms": 1000 * float(total_s) / int(n) if n else None})
        rows += sorted(entries, key=lambda row: -row["total_s"])
    return rows


def profiles_at(path: Path) -> Reading[dict[str, Profile]]:
    """Reads every profile at or below a path, by its title; and says what cannot be read."""
    files, refused = {}, []
    if not path.is_dir():
        files[str(path)] = path
    else:
        for run, reason in below(path, lambda folder: bool(_files_of(folder)), "attempts".__eq__):
            if reason:
                refused.append(Refusal(str(run), reason))
            elif run.is_dir():
                files |= {f"{run}: {file.name}": file for file in _files_of(run)}
        if not files and not refused:
            reason = "no profile here (train with --profile-steps 3-5, or NSYS=1)"
            refused.append(Refusal(str(path), reason))
    profiles = {}
    for title, file in files.items():
        try:
            profiles[title] = read_profile(file)
        except Refusal as refusal:
            refused.append(refusal)
        except OSError as error:
            refused.append(Refusal(str(error.filename or file), error.strerror or str(error)))
    return Reading(profiles, refused)


def _files_of(run: Path) -> list[Path]:
    """Returns the profiles that a run left, in its own folder and in its jobs'."""
    folders = [run / "profiles", *sorted(run.glob("*.profiles"))]
    files = [p for folder in folders if folder.is_dir() for p in sorted(folder.iterdir())]
    return [p for p in files if p.is_file() and p.suffix not in _BESIDE]


def table(title: str, profile: Profile, top: int) -> Table:
    """Makes a table of the `top` rows of each kind, and of what the profile says of all-reduce."""
    rows = []
    for kind in _KINDS:
        longest = [row for row in profile.rows if row["kind"] == kind][:top]
        rows += [row | {"name": cut(row["name"], 60)} for row in longest]
    return Table(_COLUMNS, rows, title=title, notes=notes(profile))


def notes(profile: Profile) -> list[str]:
    """Says how much of the time is GEMMs, the longest range of all-reduce, how often the
    communication library was asked for one, and its share of the GPU's time. (Libraries mark the
    same all-reduce again inside a range.)"""
    lines = []
    for kind, pattern in _GEMMS.items():
        if gemms := profile.matching(kind, pattern):
            share = sum(row["share"] for row in gemms)
            lines.append(f"GEMMs: {share:.1%} of the {kind}s' time")
            break
    if reduces := profile.matching("range", _ALL_REDUCE):
        calls = sum(row["instances"] for row in reduces if _LIBRARY.search(row["name"]))
        counted = f", {calls:,} calls" if calls else ""
        lines.append(f"all-reduce: {reduces[0]['share']:.1%} in {reduces[0]['name']}{counted}")
    kernels = profile.matching("kernel", _ALL_REDUCE)
    if kernels := [row for row in kernels if "nccl" in row["name"].lower()]:
        share, n = (sum(row[key] for row in kernels) for key in ("share", "instances"))
        lines.append(f"all-reduce: {share:.1%} of the GPU's time in {n:,} kernels")
    if profile.steps and profile.profiled_s:
        lines.append(f"{profile.steps} steps in {profile.profiled_s:.4g} s")
    return [*lines, "share: of the sum of its kind; profiled: not a timing"]


@command_line("analysis.profile")
def main(argv: list[str] | None = None) -> int:
    parser = parser_of("analysis.profile", __doc__, "table", paths="run, folder or profile")
    parser.add_argument(
        "--top", type=int, default=10, metavar="N", help="entries of each kind (default: 10)"
    )
    flags = parser.parse_args(argv)
    check_flags(flags, top=(1, 10_000))
    tables, refused = [], []
    for path in flags.paths:
        profiles, unread = profiles_at(path)
        refused += unread
        tables += [table(title, profile, flags.top) for title, profile in profiles.items()]
    warn("analysis.profile", *refused)
    show(tables, flags.format, flags.columns)
    return 2 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
