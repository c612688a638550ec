"""The cost of --breakdown: steps with and without it, in turns, in one process per rank.

    python benchmarks/breakdown_overhead.py [--engine megatron --tp 2 ...] [--rounds 20 --block 5]

Takes parallel.train's flags (`python -m parallel.train --help`) and starts `--gpus` ranks. In a
round, one engine takes a block of steps with the breakdown on, one with it on and every step traced
(a run traces three), and two blocks with it off. The order of the blocks changes from round to
round, so that a machine that warms up or is shared slows all alike. Off is a run without the flag:
regions are marked but not timed, and the process groups have their own methods. A hook of DDP
cannot be removed, so `ddp` has two more engines that never had one. Prints one JSON line: the
median times and three ratios of blocks: on, and traced, over the mean of the two off; and the
second off over the first, which shows the machine's noise. Each ratio has its quartiles and the
95 % interval of its median. Many short blocks (--rounds 300 --block 1) narrow these. once_s: what a
run spends between steps, on comparing clocks twice and on writing the trace (of a block here).
"""

import argparse
import itertools
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

from base.bounds import check_flags  # noqa: E402
from base.errors import Parser, command_line  # noqa: E402
from parallel.config import settings  # noqa: E402
from parallel.config.engine_abilities import kernels_of  # noqa: E402


def parse(argv: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="python benchmarks/breakdown_overhead.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=20, help="of four blocks")
    parser.add_argument("--block", type=int, default=5, help="optimizer steps of a block")
    settings.add_flags(parser)
    arguments = parser.parse_args(argv)
    check_flags(arguments, rounds=(1, 10**6), block=(1, 10**6))
    return arguments


def measure(arguments: argparse.Namespace) -> None:
    """One rank: build the engine with a breakdown, then step with and without it."""
    import numpy as np
    import torch
    import torch.distributed as dist
    from torch.distributed import ProcessGroup, Work

    from parallel import engines, token_files
    from parallel.engines import kernels
    from parallel.engines.devices import choose_device, init_process_group
    from parallel.measure import ranges, step_parts
    from parallel.measure.steady_time import median_ci95
    from parallel.measure.traced_steps import TracedSteps
    from parallel.record import launch

    given = settings.from_flags(arguments) | {"breakdown": True, "eval_steps": 0}
    given["steps"] = 4 * arguments.block * (arguments.rounds + 1)
    place = launch.detect()
    run = settings.resolve((settings.COMMAND_LINE, given), gpus=place.world_size)
    torch.set_num_threads(run.threads)
    device = choose_device(run, place)
    init_process_group(run, device, place, print)
    methods = (*((ProcessGroup, name) for name in step_parts._CALLS), (Work, "wait"))
    methods = tuple((of, name) for of, name in methods if name in of.__dict__)
    bare = [of.__dict__[name] for of, name in methods]
    kernel = kernels.choose(
        run.kernels, device, kernels_of(run.engine, run.layout.tp, run.model.norm)
    )
    with tempfile.TemporaryDirectory() as folder:
        bare_engine = engines.load(run, device, kernel) if run.engine == "ddp" else None
        bare_again = engines.load(run, device, kernel) if run.engine == "ddp" else None
        books = step_parts.start(run, device, place.rank, Path(folder))
        wrapped = [of.__dict__[name] for of, name in methods]
        engine = engines.load(run, device, kernel)
        corpus = token_files.load(run.data, run.seq_len, run.model.vocab_size)
        dp_rank = run.layout.coords(place.rank)["dp"]
        stepping_in = {"on": engine, "traced": engine}
        stepping_in |= {"off": bare_engine or engine, "again": bare_again or engine}
        step = 0
        traced = TracedSteps(run.layout, place.rank, device, 0, arguments.block)

        def block(how: str) -> float:
            nonlocal step
            on, stepping = how in ("on", "traced"), stepping_in[how]
            books._traced = traced if how == "traced" else None
            if books._traced:
                traced.begins, traced.ends, traced._marks[:] = step, step + arguments.block, []
            step_parts._active = books if on else None
            ranges.listeners[:] = [books] if on else []
            for (of, name), method in zip(methods, wrapped if on else bare, strict=True):
                setattr(of, name, method)
            dist.barrier()
            began = time.perf_counter()
            books.forget()
            for _ in range(arguments.block):
                before = time.perf_counter()
                batches = token_files.batches(
                    corpus.train, run.layout, run.seq_len, run.model.vocab_size, dp_rank, 1, step
                )
                stepping.step((tuple(t.to(device) for t in batch) for batch in batches), run.lr)
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                step += 1
                if on:
                    books.lap(step, time.perf_counter() - before)
            return (time.perf_counter() - began) / arguments.block

        times: dict[str, list[float]] = {how: [] for how in stepping_in}
        orders = list(itertools.permutations(times))
        for number in range(arguments.rounds + 1):
            for how in orders[number % len(orders)]:
                took = block(how)
                if number:  # the first round is warm-up
                    times[how].append(took)
        step_parts._active = None
        ranges.listeners.clear()
        dist.barrier()
        before = time.perf_counter()
        for _ in range(2):
            error_s = traced.compare_clocks()
        traced.write(Path(folder))
        once_s = time.perf_counter() - before
        engine.close()
    if place.rank == 0:
        found: dict[str, object] = {"run": run.name, "rounds": arguments.rounds}
        found |= {"block": arguments.block}
        found |= {f"{how}_s": statistics.median(taken) for how, taken in times.items()}
        found |= {"once_s": round(once_s, 4), "clock_error_us": round(1e6 * error_s, 1)}
        on, with_trace, off, again = (np.array(taken) for taken in times.values())
        each = {"on": on, "traced": with_trace}
        ratios_of = {name: taken / ((off + again) / 2) for name, taken in each.items()}
        for name, ratios in (ratios_of | {"again": again / off}).items():
            low, median, high = np.quantile(ratios, (0.25, 0.5, 0.75)).round(4).tolist()
            interval = [round(end, 4) for end in median_ci95(ratios) or ()]
            found[f"{name}_over_off"] = {
                "median": median,
                "ci95": interval,
                "quartiles": [low, high],
            }
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


@command_line("breakdown_overhead")
def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    arguments = parse(argv)
    if "RANK" in os.environ:
        measure(arguments)
        return 0
    gpus = settings.from_flags(arguments).get("gpus", 1)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(gpus), str(Path(__file__).resolve()), *argv]
    return subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}).returncode


if __name__ == "__main__":
    sys.exit(main())
