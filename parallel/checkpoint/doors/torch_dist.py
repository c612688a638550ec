"""PyTorch's distributed checkpoints (DCP), and megatron-core's torch_dist, which is stored as one.

    iter_0000100/metadata.json      torch_dist: the name of the format
                 common.pt          what is not a tensor; since 0.19 it is an object of the store
                 .metadata, ...     a table: which chunk of which tensor begins where in which file

The names are megatron-core's, Hugging Face's or ours (names.py). The moments stand behind
`optimizer.state.exp_avg.` in torch_dist and are `state.NAME.exp_avg` in DCP, as
torch.distributed.checkpoint.state_dict lays them out. megatron-core's dp_reshardable and older
forms follow the buffers of one layout: of these the weights alone are read, and that is said.
"""

import io
import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from base.errors import UsageError
from base.storage import new_folder, write_blocks, write_synced
from models.config import GPTConfig, parameter_shapes
from parallel.checkpoint.contents import KINDS
from parallel.checkpoint.doors import WholeCheckpoint, pickles
from parallel.checkpoint.doors.names import Named, Shape, megatron
from parallel.checkpoint.folders import LATEST
from parallel.config.run_spec import DEFAULTS

_TABLE = ".metadata"
_COMMON, _SINCE_19 = "common.pt", "common_state/shard_0_1"
_OTHER = "is not as megatron-core saves it"
_STATE = "optimizer.state."
# The fp32 weights of a distributed optimizer, and of another.
_MASTERS = (f"{_STATE}param.", f"{_STATE}fp32_param.")
_KEY = re.compile(
    r"(?:.+\.)?state\.(?:(exp_avg|exp_avg_sq|param|fp32_param)\.(.+)|(.+)\.(exp_avg|exp_avg_sq|step))"
)
_NO_WEIGHTS = re.compile(r"optim|chained|lr_scheduler|train_state|dataloader|rng_state|step|iter")


class _Store:
    """The tensors and objects that a folder stores, by the table in it.

    shapes: name of a tensor -> shape. places: name of a tensor or object -> offset of a chunk ->
    the file, and where in it the chunk is.
    """

    def __init__(self, folder: Path):
        self.folder, self.places = folder, defaultdict(dict)
        table = pickles.read_table(folder / _TABLE)
        with pickles.understood(folder / _TABLE):
            metadata = table.state_dict_metadata.items()
            tensors = {name: tensor for name, tensor in metadata if hasattr(tensor, "chunks")}
            self.shapes = {name: tuple(tensor.size) for name, tensor in tensors.items()}
            self._parts = {n: [(c.offsets, c.sizes) for c in t.chunks] for n, t in tensors.items()}
            for index, place in table.storage_data.items():
                self.places[index.fqn][tuple(getattr(index, "offset", None) or ())] = place

    def load(self, name: str, offset: Shape = ()) -> Any:
        """Returns one chunk of a stored tensor, by the chunk's offset, or a stored object (offset
        ())."""
        with pickles.understood(self.folder):
            place = self.places[name][offset]
            file = self.folder / Path(place.relative_path).name
            return pickles.load(file, place.offset, place.length)

    def tensor(self, name: str, layer: int | None = None) -> Tensor:
        """Returns a full tensor, or one layer of a stacked one, where all of it is stored."""
        value, filled = torch.zeros(self.shapes[name][layer is not None :]), 0
        for offset, shape in self._parts[name]:
            slices = [slice(o, o + n) for o, n in zip(offset, shape, strict=True)]
            if layer is not None and not slices[0].start <= layer < slices[0].stop:
                continue
            part = self.load(name, tuple(offset))
            if not isinstance(part, Tensor) or part.shape != shape:
                raise UsageError(f"{self.folder} is damaged: it holds another part of {name}")
            if layer is not None:
                part = part[layer - slices.pop(0).start]
            value[tuple(slices)] = part
            filled += part.numel()
        if filled != value.numel():
            raise UsageError(f"{self.folder} does not hold all of {name}")
        return value


