"""Where the time of a profiled run went: top ranges, kernels and all-reduces."""

import re
from pathlib import Path
from typing import Any

from analysis.common.table import Column, Table
from analysis.logs.parsing.logfile import Log
from analysis.logs.readers import nsys, torch_trace
from analysis.logs.record import Refusal
from base.files import below
from base.storage import write_json

SUMMARY = "profile_summary.json"
_BESIDE = (".nsys-rep", ".qdrep", ".qdstrm", ".sqlite")  # Nsight's own: `nsys stats` reads them

# What a table is called by old and new versions of nsys, and in our summary.
_KINDS = {
    "ranges": ("nvtx_sum", "nvtxsum", "nvtx_pushpop_sum", "nvtxppsum"),
    "kernels": ("cuda_gpu_kern_sum", "gpukernsum"),
    "operators": ("cpu_op_sum",),
    "cuda_calls": ("cuda_api_sum", "cudaapisum"),
    "system_calls": ("osrt_sum", "osrtsum"),
}
# A call into the library itself, one per collective: NCCL:ncclAllReduce, gloo:all_reduce.
_LIBRARY = re.compile(r"^(?:nccl|gloo|mpi):|^nccl", re.I)
_ALL_REDUCE = re.compile(r"all_?reduce", re.I)
_PARTS = {name: re.compile(rf"(?:^|[/.:]){name}\w*$", re.I) for name in ("forward", "backward")}
_PARTS["optimizer"] = re.compile(r"(?:^|[/:])optimizer(?:_step)?$", re.I)


def entries(rows: list[nsys.Row]) -> list[dict[str, Any]]:
    """A table's rows under our names: name, share (0 to 1), instances, total_s, mean_s."""
    found = []
    for row in rows:
        name = row.get("Range", row.get("Name", row.get("Operation")))
        n = row.get("Instances", row.get("Num Calls", row.get("Count")))
        total_s = row.get("Total Time (s)")
        if name is None or n is None or total_s is None:
            continue
        found.append(
            {
                "name": str(name),
                "share": float(row["Time (%)"]) / 100,
                "instances": int(n),
                "total_s": float(total_s),
                "mean_s": float(total_s) / int(n) if n else None,
            }
        )
    return sorted(found, key=lambda e: -e["total_s"])


def summarise(tables: dict[str, list[nsys.Row]], profiled_s: float | None = None) -> dict[str, Any]:
    """One profile as plain data: every kind of table under our names, and what they say.

    forward, backward, optimizer: the longest range of that name (libraries mark the same again
    inside). all_reduce: `share` of the longest range that is one, with its name; `calls`, how many
    the communication library was asked for; `kernel_share`, of the GPU's time. None where a
    profile has none.
    """
    kinds: dict[str, list[dict[str, Any]]] = {}
    for kind, names in _KINDS.items():
        kinds[kind] = next((entries(tables[name]) for name in names if name in tables), [])
    ranges, kernels = kinds["ranges"], kinds["kernels"]
    if profiled_s:
        for entry in ranges + kernels:
            entry["of_time"] = entry["total_s"] / profiled_s

    def longest(pattern: re.Pattern[str]) -> dict[str, Any] | None:
        return next((e for e in ranges if pattern.search(e["name"])), None)

    reduces = [e for e in ranges if _ALL_REDUCE.search(e["name"])]
    calls = [e for e in reduces if _LIBRARY.search(e["name"])]
    on_gpu = [e for e in kernels if _ALL_REDUCE.search(e["name"]) and "nccl" in e["name"].lower()]
    all_reduce = None
    if reduces or on_gpu:
        all_reduce = {
            "name": reduces[0]["name"] if reduces else None,
            "share": reduces[0]["share"] if reduces else None,
            "calls": sum(e["instances"] for e in calls) if calls else None,
            "kernel_share": sum(e["share"] for e in on_gpu) if on_gpu else None,
            "kernel_instances": sum(e["instances"] for e in on_gpu) if on_gpu else None,
        }
    return {
        **{part: longest(pattern) for part, pattern in _PARTS.items()},
        "all_reduce": all_reduce,
        **kinds,
        "counts": {kind: sum(e["instances"] for e in rows) for kind, rows in kinds.items()},
    }


