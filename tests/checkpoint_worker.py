"""Run under torchrun by test_checkpoints_resume.py: trains, saves, loads, trains on.

    torchrun --nproc-per-node 4 tests/checkpoint_worker.py OUT TOKENS FIRST...

Each FIRST is a run such as `engine:tp=2,pp=2`. It is trained for 4 steps and saved after 2. Then it
is built again, loads its own checkpoint and repeats steps 3 and 4. In fp32 it also does so from the
first run's checkpoint. In fp16, training starts with a loss scale that overflows; if OUT's name is
`raised`, it starts with a scale that is doubled after two good steps, and learns slowly.
Prints one JSON line:
{"straight": {name: [[loss, norm, scale], ...]}, "same": ..., "crossed": ..., "scaler": ...}.
"""

import gc
import json
import os
import sys
import warnings
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

warnings.simplefilter("ignore")  # from libraries that call each other's old functions

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.optim.optimizer import register_optimizer_step_pre_hook  # noqa: E402

from parallel import batches, engines, token_files  # noqa: E402
from parallel.checkpoint import folders  # noqa: E402
from parallel.checkpoint.checkpointer import Checkpointer  # noqa: E402
from parallel.checkpoint.contents import KINDS  # noqa: E402
from parallel.config.resolve import resolve  # noqa: E402
from parallel.config.run_spec import RunSpec  # noqa: E402
from parallel.engines.optim import lr_at  # noqa: E402
from parallel.ranks import Ranks  # noqa: E402
from tests import gathered_attention  # noqa: E402

SIZES = {"n_layer": 4, "hidden": 32, "n_head": 4, "vocab_size": 257, "max_seq_len": 16}
RULES = {"steps": 4, "lr": 1e-2, "min_lr": 1e-3, "warmup_steps": 1, "global_batch": 4}


class Counting(np.random.PCG64DXSM):
    """What draws starting weights, 32 bits for each."""

    elements = 0

    def random_raw(self, size: int) -> np.ndarray:
        Counting.elements += 2 * size
        return super().random_raw(size)


def save_of(out: Path, name: str) -> Path:
    """Where a run's checkpoints go."""
    return out / name.translate({ord(":"): "-", ord(","): "-", ord("="): None})


def spec_of(name: str, out: Path, tokens: str) -> RunSpec:
    engine, _, words = name.partition(":")
    chosen = {"engine": engine, "device": "auto", "data": tokens, **SIZES, **RULES}
    for word in filter(None, words.split(",")):
        key, value = word.split("=")
        chosen[key] = int(value) if value.isdigit() else {"true": True}.get(value, value)
    if out.name == "raised":  # small steps: what fp16 rounds then hardly changes the next gradient
        chosen |= {"lr": 1e-4, "min_lr": 1e-5}
    chosen |= {"save_interval": 2, "keep_last": 0}
    if "cp" in chosen:  # Transformer Engine, not used here, has no fp32 with cp
        spec = resolve(("test", chosen | {"precision": "bf16"}), gpus=dist.get_world_size())
        return replace(spec, precision="fp32")
    return resolve(("test", chosen), gpus=dist.get_world_size())


