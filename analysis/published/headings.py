"""What a heading of a published table means, in words of any publisher, and what a cell says.

A quantity has our name and one unit: seconds, tokens/s and samples/s of all GPUs, TFLOP/s of one
GPU, GB, shares from 0 to 1. A cell keeps the interval that its printed digits leave open.
"""

import math
import re
from dataclasses import dataclass, replace
from functools import lru_cache

from analysis.logs.published_csv import HEADINGS, column_name

# What a row is, not how fast it was.
COUNTS = (
    "gpus", "nodes", "gpus_per_node", "tp", "pp", "dp", "cp", "ep", "vpp", "mp", "micro_batch",
    "gas", "global_batch", "batch", "seq_len", "layers", "hidden", "heads", "ffn", "vocab", "steps",
)  # fmt: skip
MEASURED = (
    "step_s", "steps_per_s", "tokens_per_s", "samples_per_s", "tflops", "mfu", "hfu", "memory_gb",
    "speedup", "efficiency", "wall_s", "train_days", "tokens",
)  # fmt: skip
WORDS = ("model", "gpu_type", "precision", "recompute", "date", "commit", "status", "cluster")
NAMES = (*COUNTS, *MEASURED, *WORDS, "params_b", "gpu_memory_gb")

_GPU = r"(?:gpu|device|card|chip|accelerator)"
CARD = r"(?:(?:nvidia|amd) )?(?:gb|mi|[hvpabl])\d{2,3}[sx]?"
_OF_PEAK = re.compile(r"^(?:%|percent|percentage|share|fraction) of (?:the )?(?:[a-z]+ )?peak\b")
_IGNORED = re.compile(
    r"\b(?:std|stdev|variance|p\d\d|loss|predicted|estimated|simulated|lr|learning|"
    r"url|link|notes?|remarks?|formula|inferred|source|id|param dtype|ideal|perfect|theoretical|"
    r"roofline|bound|limit|peak(?=.*flop)|max(?:imum)? possible|linear|error|difference|diff|"
    r"(?:per|/) ?dp|change|gain|improvement|reduction|overhead|interval|ci)\b"
)
# The first pattern that a heading has is its meaning.
_PATTERNS: tuple[tuple[str, str], ...] = (
    ("speedup", r"\bspeed ?up\b|\bscaling factor\b"),
    ("efficiency", r"\befficiency\b|\beff\b"),
    ("hfu", r"\bhfu\b|\bhardware flops? utili"),
    ("mfu", r"\bmfu\b|\bmodel flops? utili|\bflops? utili"),
    ("train_days", r"\btokens?\b.*\bdays\b|\bdays\b.*\btokens?\b"),
    ("tflops", r"\bm?(?:[tpg]|tera|peta|giga)?flops?\b"),
    (
        "tokens_per_s",
        r"\b[km]?tok(?:en)?s? ?(?:/|per|p) ?(?:second|sec|s)\b|\btgs\b|\btps\b|"
        rf"\btok(?:en)?s? ?(?:/|per) ?{_GPU}s? ?(?:/|per) ?s|\btokens? (?:throughput|second|sec)\b|"
        r"\bthroughput\b.*\btok|\bthroughput t/s\b|\btok(?:en)?s? ?(?:/|per) ?(?:day|hour)\b",
    ),
    (
        "samples_per_s",
        r"\b(?:samples?|seqs?|sequences?|sentences?|examples?) ?(?:/|per) ?(?:second|sec|s)\b|"
        rf"\b(?:samples?|sequences?) ?(?:/|per) ?{_GPU} ?(?:/|per) ?s|\bthroughput\b.*\bsample|"
        r"\bthroughput s/s\b",
    ),
    (
        "step_s",
        r"\b(?:s|sec|secs|seconds?|ms|milliseconds?|time) ?(?:/|per) ?(?:training )?"
        r"(?:iter|it|iteration|step|batch)s?\b|"
        r"\b(?:step|iteration|iter|batch) (?:time|timing|duration|latency|secs?|seconds|ms|s)\b|"
        r"\btime step\b|\bmean step\b|\belapsed time per\b|^elapsed (?:time )?ms$",
    ),
    ("steps_per_s", r"\b(?:steps|iterations|iters|its?) ?(?:/|per) ?(?:second|sec|s)\b"),
    ("wall_s", r"\bwall\b|\b(?:total|training|epoch|run) ?time\b|\bruntime\b|\btime to train\b"),
    ("memory_gb", r"\bmem(?:ory)?\b|\bvram\b|\bhbm\b"),
    (
        "micro_batch",
        rf"\bmbs\b|\bmicro ?(?:batch|bsz?)|\bmic bs\b|\bbatch(?: size)? ?(?:/|per) ?{_GPU}|"
        rf"\b(?:per|/) ?{_GPU} (?:train(?:ing)? )?batch|\blocal batch\b",
    ),
    ("gas", r"\bgas?\b|\bgrad(?:ient)? ?acc|\baccum|\bmicro ?num\b|\bn micro"),
    ("gas", r"\bnum(?:ber)? (?:of )?micro ?batches\b|\bmicrobatches\b"),
    ("global_batch", r"^batch(?: size)?(?: in)? tokens$|\btrain(?:ing)? batch\b"),
    ("global_batch", r"\bgbsz?\b|\bglob(?:al)? ?(?:batch|bsz?)\b|\b(?:total|effective) batch\b"),
    ("batch", r"^batch(?: ?size)?s?(?: in)?(?: sequences| samples)?$|^bsz?$"),
    ("seq_len", r"\bseq(?:uence)?\b|\bcontext(?: len|$)|\bctx\b|\bseq ?len"),
    ("gpus_per_node", rf"\b{_GPU}s? ?(?:/|per) ?(?:node|server|host)\b|\bppn\b"),
    ("gpu_type", rf"\b{_GPU} ?(?:type|model|name)\b|^hardware$|^accelerator$|^gpu$|^system$"),
    ("memory_gb", r"\bgpu m\b"),
    ("nodes", r"^(?:# |n |num |number of |no of )?(?:nodes?|hosts|servers)(?: count)?\b"),
    (
        "gpus",
        r"^(?:# ?|n |num |number of |no of |total |total number of )?(?:of )?"
        rf"(?:{_GPU}s|world(?: ?size)?)(?: used| count| total)?$|^{_GPU} (?:num|number|count)$|"
        rf"^(?:# |n |num |number of ){_GPU}$|^ngpus?$|"
        rf"^(?:# ?|n |num |number of )?{CARD}s(?: gpus)?$|^(?:# ?|n |num |number of )?gpus {CARD}$",
    ),
    ("etp", r"\betp\b"),
    ("vpp", r"\bv(?:irtual )?pp?\b|\bvirtual|\binterleav"),
    ("tp", r"\btp\b|\btensor (?:model )?parallel|\btensor$"),
    ("mp", r"^(?:mp|model parallel)(?: size)?$"),
    ("pp", r"\bpp\b|\bpipeline (?:model )?parallel|\bpipeline$"),
    ("dp", r"\bdp\b|\bdata parallel"),
    ("cp", r"\bcp\b|\bcontext parallel"),
    ("ep", r"\bep\b|\bexpert parallel"),
    (
        "params_b",
        r"^(?:model |# |num |number of |no of )?(?:params?|parameters|size|msize)"
        r"(?: b| billions?)?$|\bparameters\b",
    ),
    ("layers", r"^(?:# |num |number of |n )?layers?$"),
    ("hidden", r"^hidden(?: size| dim)?$|^d model$"),
    ("heads", r"^(?:# |num |number of |n |attention )*heads$"),
    ("vocab", r"^vocab"),
    ("ffn", r"^ffn"),
    ("precision", r"\bprecision\b|\bd ?type\b|^data ?type$"),
    ("recompute", r"\brecompute|\bcheckpointing\b|\bactivation ckpt\b|\bact(?:ivation)? checkp"),
    ("date", r"\bdate\b|^day$"),
    ("commit", r"\bcommit\b|\brevision\b"),
    ("status", r"^(?:status|result)$"),
    ("steps", r"^(?:train(?:ing)? |optimizer |total |num |n |number of |# )*(?:steps|iterations)$"),
    ("tokens", r"^(?:total |trained |processed |number of |# )*tokens(?: processed)?(?: global)?$"),
    ("model", r"^(?:model|workload|network|recipe)(?: name| type)?$"),
)  # fmt: skip
_COMPILED = [(name, re.compile(pattern)) for name, pattern in _PATTERNS]