def read_profile(path: Path) -> dict[str, Any]:
    """One profile's file, format, rank, steps and `summarise`.

    Raises:
        Refusal: missing, cut off, or no profile that is known.
    """
    with Log(path) as log:
        head = log.head
        text = b"Total Time (ns)" in head and log.text()
    about: dict[str, Any] = {"file": path.name, "rank": None, "steps": None, "profiled_s": None}
    if text:
        tables = nsys.tables(text, str(path), [])
        if not tables:
            raise Refusal(str(path), "nsys stats without a table that is known")
        return about | {"format": nsys.FORMAT.name} | summarise(tables)
    if head.lstrip()[:1] == b"{" or path.suffix == ".gz":
        trace = torch_trace.read_trace(path)
        about |= {"format": torch_trace.FORMAT, "rank": trace.rank}
        about |= {"steps": trace.steps or None, "profiled_s": trace.profiled_s or None}
        return about | summarise(trace.tables, trace.profiled_s)
    if b"nvtx_sum" in head or b"stats report" in head:
        raise Refusal(str(path), "truncated: nsys stats that ends before its first table")
    raise Refusal(str(path), "no profile that is known: neither nsys stats' text nor torch's trace")


def profiles_of(run: Path) -> list[Path]:
    """The profiles that a run left, in its own folder and in its jobs'."""
    folders = [run / "profiles", *sorted(run.glob("*.profiles"))]
    found = [p for folder in folders if folder.is_dir() for p in sorted(folder.iterdir())]
    return [p for p in found if p.is_file() and p.name != SUMMARY and p.suffix not in _BESIDE]


def report(path: Path, refused: list[Refusal], top: int) -> list[tuple[str, dict[str, Any]]]:
    """(title, summary) of every profile at a path; a run's are written to its profile_summary.json.

    What cannot be read is added to `refused`.
    """
    if not path.is_dir():
        return [(str(path), profile) for profile in _read_or_refuse([path], refused, top)]
    rows, known = [], len(refused)
    for run, why in below(path, lambda folder: bool(profiles_of(folder)), _no_run):
        if why:
            refused.append(Refusal(str(run), why))
        elif run.is_dir() and (profiles := _read_or_refuse(profiles_of(run), refused, top)):
            content = {"schema_version": "1", "run": run.name, "top": top, "profiles": profiles}
            try:
                (run / "profiles").mkdir(exist_ok=True)
                write_json(run / "profiles" / SUMMARY, content)
            except OSError as error:
                refused.append(Refusal(str(error.filename or run), error.strerror or str(error)))
            rows += [(f"{run}: {profile['file']}", profile) for profile in profiles]
    if not rows and len(refused) == known:
        why = "no profile here (train with --profile-mode torch, or NSYS=1)"
        refused.append(Refusal(str(path), why))
    return rows


def _no_run(name: str) -> bool:
    return name == "attempts"


def _read_or_refuse(files: list[Path], refused: list[Refusal], top: int) -> list[dict[str, Any]]:
    """The profiles that can be read, with the `top` entries of each kind."""
    profiles = []
    for file in files:
        try:
            profile = read_profile(file)
            profiles.append(profile | {kind: profile[kind][:top] for kind in _KINDS})
        except Refusal as refusal:
            refused.append(refusal)
        except OSError as error:
            refused.append(Refusal(str(error.filename or file), error.strerror or str(error)))
    return profiles


def table(title: str, profile: dict[str, Any]) -> Table:
    """One profile: its top entries of each kind, and what they say of backward and all-reduce."""
    columns = [
        Column("kind", "kind"),
        Column("name", "name"),
        Column("share", "share", ".1%"),
        Column("of_time", "of time", ".1%", seldom=True),
        Column("instances", "instances", ",d"),
        Column("total_s", "total s", ".4g"),
        Column("mean_ms", "mean ms", ".4g"),
    ]
    kinds = {"range": "ranges", "kernel": "kernels", "operator": "operators", "cuda": "cuda_calls"}
    rows = []
    for kind, key in kinds.items():
        for entry in profile[key]:
            mean_ms = entry["mean_s"] and 1000 * entry["mean_s"]
            rows.append(entry | {"kind": kind, "mean_ms": mean_ms, "name": _short(entry["name"])})
    return Table(columns, rows, title=title, notes=_notes(profile))


def _short(name: str) -> str:
    return name if len(name) <= 60 else name[:59] + "…"


def _notes(profile: dict[str, Any]) -> list[str]:
    notes = []
    for part in ("forward", "backward", "optimizer"):
        if entry := profile[part]:
            notes.append(f"{part}: {entry['share']:.1%} in {entry['name']}")
    reduces = profile["all_reduce"]
    if reduces and reduces["name"]:
        calls = "" if reduces["calls"] is None else f", {reduces['calls']:,} calls"
        notes.append(f"all-reduce: {reduces['share']:.1%} in {reduces['name']}{calls}")
    if reduces and reduces["kernel_share"] is not None:
        n = reduces["kernel_instances"]
        notes.append(
            f"all-reduce: {reduces['kernel_share']:.1%} of the GPU's time in {n:,} kernels"
        )
    if profile["steps"]:
        notes.append(f"{profile['steps']} steps in {profile['profiled_s']:.4g} s")
    return notes + ["share: of the sum of its kind; profiled: not a timing"]
