"""What must be equal before two runs' times are compared, and what makes a comparison doubtful."""

from collections import Counter, defaultdict
from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import Any

from analysis.common.convergence import CriticalBatch
from analysis.common.terminal import who
from analysis.logs.naming import name_of
from analysis.logs.record import Record
from analysis.runs.denominators import other_denominators
from analysis.runs.verdict import EARLY, ending
from models.config import PARTS
from parallel.config.layout import AXES, EXPERT_AXES, FORCED
from parallel.config.megatron_options import in_words
from parallel.config.run_spec import settings_of
from parallel.measure.steady_time import Window

# What must be equal for a ratio of two step times to say something about the split alone.
FIXED = ("precision", "recompute", "commit", "gpu_type")
LAYOUT = (
    "engine",
    "gpus",
    *AXES,
    *EXPERT_AXES,
    "dispatcher",
    "routing",
    "micro_batch",
    "global_batch",
    "seq_len",
)
POLICY = ("precision", "recompute", "zero_stage", "sequence_parallel")
UNSTATED = "not stated by every run, so not compared: "  # a table's note
ANY_COMMIT = "runs of different commits are compared, too (--any-commit)"  # a table's note
CHANGED = "run from a changed working tree, so the commit does not say what ran"  # a note
PADDED = "vocab_size (one vocabulary, padded to multiples of tp)"  # a setting that differs
WORDS = {"seq_len": "sequence length", "global_batch": "global batch", "gpu_type": "processor"}
WORDS |= {"gpus": "GPUs", "interval": "iterations per entry"}
# What decides a step's time, of Record's fields.
_TIMED = (*LAYOUT, *POLICY, "interval")


@dataclass(frozen=True)
class Terms:
    """On what terms runs are compared.

    baseline: a run, configuration or system by its name or path; None takes the study's. scaling:
    strong or weak; None takes what the runs are. window: the iterations to use, by the numbers in
    the log. any_commit: runs of different commits are compared, too. critical_batch: what says how
    many samples each batch needs; target_loss: the loss that the runs' own losses say it for.
    """

    baseline: str | None = None
    scaling: str | None = None
    window: Window | None = None
    any_commit: bool = False
    critical_batch: CriticalBatch | None = None
    target_loss: float | None = None


DEFAULT_TERMS = Terms()


def differences(
    record: Record, baseline: Record, scaling: str = "strong", any_commit: bool = False
) -> list[str]:
    """Returns what of the fixed work differs between the two runs; empty where they are fair to
    compare.

    `strong`: the same model, sequence length and global batch. `weak`: the same model, sequence
    length and batch per GPU. Either: the same precision, recomputation, attention across
    documents, routing where one is forced, processor and (unless `any_commit`) commit, or another
    one with the same code. Another fact that one of the logs does not state is unknown, not
    different.
    """
    sizes = _sizes(record, baseline)
    part_of = {
        name: part
        for part, value in record.model.items()
        if isinstance(value, dict)
        for name in value
    }
    names = sorted(sizes, key=lambda name: (part_of.get(name, name), name))
    pairs = {f"model {name}": sizes[name] for name in names if name != PADDED}
    if record.model and baseline.model:
        pairs["model has"] = _parts(record), _parts(baseline)
    else:
        pairs["parameters"] = record.params, baseline.params
    pairs["seq_len"] = record.seq_len, baseline.seq_len
    if scaling == "strong":
        pairs["global_batch"] = record.global_batch, baseline.global_batch
    else:
        pairs["batch per GPU"] = batch_per_gpu(record), batch_per_gpu(baseline)
    specs = [side.facts.get("spec") or {} for side in (record, baseline)]
    pairs["reset_at_documents"] = tuple(spec.get("reset_at_documents") for spec in specs)
    routing = record.routing or "not stated", baseline.routing or "not stated"
    if FORCED in routing:
        pairs["routing (a forced balance is faster than a router's)"] = routing
    pairs |= {name: (getattr(record, name), getattr(baseline, name)) for name in FIXED}
    same_code = record.code is not None and record.code == baseline.code
    if any_commit or same_code:
        del pairs["commit"]
    return [
        _difference(name, *pair)
        for name, pair in pairs.items()
        if None not in pair and pair[0] != pair[1]
    ]


