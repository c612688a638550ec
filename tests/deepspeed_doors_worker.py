"""Run on every rank by test_doors_deepspeed.py: DeepSpeed's own files of our runs, and from others.

    python -m tests.deepspeed_doors_worker OUT TOKENS TASK RUN...

save       trains each RUN (`engine:zero_stage=2`) for 4 steps. After 2 our checkpoint is saved, and
           DeepSpeed saves one beside it, which its own tool converts to the universal form.
load       trains each RUN from OUT/imported, and from the checkpoint of ours that it was made of.
universal  has DeepSpeed's own loader read OUT/universal in each RUN, saves our checkpoint, trains.

Prints one JSON line: {RUN: [[loss, norm, scale], ...]}.
"""

import argparse
import json
import os
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from parallel import token_files
from parallel.checkpoint import folders
from parallel.checkpoint.checkpointer import Checkpointer
from tests import checkpoint_worker
from tests.checkpoint_worker import SIZES, save_of, spec_of, train


class SavesBoth(Checkpointer):
    def save(self, step: int) -> None:
        super().save(step)
        if step == 2:
            theirs = self.save_to.with_name(f"{self.save_to.name}-deepspeed")
            self.engine.engine.save_checkpoint(str(theirs), tag="global_step2")
            dist.barrier()
            if dist.get_rank() == 0 and self.spec.layout.pp == 1:
                convert(theirs)
            dist.barrier()


def convert(theirs: Path) -> None:
    from deepspeed.checkpoint import ds_to_universal

    universal = theirs.with_name(theirs.name.replace("-deepspeed", "-universal"))
    universal.mkdir()
    folders_ = {"input_folder": theirs / "global_step2", "output_folder": universal / "step2"}
    options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False}
    options |= {"strict": True, "inject_missing_state": True}
    texts = {name: str(folder) for name, folder in folders_.items()}
    ds_to_universal.main(argparse.Namespace(**texts, **options))


class LoadsUniversal(Checkpointer):
    def load(self, path: Path) -> int:
        self.engine.engine.load_checkpoint(str(path))
        self.save(2)
        return 2


def main() -> None:
    out, tokens, task, names = Path(sys.argv[1]), *sys.argv[2:4], sys.argv[4:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    corpus, found = token_files.load(tokens, SIZES["max_seq_len"], SIZES["vocab_size"]), {}
    for name in names:
        spec, save = spec_of(name, out, tokens), save_of(out, name)
        if task == "save":
            checkpoint_worker.Checkpointer = SavesBoth
            found[name] = train(spec, save, corpus, None).curve
        elif task == "load":
            ours = save_of(out, "deepspeed_zero:zero_stage=2") / folders.name_of(2)
            loaded = (train(spec, save, corpus, load) for load in (out / "imported", ours))
            found[name] = [each.curve for each in loaded]
        else:
            checkpoint_worker.Checkpointer = LoadsUniversal
            spec = replace(spec, deepspeed_config=str(out / "load_universal.json"))
            save = save.with_name(f"{save.name}-loaded")
            found[name] = train(spec, save, corpus, out / "universal").curve
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    os._exit(0)  # skip the destructors of engines


if __name__ == "__main__":
    main()