def train(spec: RunSpec, save: Path, corpus: token_files.Data, load: Path | None) -> dict:
    """Train from `load`, or from the start; losses and norms of the steps, and the final state."""
    rank = dist.get_rank()
    Counting.elements = 0
    engine = engines.load(spec, torch.device("cpu"), "torch", draws=load is None)
    drawn = Counting.elements
    facts = {"run": spec.name, "git": {"commit": None}, "data": {"path": spec.data, "sha256": None}}
    ranks = Ranks(rank, spec.gpus)
    saver = Checkpointer(engine, spec, facts, save, ranks, torch.device("cpu"))
    if spec.precision == "fp16" and load is None:
        raised = save.parent.name == "raised"
        scale, good_steps = (2.0**10, 998) if raised else (2.0**34, 3)
        engine.restore(0, {"scale": scale, "good_steps": good_steps})
    first, curve = saver.load(load), []
    scaler = engine.state().scaler
    dp_rank = spec.layout.coords(rank)["dp"]
    waits = []  # whether the state was as before the step when the optimizer began to change it
    for step in range(first, spec.steps):
        made = batches.batches(corpus.train, spec, dp_rank, step)
        live = [h.tensors[k] for h in engine.state().pieces for k in KINDS]
        before = [tensor.clone() for tensor in live]
        hook = register_optimizer_step_pre_hook(
            lambda *_, now=live, then=before: waits.append(all(map(torch.equal, now, then)))
        )
        waits.clear()
        result = engine.step(made, lr_at(spec, step), bool)
        hook.remove()
        assert result.skipped or waits[0], (
            f"{spec.name} changes the state before its optimizer's step"
        )
        curve.append([result.loss, result.grad_norm, result.loss_scale])
        if not first and saver.due(step + 1):
            saver.save(step + 1)
            scaler = engine.state().scaler if step + 1 == 2 else scaler
    saver.wait()
    problems = [e.problem for e in saver.events() if e.problem]
    assert not problems, problems
    held = [h.tensors[k].clone() for h in engine.state().pieces for k in KINDS]
    engine.close()
    if "megatron.core" in sys.modules:
        sys.modules["megatron.core"].parallel_state.destroy_model_parallel()
    if "deepspeed" in sys.modules:
        groups = sys.modules["deepspeed"].utils.groups
        for cached in [n for n in vars(groups) if n == "mpu" or (n[0] == "_" and n.isupper())]:
            if not isinstance(getattr(groups, cached), dict):
                setattr(groups, cached, None)
            elif cached.startswith("_EXPERT"):
                getattr(groups, cached).clear()
    del engine, saver
    gc.collect()
    # A thread of each gloo group wakes up 100 times a second: hundreds of groups slow all down.
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    return SimpleNamespace(curve=curve, bits=held, first=first, scaler=scaler, drawn=drawn)


def main() -> None:
    out, tokens, names = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    torch.set_num_threads(1)
    np.random.PCG64DXSM = Counting
    gc.freeze()  # else each collection scans the libraries' objects, for a second
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if any("fp16" in name for name in names):  # DeepSpeed refuses fp16 on CPU, though torch has it
        from parallel.engines.deepspeed_common import deepspeed  # patched first

        deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    if any("cp=" in name for name in names):
        gathered_attention.install()
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    corpus = token_files.load(tokens, SIZES["max_seq_len"], SIZES["vocab_size"])
    found: dict = {"straight": {}, "same": {}, "crossed": {}, "bits": {}, "scaler": {}, "drawn": {}}
    specs = {name: spec_of(name, out, tokens) for name in names}
    for name, spec in specs.items():
        save = save_of(out, name)
        straight = train(spec, save, corpus, None)
        again = train(spec, save, corpus, save / folders.name_of(2))
        equal = len(again.bits) == len(straight.bits) and all(
            torch.equal(a, b) for a, b in zip(again.bits, straight.bits, strict=True)
        )
        votes = [None] * spec.gpus
        dist.all_gather_object(votes, equal)
        drawn = [None] * spec.gpus
        dist.all_gather_object(drawn, (straight.drawn, again.drawn))
        found["drawn"][name] = [max(of) for of in zip(*drawn, strict=True)]
        found["straight"][name], found["same"][name] = straight.curve, again.curve
        found["bits"][name] = all(votes)
        found["scaler"][name] = [straight.scaler, again.scaler]
        if spec.precision == "fp16":
            continue
        if name != names[0] and spec.implementation == "gpt":
            crossed = train(spec, save, corpus, save_of(out, names[0]) / folders.name_of(2))
            found["crossed"][name] = crossed.curve
    if specs[names[0]].precision == "fp32":  # and back: from the last run's checkpoint
        first, last = (save_of(out, names[at]) for at in (0, -1))
        back = train(specs[names[0]], first, corpus, last / folders.name_of(2))
        found["crossed"][names[0]] = back.curve
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    os._exit(0)  # skip the destructors of a dozen engines


if __name__ == "__main__":
    main()