def unfair(
    records: Iterable[Record], baseline: Record, scaling: str, any_commit: bool = False
) -> str:
    """Returns why the times of runs say nothing beside the baseline's, or ""."""
    unequal = [
        difference
        for record in records
        for difference in differences(record, baseline, scaling, any_commit)
    ]
    return f"invalid comparison: {'; '.join(dict.fromkeys(unequal))}" if unequal else ""


def _difference(name: str, value: object, base: object) -> str:
    """Returns one difference from the baseline in words."""
    if name == "commit":
        commits = f"{short_commit(value)} here, {short_commit(base)} in the baseline"
        return f"commit {commits} (--any-commit compares them)"
    return f"{WORDS.get(name, name)} {value} here, {base} in the baseline"


def changes(first: Record, second: Record, settings: bool = True) -> dict[str, tuple[Any, Any]]:
    """Returns {name: (value of the first, value of the second)} of the facts that both state and
    that differ. `settings` adds the details of run.json."""
    pairs = {name: (getattr(first, name), getattr(second, name)) for name in _TIMED}
    if first.model and second.model:
        pairs |= _sizes(first, second)
    else:
        pairs["params"] = (first.params, second.params)
    pairs = {name: pair for name, pair in pairs.items() if None not in pair}
    if settings:
        details, second_details = _details(first.facts), _details(second.facts)
        shared = [name for name in details if name in second_details]
        pairs = {name: (details[name], second_details[name]) for name in shared} | pairs
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def changed_settings(a: Record, b: Record, without: Container[str] = ()) -> list[str]:
    """Returns what `changes` finds, but for the names in `without`, each as "name a -> b"."""
    pairs = changes(a, b).items()
    return [f"{WORDS.get(n, n)} {old} -> {new}" for n, (old, new) in pairs if n not in without]


def _sizes(a: Record, b: Record) -> dict[str, tuple[Any, Any]]:
    """Returns, by name, both values of each size of the model that both state, experts' among
    them."""
    sizes: dict[str, tuple[Any, Any]] = {}
    for name in (name for name in a.model if name in b.model):
        size_a, size_b = a.model[name], b.model[name]
        if isinstance(size_a, dict) and isinstance(size_b, dict):
            sizes |= {key: (size_a[key], size_b[key]) for key in size_a if key in size_b}
        elif name == "vocab_size" and _same_token_ids(a, b):
            sizes[PADDED] = size_a, size_b
        else:
            sizes[name] = size_a, size_b
    return sizes


def _details(facts: dict[str, Any]) -> dict[str, Any]:
    """Returns settings, versions and kernels of run.json, by name."""
    host = facts.get("host") or {}
    details = {name: facts.get(name) for name in ("kernels", "attention")}
    details |= {name: host.get(name) for name in ("cuda", "nccl", "driver")}
    stated = {name: value for name, value in details.items() if value is not None}
    settings = settings_of(facts)
    if "megatron" in settings:
        settings["megatron"] = in_words(settings["megatron"]) or "without options"
    return settings | (facts.get("versions") or {}) | stated


def _same_token_ids(a: Record, b: Record) -> bool:
    """Returns whether both vocabularies can be one, padded to multiples of each run's own tp."""
    ranges = [run.token_ids or (run.model["vocab_size"],) * 2 for run in (a, b)]
    return max(low for low, _ in ranges) <= min(high for _, high in ranges)


def _parts(record: Record) -> str:
    """Returns what the model has beyond a dense GPT, in words."""
    parts = [words for name, words in PARTS.items() if record.model.get(name)]
    return " and ".join(parts + record.uncounted) or "nothing beside a GPT"


