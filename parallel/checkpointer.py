"""Save and load training state: every rank writes what it owns, any layout of any engine reads it.

The one form on disk is a list of *pieces*. A piece is a parameter's reference name
(models/gpt.py), the part of the whole tensor that a tensor-parallel rank holds (a box: offset and
shape), and a run of that part's elements in row-major order, which is what a ZeRO rank holds of
it. Each has three fp32 tensors: the master weight and AdamW's two moments, 12 bytes per parameter.
An engine says which pieces it holds, as views of its live tensors, and that is all: saving writes
the views, loading fills them. The same layout gets back the same bits; another layout or engine
reads the pieces that overlap its own. parallel/saved.py describes the files, and
parallel/checkpoint.py is the command.

The libraries' own formats are not the storage: no engine but their own reads them, and reading each
unpickles what is in the folder. As torch 2.13, megatron-core 0.16.1 and DeepSpeed 0.19.8 have it:

- torch DCP reads `.metadata` by pickle.load, tensors by torch.load(weights_only=True) and any other
  value without that. It cuts boxes out of named tensors; the run of elements that a ZeRO rank holds
  of a flat buffer is no box.
- megatron-core dist_checkpointing stores tensors through DCP, so `.metadata` is unpickled again. It
  reshapes weights over tp and pp; the state of its distributed optimizer either over dp alone
  (dp_reshardable) or gathered on one dp rank at every save (fully_reshardable), for a flattened
  range of a tensor is refused.
- DeepSpeed's universal checkpoint is converted between saving and loading, from the files of all
  ranks, by torch.load(weights_only=False), and then loads at other tp, pp and dp in DeepSpeed.

What is used of them is their bookkeeping of which rank holds which elements, in the engines.
parallel/dcp.py writes a DCP folder for other programs.
"""

import functools
import json
import math
import random
import shutil
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from models.config import GPTConfig
from models.errors import UsageError
from models.storage import state_bytes, write_blocks
from models.weights import Weights, read_weights, write_weights
from parallel import saved
from parallel.artifacts import utc_now
from parallel.layout import Layout
from parallel.manifest import KINDS, rank_file
from parallel.saved import Damaged

BEAT_S = 1.0  # how often ranks that work on a checkpoint tell the others so
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Held:
    """What a rank holds of one parameter: elements [start, start + n) of a part, row-major.

    name, shape: the parameter's reference name and whole shape.
    offset, part: where the part begins in the whole, and its shape.
    tensors: kind -> live fp32 tensor of n elements, contiguous.
    share: (i, n): n ranks hold exactly this and this one writes the i-th n-th of it; (0, 0): it is
        another's to write, here it is only filled.
    """

    name: str
    shape: Shape
    offset: Shape
    part: Shape
    start: int
    tensors: dict[str, Tensor]
    share: tuple[int, int] = (0, 1)


@dataclass
class State:
    """An engine's training state: its pieces and what is not a tensor.

    adam_step: AdamW's step count (skipped steps do not count).
    scaler: fp16's {"scale", "good_steps"} and, where an engine lets some overflows pass before it
        lowers the scale, how many it will yet ("hysteresis"); empty otherwise.
    tracker: megatron-core's named random states, where there are any (get_states, set_states).
    """

    held: list[Held]
    adam_step: int = 0
    scaler: dict[str, float] = field(default_factory=dict)
    tracker: Any = None


def hold(
    name: str,
    shape: Shape,
    offset: Shape,
    part: Shape,
    start: int,
    tensors: dict[str, Tensor],
    share: tuple[int, int] = (0, 1),
) -> list[Held]:
    """[Held], without the rows of `part` that pad the vocabulary; [] when nothing is left."""
    rows = max(0, min(part[0], shape[0] - offset[0]))
    part = (rows, *part[1:])
    n = min(tensors["param"].numel(), math.prod(part) - start)
    if n <= 0:
        return []
    flat = {kind: tensor.detach().view(-1)[:n] for kind, tensor in tensors.items()}
    return [Held(name, shape, offset, part, start, flat, share)]


def share(layout: Layout, rank: int, split: bool, partitioned: bool) -> tuple[int, int]:
    """Which of the equal copies of a piece `rank` holds, and of how many: `split` over tp ranks or
    copied to them, `partitioned` over dp ranks (ZeRO) or copied."""
    at, tp, dp = layout.coords(rank), layout.tp, layout.dp
    over_tp = (0, 1) if split else (at["tp"], tp)
    over_dp = (0, 1) if partitioned else (at["dp"], dp)
    return over_dp[0] * over_tp[1] + over_tp[0], over_dp[1] * over_tp[1]


