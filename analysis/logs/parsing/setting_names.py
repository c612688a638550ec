"""The settings of a run, from the argument dumps in its log.

A fact keeps the first origin that states it, in the order of `record.ORIGINS`. A weaker origin that
states something else adds a note and changes nothing.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import cache, lru_cache
from string import ascii_lowercase
from typing import Any, NamedTuple

from analysis.logs.facts import COUNT, FACTS, MODEL, SETTINGS
from analysis.logs.parsing import expert_settings
from analysis.logs.parsing.fields import plain
from analysis.logs.parsing.logfile import Log
from analysis.logs.record import Record
from models.config import PARTS, VOCAB_MULTIPLE
from parallel.config.layout import EXPERT_AXES


class _Rule(NamedTuple):
    """A rule for a setting whose values are words. values: what the first of `names` that is set
    looks like, in lower case -> the value of our fact."""

    fact: str
    names: str
    values: dict[str, Any]


_SAID = r"(?!(?:none|null|false)$).+"
_GRANULARITY = "recompute_granularity activations_checkpoint_granularity"
_CHECKPOINT = "checkpoint_activations recompute_activations activations_checkpoint_method"
_CHECKPOINT += " gradient_checkpointing"
_TIED = "share_embeddings_and_output_weights tie_word_embeddings"
_YES, _NO = {"true": True, "false": False}, {"false": True, "true": False}
_DTYPES = {
    r"(torch\.)?bfloat16|bf16(-mixed|-true)?": "bf16",
    r"(torch\.)?float16|torch\.half|16-mixed": "fp16",
    r"torch\.float|(torch\.)?float32": "fp32",
}
_SHARED = {r"true|yes|1(\.0)?|reduce_scatter": True, r"false|no|0(\.0)?|all_reduce": False}
# Hugging Face's gated ones, and those without a gate.
_ACTIVATIONS = {".*glu|silu|swish": "swiglu", "(gelu|relu|squared).*": "gelu"}
_POSITIONS = {"(rope|rotary).*": "rope", "learned.*": "learned"}
# Settings whose values are words. Of several rules for a fact the first that fits counts.
_RULES = (
    _Rule("precision", "fp4", {_SAID: "fp4"}),
    _Rule("precision", "fp8", {_SAID: "fp8"}),
    _Rule("precision", "bf16", {"true": "bf16"}),
    _Rule("precision", "fp16", {"true": "fp16"}),
    _Rule("precision", "params_dtype torch_dtype precision", _DTYPES),
    _Rule("recompute", _GRANULARITY, {"selective": "selective", _SAID: "full"}),
    _Rule("recompute", _CHECKPOINT, {_SAID: "full"}),
    _Rule("recompute", f"{_GRANULARITY} {_CHECKPOINT}", {".+": "none"}),
    _Rule("sequence_parallel", "sequence_parallel tp_mode", _SHARED),  # tp_mode: nanotron's
    _Rule("activation", "swiglu gated_linear_unit", {"true": "swiglu"}),
    _Rule("activation", "mlp_type", {"llama": "swiglu"}),
    _Rule("activation", "activation hidden_act activation_function", _ACTIVATIONS),
    _Rule("activation", "swiglu gated_linear_unit", {"false": "gelu"}),
    _Rule("norm", "rms_norm_eps", {_SAID: "rmsnorm"}),
    _Rule("norm", "normalization norm", {"rms.*": "rmsnorm", "layer.*": "layernorm"}),
    _Rule("position", "rope_theta", {_SAID: "rope"}),
    _Rule("position", "position_embedding_type pos_emb", _POSITIONS),
    _Rule("qk_norm", "qk_layernorm", _YES),
    _Rule("tied", _TIED, _YES),
    _Rule("tied", "untie_embeddings_and_output_weights no_weight_tying", _NO),
    _Rule("bias", "add_bias_linear", _YES),
    _Rule("bias", "disable_bias_linear", _NO),
    # What no FLOPs convention counts, in words.
    _Rule("residual", "mlp_type", {"residual": "a feed-forward beside its experts"}),
    _Rule("variant", "experimental_attention_variant", {_SAID: "{} attention"}),
    _Rule("indexed", "index_topk", {r"[1-9]\d*": "attention to {} tokens that an index chooses"}),
    _Rule("hybrid", "is_hybrid_model", {"true": "layers of several kinds"}),
    _Rule(
        "predicted",
        "num_nextn_predict_layers",  # Hugging Face's, which its models do not train
        {r"[1-9]\d*": "{} layers that predict further tokens"},
    ),
)
_UNCOUNTED = ("residual", "variant", "indexed", "hybrid", "predicted")
_OTHERS = "group_query_attention use_distributed_optimizer make_vocab_size_divisible_by"
# That documents share a sequence. No program prints their lengths, or the sum of their squares.
_PACKED = "reset_attention_mask neat_packing sample_packing packing packed pack_to_max_length"
_PACKED += " use_varlen_attn generate_doc_lengths"
# A text of nothing but lower-case letters, lines and `_`, for which `-` stands, too: what names of
# settings consist of, but for digits at their end.
_LETTERS = bytes(
    byte if chr(byte) in f"{ascii_lowercase}_\n" else ord("_" if chr(byte) == "-" else " ")
    for byte in range(256)
)


@cache
def _names() -> list[str]:
    """Returns the names of the settings of which `_setting` finds the value."""
    names = [*(fact.names for fact in FACTS.values()), *(rule.names for rule in _RULES), _OTHERS]
    return sorted({*" ".join(names).split(), *expert_settings.NAMES})


@cache
def _setting() -> re.Pattern[bytes]:
    """Returns the pattern of a setting: `name ..... 4`, `name: 4`, `"name": 4`, `args[name] = 4`,
    `--name 4`. A name is found whole.

    It takes longer to compile than --help should."""
    endings: dict[str, list[str]] = defaultdict(list)  # by the first letter: they are found sooner
    for name in _names():
        endings[name[0]].append(name[1:])
    words = "|".join(f"{first}(?:{'|'.join(rests)})" for first, rests in endings.items())
    return re.compile(
        (
            rf"\b(?<![./])(?<![a-z]-)({words.replace('_', '[-_]')})(?![\w-])"
            r"""['"\]]{0,2}[ \t]{0,3}(?:\.{2,80}|[:=]|[ \t])[ \t]{0,16}['"\[]?"""
            r"(\d{1,15}(?![\d.,]\d|\w)|None|null|[A-Za-z][\w.-]{0,30})"
        ).encode()
    )