def read(folder: Path, model: GPTConfig) -> WholeCheckpoint:
    """Opens a checkpoint of torch_dist or DCP; one parameter at a time is read."""
    store = _Store(folder)
    common = _read_common(store)
    _check(common.args, model, folder)
    states: dict[tuple[str, str], str] = {}  # (kind, their name) -> where it is stored
    for key in store.places:
        if match := _KEY.fullmatch(key):
            kind, name = match[1] or match[4], match[2] or match[3]
            states[kind.removeprefix("fp32_"), name] = key
    weights = {key: shape for key, shape in store.shapes.items() if not _NO_WEIGHTS.match(key)}
    named = Named(model, weights, folder)
    names = [name for parts in named.parts.values() for name in parts.names]

    def key_of(kind: str, name: str) -> str | None:
        """Returns the key under which a tensor of a kind is stored. In the key of a moment the name
        may lack the prefix that the names of weights have."""
        full_name = named.prefix + name
        key = states.get((kind, full_name)) or states.get((kind, name))
        return key or (full_name if kind == "param" else None)

    run, kinds = f"imported from {folder}", KINDS
    missing = [name for name in names if not all(key_of(kind, name) for kind in KINDS)]
    if 0 < len(missing) < len(names):
        tensors = f"{len(missing)} of {len(names)} tensors, the first {missing[0]}"
        raise UsageError(f"{folder} is incomplete: it has no moments of {tensors}")
    if missing:
        run, kinds = f"{run} without moments (its optimizer's form: {common.form})", ("param",)
    adam_step = common.adam_step
    if not adam_step and (key := key_of("step", names[0])):
        with pickles.understood(folder, f"{_OTHER}: {key}"):
            adam_step = int(store.tensor(key))
    step = max(common.iteration, adam_step)

    def tensor(name: str, kind: str) -> Tensor:
        return named.tensor(name, lambda n, layer: store.tensor(key_of(kind, n), layer))

    for name in named.repeated:
        if not tensor("embedding.word.weight", "param").equal(store.tensor(key_of("param", name))):
            raise UsageError(f"{folder}: {name} is not the embedding, to which the model ties it")
    return WholeCheckpoint(
        config=model,
        step=step,
        adam_step=adam_step or step,
        kinds=kinds,
        tensor=tensor,
        facts={"run": run},
    )


class _Common(NamedTuple):
    """What megatron-core saves beside tensors: Megatron-LM's arguments, the optimizer's form, and
    how many steps AdamW and the training did, 0 where that is not stated."""

    args: dict[str, Any]
    form: str
    adam_step: int
    iteration: int


def _read_common(store: _Store) -> _Common:
    """Returns what is stored beside tensors, wherever this version of megatron-core has it."""
    path, common = store.folder / _COMMON, {}
    with pickles.understood(path, _OTHER):
        if path.is_file():
            common = pickles.load(path)
        elif _SINCE_19 in store.places:
            common = store.load(_SINCE_19)[0]
        args, optimizer = common.get("args"), common.get("optimizer")
        form = "none"
        if isinstance(optimizer, dict):
            form = optimizer.get("param_state_sharding_type", form)
        adam_step = next(_adam_steps(optimizer), 0)
        return _Common(vars(args) if args else {}, form, adam_step, int(common.get("iteration", 0)))


def _adam_steps(state: Any) -> Iterator[int]:
    """Yields every number of AdamW's steps in an optimizer's stored state: its parameter groups may
    have one, or it stands beside the moments. state: the whole, or a dict or list in it."""
    if isinstance(state, dict):
        yield from (int(state[key]) for key in ("step", "common_step") if state.get(key))
        state = list(state.values())
    if isinstance(state, list):
        for part in state:
            yield from _adam_steps(part)


def _check(args: dict[str, Any], model: GPTConfig, folder: Path) -> None:
    """Refuses a model that differs from Megatron-LM's arguments in what no name or shape shows."""
    scaled = model.rope_scaling != 1.0
    wanted: dict[str, Any] = {
        **dict.fromkeys(("num_experts", "window_size"), None),
        **dict.fromkeys(("apply_layernorm_1p", "rotary_interleaved", "squared_relu"), False),
        "num_attention_heads": model.n_head,
        "position_embedding_type": "rope" if model.position == "rope" else "learned_absolute",
        "rotary_percent": 1.0,
        "rotary_base": model.rope_theta,
        "use_rope_scaling": scaled,
        "norm_epsilon": model.norm_eps,
        "swiglu": model.gated,
    }
    if scaled:
        wanted["rope_scaling_factor"] = model.rope_scaling
    if not model.gated and not args.get("openai_gelu"):
        wanted["bias_gelu_fusion"] = True  # where it is not fused, it is erf's; ours is tanh's
    for name, value in wanted.items():
        if args.get(name, value) != value:
            raise UsageError(f"{folder}: {name} is {args[name]!r:.40}, the model has {value!r}")


def write(out: Path, checkpoint: WholeCheckpoint, form: str) -> None:
    """Writes a checkpoint as Megatron-LM lays out its folder; form: see names.megatron."""
    with new_folder(out) as aside:
        folder = aside / f"iter_{checkpoint.step:07d}"
        folder.mkdir()
        _write_store(folder, checkpoint, form)
        backends = {"sharded_backend": "torch_dist", "common_backend": "torch"}
        backends |= {"sharded_backend_version": 1, "common_backend_version": 1}
        write_synced(folder / "metadata.json", json.dumps(backends))
        torch.save(_optimizers(checkpoint), folder / _COMMON)
        write_synced(aside / LATEST[0], f"{checkpoint.step}\n")


