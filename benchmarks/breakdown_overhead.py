"""What keeping a breakdown costs: steps with and without it, in turns, in one process per rank.

    python benchmarks/breakdown_overhead.py [--engine megatron --tp 2 ...] [--rounds 20 --block 5]

Takes parallel.train's flags (`python -m parallel.train --help`); `--gpus` ranks are started here.
The same engine takes `block` steps listened to and `block` steps not, in an order that turns around
every round (on off, off on, ...), so that a machine that warms up or is shared slows both alike.
Off means what a run without `--breakdown` has: the regions are marked, nobody listens, and the
process groups' own methods are in place. DDP cannot let go of its hook, so `ddp` has a second
engine that never had one. Prints one JSON line with the medians and the ratio of paired blocks, on
over off, with the quartiles of that ratio.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from parallel import spec  # noqa: E402


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/breakdown_overhead.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=20, help="pairs of blocks")
    parser.add_argument("--block", type=int, default=5, help="optimizer steps of a block")
    spec.add_flags(parser)
    return parser.parse_args(argv)


def measure(arguments: argparse.Namespace) -> None:
    """One rank: build the engine with a breakdown, then step with and without it."""
    import torch
    import torch.distributed as dist
    from torch.distributed import ProcessGroup, Work

    from parallel import breakdown, data, engines, kernels, launch, ranges, train

    given = spec.from_flags(arguments) | {"breakdown": True, "eval_steps": 0}
    given["steps"] = 2 * arguments.block * (arguments.rounds + 1)
    place = launch.detect()
    run = spec.resolve(("command line", given), gpus=place.world_size)
    torch.set_num_threads(run.threads)
    device = train.choose_device(run, place)
    train.init_process_group(run, device, place)
    methods = (*((ProcessGroup, name) for name in breakdown._CALLS), (Work, "wait"))
    methods = tuple((of, name) for of, name in methods if name in of.__dict__)
    bare = [of.__dict__[name] for of, name in methods]
    kernel = kernels.choose(run.kernels, device, engines.kernels_of(run))
    with tempfile.TemporaryDirectory() as folder:
        plain = engines.load(run, device, kernel) if run.engine == "ddp" else None
        books = breakdown.start(run, device, place.rank, Path(folder))
        wrapped = [of.__dict__[name] for of, name in methods]
        engine = engines.load(run, device, kernel)
        corpus = data.load(run.data, run.seq_len, run.model.vocab_size)
        dp_rank = run.layout.coords(place.rank)["dp"]
        step = 0

        def block(on: bool) -> float:
            nonlocal step
            stepping = engine if on else plain or engine
            breakdown._active = books if on else None
            ranges.listeners[:] = [books] if on else []
            for (of, name), method in zip(methods, wrapped if on else bare, strict=True):
                setattr(of, name, method)
            dist.barrier()
            began = time.perf_counter()
            books.forget()
            for _ in range(arguments.block):
                before = time.perf_counter()
                batches = data.batches(
                    corpus.train, run.layout, run.seq_len, run.model.vocab_size, dp_rank, 1, step
                )
                stepping.step((tuple(t.to(device) for t in batch) for batch in batches), run.lr)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                step += 1
                if on:
                    books.lap(step, time.perf_counter() - before)
            return (time.perf_counter() - began) / arguments.block

        block(True), block(False)  # warm up
        times: dict[bool, list[float]] = {True: [], False: []}
        for number in range(arguments.rounds):
            for on in (True, False) if number % 2 else (False, True):
                times[on].append(block(on))
        breakdown._active = None
        ranges.listeners.clear()
        engine.close()
    if place.rank == 0:
        ratios = [on / off for on, off in zip(times[True], times[False], strict=True)]
        low, median, high = statistics.quantiles(ratios, n=4)
        found = {
            "run": run.name,
            "rounds": arguments.rounds,
            "block": arguments.block,
            "on_s": statistics.median(times[True]),
            "off_s": statistics.median(times[False]),
            "ratio": median,
            "ratio_quartiles": [low, high],
        }
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    arguments = parse(argv)
    if "RANK" in os.environ:
        measure(arguments)
        return 0
    gpus = spec.from_flags(arguments).get("gpus", 1)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(gpus), str(Path(__file__).resolve()), *argv]
    return subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}).returncode


if __name__ == "__main__":
    sys.exit(main())