def unstated(records: list[Record]) -> list[str]:
    """Returns the parts of the fixed work that some run does not state, so they were not
    compared."""
    if len(records) < 2:
        return []
    names = ("gpus", "seq_len", "global_batch", "precision")
    absent = [name for name in names if any(getattr(r, name) is None for r in records)]
    unknown = [WORDS.get(name, name) for name in absent]
    if any("experts" in r.model and r.routing is None for r in records):
        unknown.append("routing")
    if any(not (r.model or r.params) for r in records):
        unknown.append("model")
    return unknown


def short_commit(commit: object) -> str:
    """Returns ten characters of a commit, and `+dirty` where files were changed since."""
    name, plus, mark = str(commit).partition("+")
    return name[:10] + plus + mark


def is_changed(record: Record) -> bool:
    return (record.commit or "").endswith("+dirty")


def changed(records: list[Record]) -> list[str]:
    """Returns a note that names the runs whose code was changed since their commit, if there are
    any."""
    names = [name_of(record) for record in records if is_changed(record)]
    return [f"{CHANGED}: {who(names, len(records))}"] if names else []


def batch_per_gpu(record: Record) -> float | None:
    """Returns sequences per GPU and step."""
    if record.global_batch is None or not record.gpus:
        return None
    return record.global_batch / record.gpus


def scaling_of(records: list[Record]) -> str:
    """Returns "weak" where the batch per GPU is the same everywhere and the global batch is not;
    else "strong"."""
    per_gpu = {batch_per_gpu(record) for record in records} - {None}
    batches = {record.global_batch for record in records} - {None}
    return "weak" if len(per_gpu) == 1 < len(batches) else "strong"


def other_kernels(records: list[Record]) -> list[str]:
    """Returns a note that names each run's kernels of attention, and the runs that are
    deterministic, where not all are alike.

    Runs that do not state it are left out. Where one does not say which of torch's kernels it was,
    these count as one.
    """
    by_kernels: dict[str, list[str]] = defaultdict(list)
    stated = [record.facts.get("attention") for record in records]
    alone = {kernels.partition(" (")[0] for kernels in stated if kernels} & set(stated)
    for record, kernels in zip(records, stated, strict=True):
        if kernels:
            family = kernels.partition(" (")[0]
            kernels = family if family in alone else kernels
            if (record.facts.get("spec") or {}).get("deterministic"):
                kernels += ", deterministic"
            by_kernels[kernels].append(name_of(record))
    if len(by_kernels) < 2:
        return []
    names = _with_runs(by_kernels, len(records))
    return [f"attention runs in other kernels, so ratios of times compare these, too ({names})"]


def other_libraries(records: list[Record]) -> list[str]:
    """Returns a note that names the versions of libraries in which the runs differ, each with its
    runs."""
    versions: dict[str, list[str]] = defaultdict(list)
    for record in records:
        for library, version in (record.facts.get("versions") or {}).items():
            if version:
                versions[f"{library} {version}"].append(name_of(record))
    count = Counter(version.partition(" ")[0] for version in versions)
    several = {v: names for v, names in versions.items() if count[v.partition(" ")[0]] > 1}
    names = _with_runs(several, len(records))
    return [f"libraries differ, so ratios of times compare these, too ({names})"] if names else []


def _with_runs(runs: dict[str, list[str]], total: int) -> str:
    return "; ".join(f"{fact}: {who(names, total)}" for fact, names in runs.items())


def notes_on(compared: list[Record], any_commit: bool = False) -> list[str]:
    """Returns what a table says of the runs that it compares."""
    notes = other_kernels(compared) + other_libraries(compared) + changed(compared)
    notes += other_denominators(compared)
    if unknown := unstated(compared):
        notes.insert(0, UNSTATED + ", ".join(unknown))
    if any_commit:
        notes.append(ANY_COMMIT)
    if early := [name_of(record) for record in compared if ending(record).verdict == EARLY]:
        notes.append(
            f"stopped early, so timed over fewer steps than planned: {who(early, len(compared))}"
        )
    return notes


def question_of(records: list[Record]) -> str:
    """Returns what the study of all these runs asks, by run.json; "" where they have no such
    study."""
    questions = {record.facts.get("question") for record in records}
    return (questions.pop() or "") if len(questions) == 1 else ""