class _Chunk(NamedTuple):
    """Where a parameter of ours is in megatron-core's tensor: the tensor's shape, and the offset
    and shape of the chunk that holds the parameter."""

    tensor: torch.Size
    offset: torch.Size
    shape: torch.Size


def _chunk_of(config: GPTConfig, name: str, shape: Shape, layer: int | None) -> _Chunk:
    """Returns the chunk of a parameter of this name and shape. layer: its index in a tensor that
    stacks all layers; None where each layer has tensors of its own."""
    tensor, offset, chunk = shape, (0,) * len(shape), shape
    if config.gated and ".mlp." in name and ".down." not in name:  # the gate's rows, then up's
        offset = (shape[0] if ".up." in name else 0, *offset[1:])
        tensor = (2 * shape[0], *shape[1:])
    if layer is not None:
        tensor, offset, chunk = (config.n_layer, *tensor), (layer, *offset), (1, *chunk)
    return _Chunk(torch.Size(tensor), torch.Size(offset), torch.Size(chunk))


def _write_store(folder: Path, checkpoint: WholeCheckpoint, form: str) -> None:
    """Writes a file for each kind of each parameter, and the table of the store. The fp32 weights
    are in one file, which the table lists under every name under which a loader asks for them."""
    tensors: dict[str, TensorStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}

    def save(content: Any) -> _StorageInfo:
        """Writes one tensor or object into a file of its own; returns where it is."""
        torch.save(content, stream := io.BytesIO())
        place = _StorageInfo(f"__{len(places)}_0.distcp", 0, stream.tell())  # a new number
        write_blocks(folder / place.relative_path, [stream.getbuffer()])
        return place

    config = checkpoint.config
    # Each product has an object with Transformer Engine's fp8 scales: here there are none in it.
    fp8_scales = ["output_layer._extra_state/shard_0_1"]
    for name, shape in parameter_shapes(config).items():
        stored = list(megatron(form, config, name))
        tensor_names = [parts.names[0] for parts in stored]
        layer = stored[0].layer
        chunk = _chunk_of(config, name, shape, layer)
        chunk_metadata = ChunkStorageMetadata(chunk.offset, chunk.shape)
        for kind in KINDS:
            place = save(checkpoint.tensor(name, kind).view(chunk.shape))
            prefixes = ["", *_MASTERS] if kind == "param" else [f"{_STATE}{kind}."]
            for prefix, tensor_name in itertools.product(prefixes, tensor_names):
                key = prefix + tensor_name
                if key not in tensors:  # of stacked layers the first one adds it
                    properties = TensorProperties(torch.float32)
                    tensors[key] = TensorStorageMetadata(properties, chunk.tensor, [])
                tensors[key].chunks.append(chunk_metadata)
                places[MetadataIndex(key, chunk.offset)] = place
        if name.startswith("blocks.") and name.endswith(".weight"):
            shard = "shard_0_1" if layer is None else f"shard_{layer}_{config.n_layer}"
            for tensor_name in tensor_names:
                if "norm" not in tensor_name:
                    product = tensor_name.removesuffix(".weight")
                    fp8_scales.append(f"{product}._extra_state/{shard}")
    objects = dict.fromkeys(fp8_scales, BytesStorageMetadata())
    places |= dict.fromkeys(map(MetadataIndex, fp8_scales), save([None]))
    pickles.write_table(folder / _TABLE, Metadata(tensors | objects, storage_data=places))


def _optimizers(checkpoint: WholeCheckpoint) -> dict[str, Any]:
    """Returns what megatron-core's optimizers, of mixed precision and of fp32, ask for beside
    tensors. Settings that an imported checkpoint does not state are a run's defaults."""
    spec, step = DEFAULTS | checkpoint.facts["spec"], checkpoint.adam_step
    group = {"is_expert_parallel": False, "is_decoupled_lr": False, "default_config": True}
    group |= {"lr_mult": 1.0, "max_lr": spec["lr"], "min_lr": None, "lr": spec["lr"]}
    group |= {"betas": (spec["beta1"], spec["beta2"]), "eps": spec["adam_eps"]}
    groups = [
        group | {"wd_mult": mult, "weight_decay": mult * spec["weight_decay"], "step": step}
        for mult in (1.0, 0.0)
    ]
    adam = {"param_groups": groups, "state": {"common_step": torch.tensor(float(step))}}
    optimizer = adam | {"optimizer": adam, "param_state_sharding_type": "fully_reshardable"}
    return {"iteration": checkpoint.step, "checkpoint_version": 3.0, "optimizer": optimizer}
