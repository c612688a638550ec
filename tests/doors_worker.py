"""Run in forked ranks by test_doors.py: megatron-core writes and reads its own torch_dist.

    tests.doors_worker save OUT TOKENS RUN    # two steps, saved by megatron-core and by us
    tests.doors_worker load OUT TOKENS RUN    # megatron-core reads OUT/in, then we save
    tests.doors_worker resume OUT TOKENS RUN  # goes on from OUT/imported

Each writes the losses and norms of the steps that follow to OUT/VERB.json. RUN is `megatron:tp=2`
say. Ours are OUT/ours (save) and OUT/back (load), theirs OUT/iter_0000002.
"""

import importlib
import json
import multiprocessing
import os
import sys
import warnings
from datetime import timedelta
from pathlib import Path

warnings.simplefilter("ignore")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from parallel import batches, engines, token_files  # noqa: E402
from parallel.checkpoint.checkpointer import Checkpointer  # noqa: E402
from parallel.engines.optim import fuse, lr_at  # noqa: E402
from parallel.ranks import Ranks  # noqa: E402
from tests.checkpoint_worker import SIZES, spec_of  # noqa: E402

META = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


def sharded(engine, loading: bool) -> tuple[torch.nn.Module, dict]:
    """The innermost model, and what megatron-core's reader and writer take."""
    (model,) = engine.chunks
    while hasattr(model, "module"):
        model = model.module
    weights = model.sharded_state_dict(metadata=META)
    optimizer = engine.optimizer.sharded_state_dict(weights, is_loading=loading, metadata=META)
    return model, {"model": weights, "optimizer": optimizer}


def set_states(self, parameter, tensors: dict) -> None:
    """Without apex and Transformer Engine, megatron-core's own loader misses AdamW's steps here,
    which it has set before."""
    group, place = self.model_param_group_index_map[parameter]
    state = self.optimizer.state[self.optimizer.param_groups[group]["params"][place]]
    given(self, parameter, tensors | {"step": state["step"].clone()})


def main() -> None:
    global given
    verb, out, tokens, name = sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4]
    torch.set_num_threads(1)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    spec, rank = spec_of(name, out, tokens), dist.get_rank()
    dp_rank = spec.layout.coords(rank)["dp"]
    engine = engines.load(spec, torch.device("cpu"), "torch", draws=verb == "save")
    facts = {"run": spec.name, "git": {"commit": None}, "data": {"path": tokens, "sha256": None}}
    to = out / {"save": "ours", "load": "back"}.get(verb, "resumed")
    cpu = torch.device("cpu")
    saver = Checkpointer(engine, spec, facts, to, Ranks(rank, spec.gpus), cpu)
    from megatron.core import dist_checkpointing

    corpus = token_files.load(tokens, SIZES["max_seq_len"], SIZES["vocab_size"])

    def train(*steps: int) -> list:
        made = [batches.batches(corpus.train, spec, dp_rank, step) for step in steps]
        done = [engine.step(b, lr_at(spec, s), bool) for b, s in zip(made, steps, strict=True)]
        return [[each.loss, each.grad_norm] for each in done]

    if verb == "save":
        train(0, 1)
        theirs = out / "iter_0000002"
        if rank == 0:
            theirs.mkdir(parents=True)
        dist.barrier()
        dist_checkpointing.save(sharded(engine, False)[1] | {"iteration": 2}, str(theirs))
    elif verb == "load":
        engine.state()  # without apex, megatron-core asks for AdamW's steps before the first
        model, asked = sharded(engine, True)
        (newest,) = (out / "in").glob("iter_*")
        of = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
        given = of.DistributedOptimizer._set_main_param_and_optimizer_states
        of.DistributedOptimizer._set_main_param_and_optimizer_states = set_states
        state = dist_checkpointing.load(asked, str(newest))
        model.load_state_dict(state["model"])
        engine.optimizer.load_state_dict(state["optimizer"])
        for chained in engine.optimizer.chained_optimizers:
            # Its groups are now the checkpoint's, which leave to each machine whether AdamW is
            # fused. The run that did not stop is: unfused, the last digit differs on some CPUs.
            fuse(chained.optimizer)
            for state in chained.optimizer.state.values():
                state["step"] = state["step"].clone()  # it gives all parameters one counter
    else:
        assert saver.load(out / "imported") == 2
    saver.save(2)
    saver.wait()
    curve = train(2, 3)
    if rank == 0:
        (out / f"{verb}.json").write_text(json.dumps(curve))
    dist.barrier()
    for child in multiprocessing.active_children():  # megatron-core's queue of results
        child.terminate()
    os._exit(0)


if __name__ == "__main__":
    main()
