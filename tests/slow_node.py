"""parallel.bench by a clock that knows no noise: on the node that SLOW_NODE names, matrix
products take twenty times as long."""

import os
import sys
from collections.abc import Callable

import torch

from parallel import bench


def seconds(call: Callable[[], object], device: torch.device) -> float:
    call()
    is_slow = os.environ["SLURMD_NODENAME"] == os.environ["SLOW_NODE"]
    return 0.2 if is_slow and call.__name__ == "multiply" else 0.01


bench.seconds = seconds

sys.exit(bench.main())