# A pattern that begins with letters is found far sooner than one that begins with a boundary: what
# may not stand before them is looked at behind them.
# That one of these is set says the fact, and its value is a real number: 500000.0, 1e-05.
_REAL = re.compile(
    rb"(r(?<![\w./]r)(?<![a-z]-r)(?:ope[-_]theta|ms[-_]norm[-_]eps))(?![\w-])"
    rb"['\"\]]{0,2}[ \t]{0,3}(?:\.{2,80}|[:=]|[ \t])[ \t]{0,16}['\"\[]?"
    rb"(\d{1,15}(?:\.\d{0,15}(?:e[-+]?\d{1,3})?|e[-+]?\d{1,3}))(?![\w.]|,\d)"
)
# What stands behind a value that dots lead to, and behind one of JSON.
_DUMP_END = re.compile(rb"[ \t\"',\])]{0,16}(?:[\r\n\x1b]|\.\.|\Z)")
_JSON_END = re.compile(rb"['\"]?[ \t]{0,16}(?:[,}\])\r\n\x1b]|\Z)")
# On a command line these have no value.
_SWITCH = re.compile(
    rb"--(swiglu|untie-embeddings-and-output-weights|group-query-attention|disable-bias-linear"
    rb"|multi-latent-attention|no-weight-tying|moe-router-force-load-balancing|sequence-parallel)(?=[\s\\'\",]|\Z)"
)
_PACKING = re.compile(
    rf"\b(?<![a-z]-)({_PACKED.replace(' ', '|').replace('_', '[-_]')})(?![\w-])".encode()
    + rb"(?:['\"\]]{0,2}[ \t]{0,3}(?:\.{2,80}|[:=]|[ \t])[ \t]{0,16}['\"]?((?i:true|false))\b)?"
)
_ATTENDED = (
    rb"attention stops there, at id \d{1,9}, as if sequences had ([\d.]{1,12})(?= tokens)"  # ours
)
_CARD = re.compile(
    rb"(?:CUDA capacity: |GPU(?<!\wGPU)(?: \d{1,3})?: |\[GPU\] |Device: (?<!\wDevice: )"
    rb"|Peak flops undefined for: )"
    rb"((?:NVIDIA|AMD|Tesla) ?[\w .-]{1,40}?)(?: with | \(UUID| \| |[\r\n,])"
)
# Each rank says how many ranks it is connected to; Megatron's largest such group is dp x cp.
_GLOO = re.compile(rb"\[Gloo\][^\r\n]{0,80} number of connected peer ranks is : (\d{1,6})\b")
_USING_WORLD = re.compile(rb"using world size: {0,3}(\d{1,7})(?=,| and )([^\r\n]{0,400})")
_USING_SIZES = re.compile(
    rb"(?<![\w-])(data|context|tensor-model|pipeline-model|model)-parallel[- ]size: {0,3}(\d{1,7})"
)
_RANK_PARAMS = re.compile(
    rb"number of parameters on (?:\(tensor, (?:gtp_weight_remat, )?pipeline\) )?model parallel rank"
    rb" {1,3}(\([\d, ]{1,20}\)|\d{1,6}): {0,3}(\d{1,15})(?![.,]?\w)"
)
# Megatron and NeMo count FLOPs and parameters with the padded size, a multiple of tp.
_PADDED_VOCAB = re.compile(
    rb"added vocab(?:(?<=padded vocab) \(size: (\d{1,9})\) with \d{1,9} dummy tokens"
    rb" \(new size: (\d{1,9})\)"
    rb"|(?<=Padded vocab)_size: (\d{1,9}), original vocab_size: (\d{1,9})[,. \r\n])"
)
# Megatron's layers of a hybrid model: `*` attention, `-` MLP, `M` Mamba ...; `|` ends a stage, and
# behind `/` are those that predict further tokens. num_layers counts attention and MLP apart.
_PATTERN = re.compile(
    rb"hybrid(?<!\whybrid)[-_](?:layer|override)[-_]pattern[ .:='\"]{1,60}+"
    rb"([-*+A-Z|/]{1,2000}+)(?![\w.])"
)
HEADER = 1 << 22
MOST_BETWEEN = 1 << 28  # bytes, so that a log without a step takes no minute
_ALIKE = bytes.maketrans(b"123456789", b"000000000")
# Of a model that reads more than text, Hugging Face's configuration has one for each part.
ENCODERS = {"vision_config": "an encoder of images", "audio_config": "an encoder of sound"}
_ENCODER = re.compile(
    rf"\"({'|'.join(ENCODERS)})\": {{0,3}}\{{(?:[^{{}}]++|\{{[^{{}}]*+\}})*+\}}".encode()
)