@dataclass(frozen=True)
class Meaning:
    """What a column holds: our name, the factor to our unit, and for rates, of how many GPUs.

    of: "gpu", "all", or "" where the heading does not say. tokens: the tokens that `train_days`
    are for; 1 for a global batch that is in tokens.
    """

    name: str
    scale: float = 1.0
    of: str = ""
    tokens: float = 0.0


_SECONDS = (
    (1e-3, r"\bms\b|\bmillisec|\bmsecs?\b"),
    (1e-6, r"\bus\b|\bmicrosec"),
    (60.0, r"\bmins?\b|\bminutes\b"),
    (3600.0, r"\bh\b|\bhrs?\b|\bhours\b"),
    (86400.0, r"\bdays\b"),
)
_BIG = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12, "g": 1e9}


# `config/world_size`, `perf.mfu`: how tools that record runs group their columns
_GROUPS = re.compile(
    r"^(?:(?:config|cfg|args|perf|metrics|summary|system|train(?:er)?)[/.](?=[a-z]))+", re.I
)


def plain(heading: str) -> str:
    """A heading in lower case, without marks and brackets; `/`, `#` and `%` stay."""
    text = re.sub(r"<[^>]*>|[*`]", " ", heading)
    text = re.sub(r"(?<=[a-z])(?=[A-Z][a-z])", " ", text).lower()
    text = _GROUPS.sub("", text.strip())
    text = re.sub(r"(?<=[a-z])\.(?![a-z\d])", "", text)  # `Sec./iter.`, `No. of`
    return " ".join(re.sub(r"[^a-z0-9/#%.]+", " ", text).split())


