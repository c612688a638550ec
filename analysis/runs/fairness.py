"""What must be equal before two runs' times are compared, and what makes a comparison doubtful."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, TypeVar

from analysis.common.terminal import who
from analysis.logs.load import name_of
from analysis.logs.record import Record
from analysis.runs.verdict import EARLY, ending
from models.config import PARTS
from parallel.config.axes import AXES, EXPERT_AXES
from parallel.config.duration import CIRCUMSTANCES, WORK
from parallel.config.layout import FORCED
from parallel.config.run_spec import DEFAULTS, settings_of

Run = TypeVar("Run", bound=tuple)  # whose first part is a Record

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
# Settings that leave a step's time as it is: repeats may differ in them.
_NOT_TIMED = CIRCUMSTANCES - {"threads", "breakdown"} | {*WORK, "seed", "save", "export_weights"}


def differences(
    record: Record, baseline: Record, scaling: str = "strong", any_commit: bool = False
) -> list[str]:
    """What of the fixed work differs between the two runs; empty when the comparison is fair.

    `strong`: the same model, sequence length and global batch. `weak`: the same model, sequence
    length and batch per GPU. Either: the same precision, recomputation, attention across
    documents, routing where one is forced, processor and (unless `any_commit`) commit, or another
    one with the same code. Another fact that one of the logs does not state is unknown, not
    different.
    """
    findings = []

    def compare(name: str, mine: object, theirs: object) -> None:
        if mine is not None and theirs is not None and mine != theirs:
            if name == "commit":
                mine, theirs = short_commit(mine), short_commit(theirs)
            flag = " (--any-commit compares them)" if name == "commit" else ""
            name = WORDS.get(name, name)
            findings.append(f"{name} {mine} here, {theirs} in the baseline{flag}")

    sizes = set(record.model) & set(baseline.model)
    if "vocab_size" in sizes and _same_token_ids(record, baseline):
        sizes.remove("vocab_size")
    for size in sorted(sizes):
        mine, theirs = record.model[size], baseline.model[size]
        if isinstance(mine, dict) and isinstance(theirs, dict):
            for name in sorted(mine.keys() & theirs.keys()):
                compare(f"model {name}", mine[name], theirs[name])
        else:
            compare(f"model {size}", mine, theirs)
    if record.model and baseline.model:
        has = [" and ".join(_beside(r)) or "nothing beside a GPT" for r in (record, baseline)]
        compare("model has", *has)
    else:
        compare("parameters", record.params, baseline.params)
    compare("seq_len", record.seq_len, baseline.seq_len)
    if scaling == "strong":
        compare("global_batch", record.global_batch, baseline.global_batch)
    else:
        compare("batch per GPU", batch_per_gpu(record), batch_per_gpu(baseline))
    resets = ((of.facts.get("spec") or {}).get("reset_at_documents") for of in (record, baseline))
    compare("reset_at_documents", *resets)
    routing = [of.routing or "not stated" for of in (record, baseline)]
    if FORCED in routing:
        compare("routing (a forced balance is faster than a router's)", *routing)
    same_code = None not in (record.code, baseline.code) and record.code == baseline.code
    for name in FIXED:
        if name == "commit" and (any_commit or same_code):
            continue
        compare(name, getattr(record, name), getattr(baseline, name))
    return findings


def changes(a: Record, b: Record, settings: bool = True) -> dict[str, tuple[Any, Any]]:
    """Name -> (a's, b's value) of what both state and what differs; `settings`: run.json's details,
    too."""
    pairs = {name: (getattr(a, name), getattr(b, name)) for name in _TIMED}
    if a.model and b.model:
        pairs |= _sizes(a, b)
    else:
        pairs["params"] = (a.params, b.params)
    pairs = {name: pair for name, pair in pairs.items() if None not in pair}
    if settings:
        mine, theirs = _details(a.facts), _details(b.facts)
        pairs = {name: (mine[name], theirs[name]) for name in mine if name in theirs} | pairs
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _sizes(a: Record, b: Record) -> dict[str, tuple[Any, Any]]:
    """Name -> both values of each size of the model that both state, experts' among them."""
    both = a.model.keys() & b.model.keys()
    padded = "vocab_size" in both and _same_token_ids(a, b)
    sizes: dict[str, tuple[Any, Any]] = {}
    for name in (name for name in a.model if name in both):
        mine, theirs = a.model[name], b.model[name]
        if isinstance(mine, dict) and isinstance(theirs, dict):
            sizes |= {key: (mine[key], theirs[key]) for key in mine if key in theirs}
        else:
            sizes[PADDED if padded and name == "vocab_size" else name] = mine, theirs
    return sizes


def _details(facts: dict[str, Any]) -> dict[str, Any]:
    """Settings, versions and kernels of run.json, by name."""
    host = facts.get("host") or {}
    about = {name: facts.get(name) for name in ("kernels", "attention")}
    about |= {name: host.get(name) for name in ("cuda", "nccl", "driver")}
    known = {name: value for name, value in about.items() if value is not None}
    return settings_of(facts) | (facts.get("versions") or {}) | known


def _same_token_ids(record: Record, baseline: Record) -> bool:
    """Whether both vocabularies can be one, padded to multiples of each run's own tp."""
    ranges = [of.token_ids or (of.model["vocab_size"],) * 2 for of in (record, baseline)]
    return max(low for low, _ in ranges) <= min(high for _, high in ranges)