def read_header(record: Record, header: bytes) -> None:
    """Fills `record` from the argument dumps in `header`, the text before training.

    The last value before training wins; where the same name was given another before, it is noted.
    """
    settings: dict[str, list[str]] = defaultdict(list)
    cut: Counter[str] = Counter()  # how often another line runs into the value
    record.uncounted += sorted({ENCODERS[name.decode()] for name in _ENCODER.findall(header)})
    header = _ENCODER.sub(b"", header)
    for match in _in_lines(_setting(), header):
        preceding = header[max(match.start() - 80, 0) : match.start()]
        # DeepSpeed's own world_size is the data-parallel one; its block_size is of bytes on disk.
        is_of_ranks = match[1].endswith(b"world_size") and b"config.py:" in preceding
        name, value = match[1].decode().replace("-", "_"), match[2].decode().partition("..")[0]
        separator = header[match.end(1) : match.start(2)].strip(b" \t")
        is_prose = not separator and value[0].isalpha() and not preceding.endswith(b"--")
        end = _JSON_END if separator[:1] in b"'\"" and b":" in separator else None
        end = _DUMP_END if separator.startswith(b"..") and b"[" not in separator else end
        if end and value.isdigit() and not end.match(header, match.end()):
            cut[name] += 1
        elif not is_of_ranks and not is_prose and b"aio_config" not in preceding:
            settings[name].append(value)
    record.doubt_numbers(cut)
    read_packing(record, header)
    for name, value in expert_settings.LONG.findall(header) + _REAL.findall(header):
        settings[name.decode().replace("-", "_")].append(value.decode())
    for name in _SWITCH.findall(header):
        settings.setdefault(name.decode().replace("-", "_"), ["True"])
    facts = read_settings(record, settings)
    if "override_vocab_size" not in settings:
        _read_vocabulary(record, facts, header, settings)
    for pattern in _PATTERN.findall(header)[-1:]:
        layer_kinds = Counter(pattern.decode().partition("/")[0].replace("|", ""))
        if set(layer_kinds) == {"*", "-"} and layer_kinds["*"] == layer_kinds["-"]:  # a GPT's
            facts["n_layer"] = layer_kinds["*"]
        else:
            words = ", ".join(f"{count} {kind}" for kind, count in sorted(layer_kinds.items()))
            record.uncounted.append(f"layers of the kinds {words}")
    facts |= _world(header, facts)
    # The model-parallel ranks each print their share: a sum, when all of them did.
    shares = {match[1]: int(match[2]) for match in _RANK_PARAMS.finditer(header)}
    remat = max((int(rank.split(b",")[1]) for rank in shares if rank.count(b",") == 2), default=0)
    n_ranks = facts.get("tp", 1) * facts.get("pp", 1) * (remat + 1)
    is_whole = len(shares) >= n_ranks and facts.get("ep", 1) * facts.get("etp", 1) == 1
    facts["params"] = sum(shares.values()) if shares and is_whole else None
    if card := _CARD.search(header):
        facts["gpu_type"] = card[1].decode().strip()
    state(record, facts, "log")