@lru_cache(maxsize=4096)
def meaning(heading: str) -> Meaning | None:
    """What a heading means, or None where it says nothing that the audit knows."""
    text = plain(heading)
    if re.search(r"\b[kmgt]i?b ?/ ?s\b", text):
        return None  # GB/s, not GBS
    if splits_of(heading):
        return None
    known = column_name(heading)
    known = {"time_s": "wall_s"}.get(known, known)
    if _OF_PEAK.search(text):
        known = "mfu"
    if known not in (*HEADINGS, *NAMES) or known == "sequence_parallel":
        if not text or known == "sequence_parallel" or _IGNORED.search(text):
            return None
        known = next((name for name, pattern in _COMPILED if pattern.search(text)), "")
    if known not in NAMES:
        return None
    of = ""
    if re.search(rf"(?:/|per) ?{_GPU}\b|\btgs\b", text):
        of = "gpu"
    elif re.search(rf"\b(?:global|total|aggregate|cluster|system|all {_GPU}s)\b", text):
        of = "all"
    if known in ("step_s", "wall_s"):
        unit = next((factor for factor, word in _SECONDS if re.search(word, text)), 1.0)
        return Meaning(known, unit)
    if known in ("tokens_per_s", "samples_per_s"):
        match = re.search(r"\b([km])tok|\b([km]) tok|\b(thousand|million) tok", text)
        big = (match[1] or match[2] or match[3][0].replace("t", "k")) if match else ""
        span = re.search(r"(?:/|per) ?(day|hour)\b", text)
        return Meaning(known, _BIG[big] / {"day": 86400, "hour": 3600}.get(span and span[1], 1), of)
    if known == "tflops":
        match = re.search(r"\b([tpg])(?:era|eta|iga)? ?flop", text)
        scale = {"p": 1e3, "g": 1e-3}.get(match[1] if match else "t", 1.0)
        return Meaning(known, scale, of or ("all" if scale > 1 else ""))
    if known == "memory_gb":
        return Meaning(known, 1e-3 if re.search(r"\bmi?b\b", text) else 1.0)
    if known == "train_days":
        match = re.search(r"\b(\d+(?:\.\d+)?) ?([bt])\b", text)
        if not match:
            return None
        return Meaning(known, tokens=float(match[1]) * _BIG[match[2]])
    if known == "global_batch" and re.search(r"token| t$", text):
        return Meaning(known, tokens=1.0)
    if known in ("mfu", "hfu", "efficiency"):
        return Meaning(known, 0.01 if "%" in heading or "percent" in text else 1.0)
    return Meaning(known)


