"""The model that a log describes, or which fact it lacks and the flag that gives it."""

from collections.abc import Iterable

from analysis.logs.fact_options import flag_of
from analysis.logs.record import Record
from base.errors import Answer, UsageError
from models.config import PRESETS, GPTConfig

SAME_MODEL = 0.05  # parameters printed over those of a GPT of the printed shapes, less one
AS_NAMED = 0.9, 1.4  # parameters over those in the model's name: gemma-7b has 8.5 billion
SIZES = ("n_layer", "hidden", "vocab_size")  # without them there is no model
_WORDS = {"gpus": "GPUs", "seq_len": "sequence length", "global_batch": "global batch"}


def asked(names: Iterable[str]) -> str:
    """Returns a sentence of facts that a log does not state, each with the flag that gives it."""
    facts = (f"{_WORDS.get(name, name)} ({flag_of(name)})" for name in names)
    return f"the log does not state {', '.join(facts)}"


def config_of(record: Record) -> Answer[GPTConfig]:
    """Returns the model as a GPT, or why it is none.

    What a log does not say is as in GPT-2. The parameters that are stated must agree with the
    sizes; where none are, a feed-forward that is not 4 x hidden needs an activation, which says
    whether it has a gate.
    """
    if record.uncounted:
        return Answer(
            None, f"the model has {' and '.join(record.uncounted)}, which no convention counts"
        )
    model = {k: v for k, v in record.model.items() if k in GPTConfig.__dataclass_fields__}
    experts = model.get("experts")
    if experts and "moe_router_topk" not in experts:
        stated = f"the model has {experts['num_experts']} experts"
        return Answer(None, f"{stated}, and the log does not state how many a token is sent to")
    if absent := [name for name in SIZES if name not in model]:
        return Answer(None, asked(absent))
    if model.get("activation") == "swiglu" and "ffn_hidden" not in model:
        return Answer(None, asked(["ffn_hidden"]))
    model.setdefault("n_head", 1)  # no count depends on it where every head has its own key
    if record.seq_len:
        model.setdefault("max_seq_len", record.seq_len)
    try:
        config = GPTConfig(**model)
    except UsageError as error:
        return Answer(None, str(error))
    if record.params is not None:
        if abs(record.params / config.n_params - 1) > SAME_MODEL:
            made = f"the stated sizes make {config.n_params:,} parameters"
            return Answer(None, f"{made}, but {record.params:,.0f} are stated")
    elif "activation" not in model and config.ffn_hidden != 4 * config.hidden:
        return Answer(None, asked(["activation"]))
    return Answer(config)


def settle_trained(record: Record) -> None:
    """Fills the parameters by how many are trained, where something else says that these are all:
    the stated sizes or those of a known model make as many, or the model's name says about as many.
    Adapters train a small part, and FLOPs of the part would be far too few.
    """
    trained, origin = record.trained, record.origin.get("params", "")
    if trained is None or "frozen weights" in record.uncounted:
        return
    if record.params is not None and origin != "from name":
        if abs(trained / record.params - 1) > SAME_MODEL:
            words = f"{trained:,} parameters are trained, and FLOPs count {record.params:,.0f}"
            record.doubt("trained", f"{words} as trained")
        return
    named, record.params = record.params, trained
    if config_of(record).value is None:  # the sizes make another number, or are not stated
        record.params = None
        config = config_of(record).value
        dense = {preset.n_params for preset in PRESETS.values() if preset.experts is None}
        whole = config.n_params if config else trained if trained in dense else named
        least, most = AS_NAMED
        if whole is not None and trained < whole * (1 if config else least):
            record.uncounted.append(f"{trained:,} trained parameters of {whole:,.0f}")
        elif whole is not None and (config or trained <= whole * most):
            record.params = trained  # more than the sizes make, `config_of` refuses
    if record.params is not None:
        record.origin["params"] = "log"
