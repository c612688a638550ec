"""What Python's garbage collection costs a step, left alone and with --gc-interval.

    python benchmarks/garbage.py [--engine ddp --steps 200 --gc-interval 100 ...]

Takes parallel.train's flags (see its --help) and trains on one rank: first --steps steps in which
Python collects when it likes, then as many in which it collects as parallel.train makes it. Python
itself says when each collection begins and ends, so other programs on the machine do not blur which
steps had one. Prints one JSON line; of each way: the steps with a collection and with a full one,
the share of the time that collections took, and the longest one.
"""

import argparse
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from base.errors import Parser, UsageError, command_line  # noqa: E402
from parallel.config import settings  # noqa: E402
from parallel.record.launch import Launch  # noqa: E402

ALONE = Launch(0, 1, 0, 1, "none")


def measure(run: settings.RunSpec) -> dict[str, Any]:
    """Both ways, in one process."""
    import torch

    from parallel import engines, token_files, train
    from parallel.engines.devices import choose_device, init_process_group
    from parallel.trainer import garbage_collected_together

    train.set_environment(run, ALONE)
    torch.set_num_threads(run.threads)
    device = choose_device(run, ALONE)
    init_process_group(run, device, ALONE, print)
    engine = engines.load(run, device, "torch")
    corpus = token_files.load(run.data, run.seq_len, run.model.vocab_size)
    seen: list[tuple[int, float]] = []  # (generation, seconds) of each collection in a step

    def note(phase: str, about: dict[str, int]) -> None:
        if phase == "start":
            seen.append((about["generation"], -time.perf_counter()))
        else:
            generation, began = seen.pop()
            seen.append((generation, began + time.perf_counter()))

    found: dict[str, Any] = {"run": run.name, "steps": run.steps}
    for way, interval in (("left alone", 0), (f"every {run.gc_interval} steps", run.gc_interval)):
        per_step = []
        with garbage_collected_together(interval) as collect:
            gc.callbacks.append(note)
            began = time.perf_counter()
            for step in range(run.steps):
                seen.clear()
                batches = token_files.batches(
                    corpus.train, run.layout, run.seq_len, run.model.vocab_size, 0, run.seed, step
                )
                engine.step((tuple(t.to(device) for t in batch) for batch in batches), run.lr)
                collect(step + 1)
                per_step.append(list(seen))
            took = time.perf_counter() - began
            gc.callbacks.remove(note)
        every = [seconds for step in per_step for _, seconds in step]
        found[way] = {
            "steps_with_one": sum(bool(step) for step in per_step),
            "steps_with_a_full_one": sum(any(g == 2 for g, _ in step) for step in per_step),
            "share_of_time": round(sum(every) / took, 5),
            "longest_ms": round(max(every, default=0.0) * 1e3, 2),
        }
    return found


def parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="python benchmarks/garbage.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    settings.add_flags(parser)
    return parser.parse_args(argv)


@command_line("garbage")
def main(argv: list[str] | None = None) -> int:
    given = settings.from_flags(parse(sys.argv[1:] if argv is None else argv))
    run = settings.resolve(("flags", given), gpus=1)
    if not run.gc_interval:
        raise UsageError("gc_interval 0 leaves Python alone, and there is nothing to compare")
    print(json.dumps(measure(run)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