def _beside(record: Record) -> list[str]:
    """What the model has beyond a dense GPT, in words."""
    return [words for part, words in PARTS.items() if record.model.get(part)] + record.uncounted


def unstated(records: list[Record]) -> list[str]:
    """The parts of the fixed work that some run does not state, so they were not compared."""
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
    """Ten characters of a commit, and `+dirty` where files were changed since."""
    name, plus, mark = str(commit).partition("+")
    return name[:10] + plus + mark


def is_changed(record: Record) -> bool:
    return (record.commit or "").endswith("+dirty")


def changed(records: list[Record]) -> list[str]:
    """A note that names the runs whose code was changed since their commit, if there are any."""
    names = [name_of(record) for record in records if is_changed(record)]
    return [f"{CHANGED}: {who(names, len(records))}"] if names else []


def batch_per_gpu(record: Record) -> float | None:
    """Sequences per GPU and step."""
    if record.global_batch is None or not record.gpus:
        return None
    return record.global_batch / record.gpus


def scaling_of(records: list[Record]) -> str:
    """ "weak" where the batch per GPU is the same everywhere and the global batch is not; else
    "strong"."""
    per_gpu = {batch_per_gpu(record) for record in records} - {None}
    batches = {record.global_batch for record in records} - {None}
    return "weak" if len(per_gpu) == 1 < len(batches) else "strong"


def other_kernels(records: list[Record]) -> list[str]:
    """A note that names each run's kernels of attention, and the runs that are deterministic, where
    not all are alike. Runs that do not state it are left out. Where one does not say which of
    torch's kernels it was, these count as one."""
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
    told = _told(by_kernels, len(records))
    return [f"attention runs in other kernels, so ratios of times compare these, too ({told})"]


def other_libraries(records: list[Record]) -> list[str]:
    """A note that names the versions of libraries in which the runs differ, each with its runs."""
    versions: dict[str, list[str]] = defaultdict(list)
    for record in records:
        for library, version in (record.facts.get("versions") or {}).items():
            if version:
                versions[f"{library} {version}"].append(name_of(record))
    count = Counter(version.partition(" ")[0] for version in versions)
    several = {v: names for v, names in versions.items() if count[v.partition(" ")[0]] > 1}
    told = _told(several, len(records))
    return [f"libraries differ, so ratios of times compare these, too ({told})"] if told else []


def _told(runs: dict[str, list[str]], total: int) -> str:
    return "; ".join(f"{what}: {who(names, total)}" for what, names in runs.items())


def notes_on(compared: list[Record], any_commit: bool = False) -> list[str]:
    """What a table says of the runs that it compares."""
    notes = other_kernels(compared) + other_libraries(compared) + changed(compared)
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
    """What the study of all these runs asks, by run.json; "" where they have no such study."""
    questions = {record.facts.get("question") for record in records}
    return (questions.pop() or "") if len(questions) == 1 else ""


def configuration(record: Record) -> tuple:
    """What two runs must share to be repeats of each other."""
    return (named(record), *map(repr, _work(record).values()))


def _work(record: Record) -> dict[str, Any]:
    """What repeats share beside their name, by name: the split, the model, the code, and of our own
    runs every setting that can change a step's time."""
    work = {name: getattr(record, name) for name in (*LAYOUT, *POLICY, *FIXED, "params")}
    spec = settings_of(record.facts)
    # An older run.json lacks settings that were added since: they had their defaults.
    stated = {name: value for name, value in spec.items() if value != DEFAULTS.get(name)}
    settings = {name: value for name, value in stated.items() if name not in _NOT_TIMED}
    inputs = record.facts.get("inputs") or {}
    return work | {
        "commit": record.code or record.commit,
        "model": sorted(record.model.items()),
        "settings": sorted(settings.items()),
        "deepspeed_config": inputs.get("deepspeed_config"),
    }


def unlike(record: Record, other: Record, any_commit: bool = False) -> list[str]:
    """In what two runs of one side differ, that are to be repeats of each other; what one of them
    does not state is not compared."""
    mine, theirs = _work(record), _work(other)
    apart = [n for n in mine if None not in (mine[n], theirs[n]) and mine[n] != theirs[n]]
    if any_commit and "commit" in apart:
        apart.remove("commit")
    if "settings" in apart:
        apart.remove("settings")
        apart += [n for n in changes(record, other) if n in dict(mine["settings"])]
    return [WORDS.get(name, name) for name in dict.fromkeys(apart)]


def named(record: Record) -> str | None:
    """What a study calls the configuration: the run's name without its repeat."""
    return record.configuration or record.run


def by_configuration(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs (tuples that begin with a record) of each configuration by its name, or, where
    others have that name, by its first run's."""
    kinds: dict[tuple, list[Run]] = defaultdict(list)
    for run in runs:
        kinds[configuration(run[0])].append(run)
    names = [named(repeats[0][0]) for repeats in kinds.values()]
    return {
        (name if names.count(name) == 1 else None) or name_of(repeats[0][0]): repeats
        for name, repeats in zip(names, kinds.values(), strict=True)
    }


def group_with(record: Record, groups: dict[str, list[Run]]) -> str | None:
    """Which of `by_configuration`'s names has the run, or repeats of it; None where none has."""
    for name, runs in groups.items():
        if any(run[0] is record for run in runs):
            return name
    if record.configuration is None:
        return None
    wanted = configuration(record)
    return next((n for n, runs in groups.items() if configuration(runs[0][0]) == wanted), None)