def _counts_in_groups(adam: torch.optim.Optimizer) -> bool:
    """Whether it counts its steps in its groups, from the first step on, as the FusedAdam of apex
    and of Transformer Engine do, and not with each parameter, as torch's AdamW does."""
    return not isinstance(adam, torch.optim.Adam)


def adam_tensors(adam: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """A parameter that `adam` updates and its two moments, which are made if it has not stepped."""
    state = adam.state[parameter]
    if "exp_avg" not in state:
        if not _counts_in_groups(adam):
            fused = adam.defaults.get("fused") or adam.defaults.get("capturable")
            device = parameter.device if fused else "cpu"
            state["step"] = torch.zeros((), dtype=torch.float32, device=device)
        for kind in KINDS[1:]:
            state[kind] = torch.zeros_like(parameter, memory_format=torch.preserve_format).detach()
    return {"param": parameter, **{kind: state[kind] for kind in KINDS[1:]}}


def adam_step(adam: torch.optim.Optimizer) -> int:
    """How many steps an AdamW has taken."""
    if _counts_in_groups(adam):  # a group without parameters is not counted on
        return max((int(group.get("step", 0)) for group in adam.param_groups), default=0)
    return next((int(s["step"]) for s in adam.state.values() if "step" in s), 0)


def set_adam_step(adam: torch.optim.Optimizer, step: int) -> None:
    """Tell an AdamW how many steps it has taken."""
    if _counts_in_groups(adam):
        for group in adam.param_groups:
            group["step"] = step
    for state in adam.state.values():
        if "step" in state:
            state["step"].fill_(step)


# --- one rank's file -----------------------------------------------------------------------------


def _owned(held: list[Held]) -> list[Held]:
    """What this rank writes of what it holds."""
    found = []
    for piece in held:
        index, of = piece.share
        n = piece.tensors["param"].numel()
        first, last = (n * index // of, n * (index + 1) // of) if of else (0, 0)
        if first < last:
            cut = {kind: tensor[first:last] for kind, tensor in piece.tensors.items()}
            found.append(replace(piece, start=piece.start + first, tensors=cut, share=(0, 1)))
    return found


def write_file(
    path: Path, pieces: list[Held], randoms: dict[str, Tensor], tick: Callable = lambda: None
) -> dict[str, Any]:
    """Write and sync a rank's pieces as one safetensors file; its entry in the manifest.

    By hand, because the library wants the whole file in memory.

    Raises:
        OSError: as the disk has it.
    """
    tensors = {f"{kind}/{p.name}": p.tensors[kind] for p in pieces for kind in KINDS}
    assert len(tensors) == len(pieces) * len(KINDS), "a rank holds two pieces of one parameter"
    tensors |= {f"random/{name}": state for name, state in randoms.items()}
    header, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        code = {torch.float32: "F32", torch.uint8: "U8"}[tensor.dtype]
        header[name] = {"dtype": code, "shape": [tensor.numel()], "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    blocks = _blocks(len(text).to_bytes(8, "little") + text, tensors.values())
    size, crc32 = write_blocks(path, blocks, tick)
    described = [
        {
            "name": p.name,
            "shape": p.shape,
            "offset": p.offset,
            "part": p.part,
            "start": p.start,
            "stop": p.start + p.tensors["param"].numel(),
        }
        for p in pieces
    ]
    return {"path": path.name, "bytes": size, "crc32": crc32, "pieces": described}


def _blocks(head: bytes, tensors: Any, most: int = 1 << 24) -> Iterator[memoryview]:
    """The bytes of a file in blocks of some megabytes, tiny tensors put together."""
    waiting = bytearray(head)
    for tensor in tensors:
        data = memoryview(tensor.detach().cpu().contiguous().view(torch.uint8).numpy()).cast("B")
        if len(waiting) + len(data) <= 1 << 20:
            waiting += data
            continue
        yield memoryview(bytes(waiting))
        waiting.clear()
        for at in range(0, len(data), most):
            yield data[at : at + most]
    yield memoryview(bytes(waiting))


# --- reading -------------------------------------------------------------------------------------


class Reader:
    """Parameters and moments out of a checkpoint, whatever layout wrote it."""

    def __init__(self, folder: Path, manifest: dict[str, Any]):
        self.folder, self.manifest = folder, manifest
        self.pieces: dict[str, list[tuple[str, dict]]] = {}
        for entry in manifest["files"]:
            for piece in entry["pieces"]:
                self.pieces.setdefault(piece["name"], []).append((entry["path"], piece))
        self._open: dict[str, Any] = {}

    def _file(self, name: str) -> Any:
        if name not in self._open:
            path = self.folder / name
            try:
                self._open[name] = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise Damaged(f"{path} is no safetensors file: {error}") from error
        return self._open[name]

    def _run(self, file: str, kind: str, piece: dict, first: int, last: int) -> Tensor:
        """Elements [first, last) of a piece, counted in its part."""
        try:
            stored = self._file(file).get_slice(f"{kind}/{piece['name']}")
            return stored[first - piece["start"] : last - piece["start"]]
        except SafetensorError as error:
            raise Damaged(f"{self.folder / file} is damaged: {error}") from error

    def _fill(self, name: str, kind: str, box: tuple, start: int, target: Tensor) -> int:
        """Fill `target`, elements [start, ...) of the part `box`; how many were found."""
        stop, filled = start + target.numel(), 0
        for file, piece in self.pieces.get(name, []):
            first, last = max(start, piece["start"]), min(stop, piece["stop"])
            if (tuple(piece["offset"]), tuple(piece["part"])) == box and first < last:
                run = self._run(file, kind, piece, first, last)
                target[first - start : last - start].copy_(run)
                filled += last - first
        return filled

    def fill(self, piece: Held, kind: str) -> None:
        """Fill one of a piece's live tensors.

        Raises:
            Damaged: the checkpoint does not hold all of it.
        """
        target = piece.tensors[kind]
        box = (piece.offset, piece.part)
        if self._fill(piece.name, kind, box, piece.start, target) < target.numel():
            part = self.part(piece.name, kind, piece.offset, piece.part).view(-1)
            target.copy_(part[piece.start : piece.start + target.numel()])

    def part(self, name: str, kind: str, offset: Shape, shape: Shape) -> Tensor:
        """Any part of a parameter, or of a moment of it, put together on the CPU."""
        found, covered = torch.empty(shape), 0
        if self._fill(name, kind, (offset, shape), 0, found.view(-1)) == found.numel():
            return found
        boxes = {(tuple(p["offset"]), tuple(p["part"])) for _, p in self.pieces.get(name, [])}
        for theirs_at, theirs_shape in sorted(boxes):
            spans = [
                (max(a, b), min(a + n, b + m))
                for a, n, b, m in zip(offset, shape, theirs_at, theirs_shape, strict=True)
            ]
            if any(first >= last for first, last in spans):
                continue
            theirs = torch.empty(math.prod(theirs_shape))
            if self._fill(name, kind, (theirs_at, theirs_shape), 0, theirs) < theirs.numel():
                continue  # found out below
            ours = tuple(slice(a - o, b - o) for (a, b), o in zip(spans, offset, strict=True))
            cut = tuple(slice(a - o, b - o) for (a, b), o in zip(spans, theirs_at, strict=True))
            found[ours] = theirs.view(theirs_shape)[cut]
            covered += math.prod(b - a for a, b in spans)
        if covered != found.numel():
            raise Damaged(f"{self.folder} does not hold all of {name} ({kind})")
        return found

    def shape(self, name: str) -> Shape:
        """A parameter's whole shape; (0,) where there is none of it."""
        return tuple(self.pieces[name][0][1]["shape"]) if name in self.pieces else (0,)

    def whole(self, name: str, kind: str = "param") -> Tensor:
        """A parameter, or a moment of it, in fp32, whole."""
        shape = self.shape(name)
        return self.part(name, kind, (0,) * len(shape), shape)

    def randoms(self, rank: int) -> dict[str, Tensor]:
        """The random states that `rank` saved."""
        stored = self._file(rank_file(rank))
        names = [name for name in stored.keys() if name.startswith("random/")]
        return {name.removeprefix("random/"): stored.get_tensor(name) for name in names}


def model_of(manifest: dict[str, Any]) -> GPTConfig:
    return GPTConfig(**manifest["model"])


def engines_gpt(folder: Path) -> tuple[dict[str, Any], Reader]:
    """A checkpoint of our GPT, which has the reference names: its manifest and its reader.

    Raises:
        UsageError: it is damaged, or holds Hugging Face's model.
    """
    manifest = saved.read_manifest(folder)
    if manifest["implementation"] == "hf":
        raise UsageError(f"{folder} holds Hugging Face's own layout; export is of engines' GPT")
    return manifest, Reader(folder, manifest)


def export(
    folder: Path, out: Path, dtype: str = "bf16", tick: Callable[[], None] = lambda: None
) -> int:
    """Write a checkpoint's weights alone, whole, into the folder `out`; its bytes.

    Raises:
        UsageError: the checkpoint is damaged, or `out` cannot be written.
    """
    manifest, reader = engines_gpt(folder)
    facts = {"step": manifest["step"], "run": manifest["run"], "commit": manifest["commit"]}

    def whole(name: str) -> Tensor:
        tick()
        return reader.whole(name)

    return write_weights(out, model_of(manifest), whole, dtype, facts)


# --- random states -------------------------------------------------------------------------------


def _as_bytes(values: Any) -> Tensor:
    return torch.from_numpy(np.frombuffer(np.asarray(values).tobytes(), np.uint8).copy())


def seed_random(seed: int) -> None:
    """Start every random state of this process from a seed."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def random_states(tracker: Any) -> dict[str, Tensor]:
    """Every random state of this process, as bytes. Nothing here draws after the start (no
    dropout; data order comes from (seed, step)), but what may be added must find them."""
    found = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state()
    version, words, gauss = random.getstate()
    found["python"] = _as_bytes(np.array([version, *words, gauss is not None], np.uint32))
    _, keys, position, has_gauss, gauss = np.random.get_state()
    found["numpy"] = _as_bytes(np.array([*keys, position, has_gauss], np.uint32))
    if tracker is not None:
        # In one order, so that the same states are the same bytes in a run that went on.
        states = sorted(tracker.get_states().items())
        found |= {f"tracker/{name}": state for name, state in states}
    return found


def set_random_states(found: dict[str, Tensor], tracker: Any) -> None:
    torch.set_rng_state(found["torch"])
    if torch.cuda.is_available() and "cuda" in found:
        torch.cuda.set_rng_state(found["cuda"])
    version, *words, _ = found["python"].numpy().view(np.uint32).tolist()
    random.setstate((version, tuple(words), None))
    *keys, position, has_gauss = found["numpy"].numpy().view(np.uint32).tolist()
    np.random.set_state(("MT19937", np.array(keys, np.uint32), position, has_gauss, 0.0))
    if tracker is not None:
        mine = {n.removeprefix("tracker/"): s for n, s in found.items() if n.startswith("tracker/")}
        tracker.set_states(mine)


# --- all ranks together --------------------------------------------------------------------------


@dataclass
class Event:
    """A save, load or export that ended, as rank 0 reports it.

    blocked_s: how long training waited; total_s: until it was on disk. problem: "" when it went
    well.
    """

    event: str
    step: int
    path: str
    blocked_s: float
    total_s: float
    bytes: int
    ranks: int
    problem: str = ""

    def line(self) -> str:
        """What the log says, in Megatron-LM's words where it went well."""
        if self.problem:
            return f"  could not {self.event} checkpoint at iteration {self.step}: {self.problem}"
        if self.event == "load":
            return f"  successfully loaded checkpoint from {self.path} at iteration {self.step}"
        if self.event == "export":
            return f"  successfully exported weights at iteration {self.step} to {self.path}"
        folder = str(Path(self.path).parent)
        return f"  successfully saved checkpoint at iteration {self.step:7d} to {folder}"


@dataclass
class Checkpointer:
    """Saves and loads one run's state; all ranks call it alike.

    facts: what every manifest says of the run (run_json of train.py). tick: called while it works,
    for the watchdog.
    """

    engine: Any
    spec: Any
    facts: dict[str, Any]
    save_to: Path
    rank: int
    world: int
    tick: Callable = lambda: None
    _events: deque[Event] = field(default_factory=deque)
    _thread: threading.Thread | None = None
    _error: BaseException | None = None
    _ticks: int = 0

    def __post_init__(self) -> None:
        # A group of its own: in asynchronous saving another thread speaks while training does.
        self._group = dist.new_group(backend="gloo") if self.world > 1 else None
        if self.rank == 0 and self.spec.save_interval:
            saved.tidy(self.save_to)

    def _gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        if self.world == 1:
            return [value]
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value, group=self._group)
        return found

    def _all(self, work: Callable, *arguments: Any) -> list[Any]:
        """Every rank does its work, which ticks; what each returned, on every rank.

        Who is done waits for the slowest, perhaps for longer than the watchdog's limit: so the
        ranks tell each other, once a second, whether those that still work got on.

        Raises:
            RuntimeError: on one rank the work raised what it should not.
        """
        done, mine, all_of_them, broken = threading.Event(), [], [], []

        def beat() -> None:
            """On another thread, so that a stack shows where the work hangs."""
            before = [0] * self.world
            try:
                while not all_of_them:
                    done.wait(BEAT_S)
                    told = self._gather((self._ticks, list(mine)))
                    if any(n > m for (n, _), m in zip(told, before, strict=True)):
                        self.tick()
                    before = [n for n, _ in told]
                    if all(result for _, result in told):
                        all_of_them.extend(result for _, (result,) in told)
            except Exception as error:  # a peer died; raised below
                broken.append(error)

        heart = threading.Thread(target=beat, daemon=True, name="checkpoint beat")
        heart.start()
        try:
            mine.append(work(*arguments))
        except Exception as error:  # all must hear of it, or they wait for this rank for ever
            traceback.print_exc()
            mine.append(Unexpected(f"rank {self.rank}: {type(error).__name__}: {error}"))
        done.set()
        wait_for_others(heart)
        if broken:
            raise broken[0]
        for result in all_of_them:
            if isinstance(result, Unexpected):
                raise RuntimeError(result)
        return all_of_them

    def _chief(self, work: Callable, *arguments: Any) -> Any:
        """Rank 0 does this work; what it returned, on every rank."""
        return self._all(*((work, *arguments) if self.rank == 0 else (lambda: None,)))[0]

    def _tick(self) -> None:
        self._ticks += 1
        self.tick()

    def events(self) -> list[Event]:
        """What ended since the last call (rank 0's are the ones to report)."""
        return [self._events.popleft() for _ in range(len(self._events))]

    # saving

    def due(self, step: int) -> bool:
        """Whether the state after `step` steps is to be saved."""
        every = self.spec.save_interval
        return bool(every) and (step % every == 0 or step == self.spec.steps)

    def save(self, step: int) -> None:
        """Save the state after `step` steps. A disk that is full ends the save, not the run."""
        self.wait()
        began = time.perf_counter()
        state = self.engine.state()
        pieces, randoms = _owned(state.held), random_states(state.tracker)
        scalars = {"adam_step": state.adam_step, "scaler": state.scaler}
        if not self.spec.async_save:
            self._write(step, pieces, randoms, scalars, began, None)
            return
        pieces = [
            replace(p, tensors={k: t.to("cpu", copy=True) for k, t in p.tensors.items()})
            for p in pieces
        ]
        blocked_s = time.perf_counter() - began
        work = (step, pieces, randoms, scalars, began, blocked_s)
        self._thread = threading.Thread(target=self._write_behind, args=work, name="checkpoint")
        self._thread.start()

    def _write_behind(self, *work: Any) -> None:
        try:
            self._write(*work)
        except BaseException as error:  # raised where the main thread waits
            self._error = error

    def wait(self) -> None:
        """Until what is being saved in the background is saved; the save's blocked_s counts it."""
        if self._thread is not None:
            began = time.perf_counter()
            self._thread.join()
            self._thread = None
            for event in self._events:  # rank 0's
                if event.event == "save":
                    event.blocked_s += time.perf_counter() - began
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _write(
        self,
        step: int,
        pieces: list[Held],
        randoms: dict[str, Tensor],
        scalars: dict[str, Any],
        began: float,
        blocked_s: float | None,
    ) -> None:
        """Three rounds, so that no rank works on what another has given up: room, files, name."""
        aside, files = self.save_to / f".{saved.name_of(step)}.partial", []

        def write() -> None:
            files.append(write_file(aside / rank_file(self.rank), pieces, randoms, self._tick))

        def finish(problem: str, entries: list[dict[str, Any]]) -> None:
            """Rank 0's: the manifest and the name; then, it being safe, what follows from it."""
            problem = problem or _attempt(self._publish, aside, step, entries, scalars)
            total_s = time.perf_counter() - began
            size = sum(entry["bytes"] for entry in entries)
            folder = self.save_to / saved.name_of(step)
            self._note("save", step, str(folder), blocked_s, total_s, size, problem)
            if problem:
                shutil.rmtree(aside, ignore_errors=True)
            else:
                self._after(step, folder)

        problem = self._chief(_attempt, self._make_room, step)
        entries = []
        if not problem:
            told = self._all(lambda: (_attempt(write), *files))
            problem = next((p for p, *_ in told if p), "")
            entries = [entry for _, *written in told for entry in written]
        self._chief(finish, problem, entries)

    def _note(self, event, step, path, blocked_s, total_s, size, problem) -> None:
        blocked_s = total_s if blocked_s is None else blocked_s
        self._events.append(Event(event, step, path, blocked_s, total_s, size, self.world, problem))

    def _make_room(self, step: int) -> None:
        """The hidden folder, on a disk that has room for what will be written.

        Raises:
            OSError: no room, or no permission.
        """
        aside = saved.begin(self.save_to, step)
        needed, free = self.predicted_bytes(), shutil.disk_usage(aside).free
        if free < needed:
            raise OSError(28, f"{needed:.0f} bytes are needed, {free} are free", str(aside))

    def predicted_bytes(self) -> int:
        """What the tensors of one checkpoint take on disk, whatever the layout."""
        return int(state_bytes(self.spec.model.n_params))

    def _publish(
        self, aside: Path, step: int, files: list[dict[str, Any]], scalars: dict[str, Any]
    ) -> None:
        counted = sum(12 * (p["stop"] - p["start"]) for f in files for p in f["pieces"])
        if counted != self.predicted_bytes():
            raise OSError(
                0, f"{counted} bytes of state, predicted were {self.predicted_bytes()}", str(aside)
            )
        facts, spec = self.facts, self.spec
        saved.write_manifest(
            aside,
            {
                "format": saved.FORMAT,
                "step": step,
                "time_utc": utc_now(),
                "run": facts["run"],
                "engine": spec.engine,
                "implementation": spec.implementation,
                "precision": spec.precision,
                "world_size": self.world,
                "layout": asdict(spec.layout),
                "model": asdict(spec.model),
                "n_params": spec.model.n_params,
                "spec": spec.settings(),
                "commit": facts["git"]["commit"],
                "data": {
                    "path": facts["data"]["path"],
                    "sha256": facts["data"]["sha256"],
                    "seed": spec.seed,
                    "next_step": step,
                    "consumed_sequences": step * spec.layout.global_batch,
                },
                "state_bytes": counted,
                **scalars,
                "files": files,
            },
        )
        saved.publish(aside, self.save_to, step)

    def _after(self, step: int, folder: Path) -> None:
        """Rank 0's work once a checkpoint is safe: weights alone, and deleting old ones."""
        every, spec = self.spec.export_weights, self.spec
        if every and (step % every == 0 or step == spec.steps):
            began, size = time.perf_counter(), 0
            out = self.save_to / f"weights-{step:08d}"

            def write() -> None:
                nonlocal size
                size = export(folder, out, tick=self._tick)

            problem = _attempt(write)
            took = time.perf_counter() - began
            blocked_s = 0.0 if spec.async_save else None
            self._note("export", step, str(out), blocked_s, took, size, problem)
        problem = _attempt(saved.retain, self.save_to, step, spec.keep_last, spec.keep_every)
        if problem:
            self._note("delete", step, str(self.save_to), 0.0, 0.0, 0, problem)

    # loading

    def load(self, path: Path | None) -> int:
        """Fill the engine from rank 0's `path`, a checkpoint or weights alone; the step to go on
        from, 0 without a path.

        Raises:
            UsageError: nothing there, it is damaged (and an earlier one was not asked for, or is
                damaged too), or it is another model's.
        """
        began = time.perf_counter()
        found = self._gather(None if path is None else _outcome(saved.candidates, path))[0]
        if found is None:
            return 0
        if isinstance(found, str):
            raise UsageError(found)
        if saved.step_of(found[0]) is None:
            return self._load_weights(found[0], began)
        problems = []
        for folder in found:
            manifest, problem = self._checked(folder)
            if not problem:
                break
            problems.append(problem)
            self._note("load", saved.step_of(folder), str(folder), None, 0.0, 0, problem)
            if not self.spec.load_previous:
                break
        if problem:
            hint = "" if self.spec.load_previous else "; --load-previous takes the one before"
            raise Damaged("; ".join(problems) + hint)
        self._check_model(folder, model_of(manifest), manifest["implementation"])
        if manifest["step"] > self.spec.steps:
            raise UsageError(f"{folder} is beyond the run's {self.spec.steps} steps")
        reader, state = Reader(folder, manifest), self.engine.state()

        def fill() -> None:
            for piece in state.held:
                for kind in KINDS:
                    reader.fill(piece, kind)
                    self._tick()
            if self.world == manifest["world_size"] and self.spec.engine == manifest["engine"]:
                self._set_random_states(folder, reader, state.tracker)

        if problem := next((p for p in self._all(_outcome, fill) if p), ""):
            raise Damaged(problem)
        self.engine.restore(manifest["adam_step"], manifest["scaler"])
        size = sum(entry["bytes"] for entry in manifest["files"])
        took = time.perf_counter() - began
        self._note("load", manifest["step"], str(folder), None, took, size, "")
        return manifest["step"]

    def _checked(self, folder: Path) -> tuple[dict[str, Any], str]:
        """The manifest and what is wrong; each rank looks at its share of the files."""
        manifest = _outcome(saved.read_manifest, folder)

        def look() -> str:
            if isinstance(manifest, str):
                return manifest
            return saved.damage(folder, manifest["files"][self.rank :: self.world], self._tick)

        return manifest, next((p for p in self._all(look) if p), "")

    def _set_random_states(self, folder: Path, reader: Reader, tracker: Any) -> None:
        try:
            set_random_states(reader.randoms(self.rank), tracker)
        except (KeyError, ValueError, TypeError, RuntimeError) as error:
            path = folder / rank_file(self.rank)
            raise Damaged(f"{path} holds no random states that fit: {error!r}") from error

    def _check_model(self, folder: Path, model: GPTConfig, implementation: str) -> None:
        ours = asdict(self.spec.model)
        if differ := [k for k, v in asdict(model).items() if v != ours[k]]:
            words = ", ".join(f"{k} {getattr(model, k)} not {ours[k]}" for k in differ)
            raise UsageError(f"{folder} holds another model: {words}")
        if implementation != self.spec.implementation:
            raise UsageError(
                f"{folder} holds implementation {implementation}'s own layout,"
                f" not {self.spec.implementation}'s"
            )

    def _load_weights(self, folder: Path, began: float) -> int:
        """Start a new training from weights alone: no moments, step 0."""
        shares = self._all(_outcome, read_weights, folder, self.rank == 0, self._tick)
        if problem := next((s for s in shares if isinstance(s, str)), ""):
            raise UsageError(problem)
        weights: Weights = shares[self.rank]
        self._check_model(folder, weights.config, "gpt")
        whole = functools.lru_cache(maxsize=1)(weights.tensor)
        held = self.engine.state().held

        def fill() -> None:
            for piece in held:
                box = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.part, strict=True))
                part = whole(piece.name)[box].reshape(-1)
                target = piece.tensors["param"]
                target.copy_(part[piece.start : piece.start + target.numel()])
                self._tick()

        self._all(fill)
        self.engine.restore(0, {})
        size = (folder / "model.safetensors").stat().st_size
        took = time.perf_counter() - began
        self._note("load", 0, str(folder), None, took, size, "")
        return 0

    def agree(self, wanted: bool) -> bool:
        """Whether any rank wants it; called by the main threads only."""
        self._raise()
        if self.world == 1:
            return wanted
        flag = torch.tensor([int(wanted)], dtype=torch.int32, device="cpu")
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())


def wait_for_others(thread: threading.Thread) -> None:
    """Wait; by this name, the watchdog knows that a rank waits for others here."""
    thread.join()


class Unexpected(str):
    """What a rank's work raised and should not have, in a line."""


def _attempt(work: Callable, *arguments: Any) -> str:
    """Do it; "" or, in a line, why the disk did not let it."""
    try:
        work(*arguments)
        return ""
    except UsageError as error:
        return str(error)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror or error}{where}"


def _outcome(work: Callable, *arguments: Any) -> Any:
    """What it returns, or a user's mistake as its line, so that all ranks can hear of it."""
    try:
        return work(*arguments)
    except UsageError as error:
        return str(error)