@cache
def _words() -> set[bytes]:
    """Returns what the names of settings are in a text of `_LETTERS`: behind one `-`, too."""
    names = [name.rstrip("0123456789").encode() for name in [*_names(), *_PACKED.split()]]
    return {*names, *(b"_" + name for name in names)}


@lru_cache(maxsize=1)  # it is asked for two patterns
def _naming_lines(header: bytes) -> list[tuple[int, int]]:
    """Returns where the lines begin and end in which the name of a setting may stand. They are few,
    and far sooner found by their words than by a pattern of all names."""
    words, lines, begin = _words(), [], 0
    for letters in header.translate(_LETTERS).replace(b"__", b"  ").split(b"\n"):
        end = begin + len(letters) + 1
        if not words.isdisjoint(letters.split()):
            lines.append((begin, end))
        begin = end
    return lines


def _in_lines(pattern: re.Pattern[bytes], header: bytes) -> Iterator[re.Match[bytes]]:
    """Yields the matches of a pattern of names of settings, which lie within a line."""
    for line in _naming_lines(header):
        yield from pattern.finditer(header, *line)


def read_packing(record: Record, header: bytes) -> None:
    """Fills which setting packs several documents into a sequence, where one does, and the length
    of whole sequences with as much attention, where a log states it."""
    last: dict[str, bool] = {}
    for match in _in_lines(_PACKING, header):
        is_switch = header[max(match.start() - 2, 0) : match.start()] == b"--"
        if match[2] or is_switch:  # on a command line it needs no value
            last[match[1].decode().replace("-", "_")] = (match[2] or b"true").lower() == b"true"
    record.packed = next((name for name, is_set in last.items() if is_set), None)
    for length in re.findall(_ATTENDED, header)[-1:]:
        state(record, {"attended_seq_len": float(length)}, "log")


def _read_vocabulary(
    record: Record, facts: dict[str, Any], header: bytes, settings: Mapping[str, list[str]]
) -> None:
    """Fills the padded size of the vocabulary, and the fewest and the most token ids of which it
    was made."""
    if padded := _PADDED_VOCAB.findall(header):
        n_ids, facts["vocab_size"] = sorted(int(n) for n in padded[-1] if n)
        record.token_ids = n_ids, n_ids
    elif (padded_size := settings.get("padded_vocab_size", [""])[-1]).isdigit():
        multiple = settings.get("make_vocab_size_divisible_by", [""])[-1]
        padding = (int(multiple) if multiple.isdigit() else VOCAB_MULTIPLE) * facts.get("tp", 1)
        if padding and int(padded_size) % padding == 0:
            record.token_ids = int(padded_size) - padding + 1, int(padded_size)


def read_settings(record: Record, settings: Mapping[str, list[str]]) -> dict[str, Any]:
    """Returns facts by Record's and GPTConfig's names. What no FLOPs convention counts is added to
    `record.uncounted`.

    settings: a setting's name -> its values in the order that they were printed; the last one
    counts, and a `record` that did not know it gets a note where there were others.
    """
    last = {name: values[-1].lower() for name, values in settings.items() if values}
    facts: dict[str, Any] = {}
    for field, fact in FACTS.items():
        alias = next((name for name in fact.names.split() if last.get(name, "").isdigit()), None)
        if alias is None:
            continue
        facts[field] = int(last[alias])
        values = dict.fromkeys(value for value in settings[alias] if value.isdigit())
        recorded = record.model.get(field) or getattr(record, field, None)
        if len(values) > 1 and field != "gpus" and recorded is None:
            record.note(
                f"contradiction: {alias} is given as {', '.join(values)};"
                f" {facts[field]}, the last before training, is used"
            )
    if facts.get("pp") == 0:  # GPT-NeoX's way to say that there is no pipeline
        facts["pp"] = 1
    if last.get("group_query_attention") == "false":
        facts.pop("n_kv_head", None)  # Megatron prints num_query_groups all the same
    if last.get("use_distributed_optimizer") == "true":
        facts["zero_stage"] = max(facts.get("zero_stage", 0), 1)
    for rule in _RULES:
        value = next((last[name] for name in rule.names.split() if name in last), "")
        ours = next((ours for like, ours in rule.values.items() if re.fullmatch(like, value)), None)
        if rule.fact in _UNCOUNTED and ours and ours.format(value) not in record.uncounted:
            record.uncounted.append(ours.format(value))
        elif rule.fact not in _UNCOUNTED and ours is not None:
            facts.setdefault(rule.fact, ours)
    parts = expert_settings.parts_of(last, facts.get("n_layer") or record.model.get("n_layer"))
    record.uncounted += [words for words in parts.uncounted if words not in record.uncounted]
    if "experts" not in parts.facts:  # a dense model's dump has its sizes, too
        facts = {name: value for name, value in facts.items() if name not in EXPERT_AXES}
    return facts | parts.facts