_SPLITS = ("tp", "pp", "dp", "cp", "ep", "vpp")


def splits_of(heading: str) -> list[str]:
    """The sizes that a heading lists, in their order: `(dp, tp, pp)`, `TP/PP/DP`; else none."""
    names = re.findall(r"[a-z]+", heading.lower())
    alone = re.fullmatch(r"\W*[A-Za-z]+(?:\s*[,/x×·-]\s*[A-Za-z]+)+\W*", heading)
    return names if alone and len(set(names) & set(_SPLITS)) == len(names) > 1 else []


@dataclass(frozen=True)
class Value:
    """A printed number in our unit, the interval that its digits leave open, and its place."""

    value: float
    low: float
    high: float
    text: str
    column: str

    def times(self, factor: float) -> "Value":
        """The value in another unit."""
        v, low, high = self.value * factor, self.low * factor, self.high * factor
        return replace(self, value=v, low=low, high=high)


_CELL = re.compile(
    r"^[~≈≃*_`\s$<>≤≥]*(?P<number>[+-]?(?:\d{1,3}(?:[,' \u202f_]\d{3})+|\d+)?(?:\.\d+)?)"
    r"(?P<power>[eE][+-]?\d+)?\s*(?P<unit>[a-zA-Zµ%×/]*)"
)
_TIME_UNITS = {
    "ms": 1e-3, "msec": 1e-3, "us": 1e-6, "µs": 1e-6, "min": 60.0, "mins": 60.0, "minutes": 60.0,
    "h": 3600.0, "hours": 3600.0, "hr": 3600.0, "hrs": 3600.0, "days": 86400.0,
}  # fmt: skip


def read_cell(text: str, column: str, what: Meaning) -> Value | None:
    """The number of a cell in our unit, or None where it has none.

    The interval is half a unit of the last printed place below, and one whole above, since some
    publishers cut digits. An integer that ends in zeros may have been rounded to them.
    """
    match = _CELL.match(text)
    if not match or not re.search(r"\d", match["number"]):
        return None
    if re.match(r"\s*(?:-|–|to\b|/|,)\s*\d", text[match.end("number") :]):
        return None  # a range, a fraction, or a number in another country's digits
    digits = re.sub(r"[,' \u202f_]", "", match["number"])
    power = float("1" + match["power"]) if match["power"] else 1.0
    value = float(digits) * power
    unit = 10.0 ** -len(digits.partition(".")[2]) * power
    if "." not in digits:
        zeros = len(digits) - len(digits.rstrip("0"))
        unit = max(power, min(10.0**zeros * power, 0.01 * value)) if zeros > 1 else power
    scale, suffix = what.scale, match["unit"]
    small = suffix.lower()
    if what.name in ("step_s", "wall_s"):
        scale = _TIME_UNITS.get(small, 1.0 if small in ("s", "sec", "seconds") else scale)
    elif what.name == "memory_gb":
        scale = {"mb": 1e-3, "mib": 1e-3, "gb": 1.0, "gib": 1.0}.get(small, scale)
    elif what.name in ("mfu", "hfu", "efficiency"):
        scale = 0.01 if small == "%" else scale
    elif what.name == "params_b":
        if what.scale == 1.0 and value > 1e5:
            scale = 1e-9
        scale = {"m": 1e-3, "t": 1e3, "b": 1.0, "k": 1e-6}.get(small, scale)
    elif small in ("k", "m", "b"):
        scale *= _BIG[small]
    if what.name in COUNTS and not small and "." not in digits:
        unit = 0.0
    if re.match(r"[*_\s]*[~≈≃]", text):
        unit = max(unit, 0.1 * value)  # "about": 5 % below to 10 % above
    value, unit = value * scale, unit * scale
    if not math.isfinite(value):
        return None
    return Value(value, value - unit / 2, value + unit, text, column)