_SPLITS = {b"data": "dp", b"context": "cp", b"tensor-model": "tp", b"model": "tp"}
_SPLITS[b"pipeline-model"] = "pp"


def _world(header: bytes, facts: Mapping[str, Any]) -> dict[str, int]:
    """Returns the GPUs and the sizes of their split from Megatron's `using world size: 64,
    data-parallel-size: 1, tensor-model-parallel size: 4`. Without it, the GPUs are as many as the
    ranks that say they are connected."""
    if worlds := _USING_WORLD.findall(header):
        world, sizes = worlds[-1]
        split = {_SPLITS[kind]: int(size) for kind, size in _USING_SIZES.findall(sizes)}
        return {"gpus": int(world)} | split
    # Lines of several ranks run into each other; of a whole group, most stay readable.
    peer_counts = Counter(map(int, _GLOO.findall(header)))
    group_sizes = [n_peers + 1 for n_peers, lines in peer_counts.items() if 2 * lines > n_peers]
    if group_sizes and "gpus" not in facts and {"tp", "pp"} <= facts.keys():
        return {"gpus": max(group_sizes) * facts["tp"] * facts["pp"]}
    return {}


def header_of(log: Log, first: int | None) -> bytes:
    """Returns the text before the first record, without colours, behind that of the run's other
    files. It ends with the record's first byte, so that a number right before that counts as cut.

    Of a long one the first and the last HEADER bytes are whole. Of the lines between them that
    differ in digits alone, as those of ranks do, the last one stands.
    """
    log.unsearched = 0
    begin, end = log.begin, log.size if first is None else first + 1
    beside = b"".join(o.slice(0, HEADER // len(log.beside)) + b"\n" for o in log.others())
    if end - begin <= 2 * HEADER:
        return plain(beside + log.slice(begin, end))
    between = _distinct_lines(log, begin + HEADER, end - HEADER)
    parts = [log.slice(begin, begin + HEADER), between, log.slice(end - HEADER, end)]
    return plain(beside + b"\n".join(parts))


def _distinct_lines(log: Log, begin: int, end: int) -> bytes:
    """Returns the last of all lines in [begin, end) that differ in digits alone. It stops where
    there are too many, and `log.unsearched` counts the bytes behind."""
    lines: dict[bytes, bytes] = {}
    for offset, block in log.blocks(begin, end):
        lines |= zip(block.translate(_ALIKE).split(b"\n"), block.split(b"\n"), strict=True)
        log.unsearched = end - offset - len(block)
        if sum(map(len, lines)) > HEADER or offset - begin > MOST_BETWEEN:
            break
    return b"\n".join(lines.values())


def state(record: Record, facts: dict[str, Any], origin: str) -> None:
    """Fills what is unknown in `record`. Notes what contradicts a stronger origin."""
    for name, value in facts.items():
        if value is None:
            continue
        if name in MODEL or name in PARTS:
            if name not in record.model:
                record.model[name] = value
                record.origin.setdefault(name, origin)
            continue
        recorded = getattr(record, name)
        if value == 0 and SETTINGS[name].allowed is COUNT:
            record.note(f"{name}: {origin} says 0: unknown")
        elif recorded is None:
            setattr(record, name, value)
            record.origin[name] = origin
        elif recorded != value and origin != "from name":
            recorded_origin = record.origin.get(name, "log")
            record.note(f"{name}: {recorded_origin} says {recorded}, {origin} says {value}")
