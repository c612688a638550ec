"""Bytes that a rank sends in a collective. Torch-free: rehearsals and the planner count so."""

from typing import Any

CONTROL_BYTES = 64  # messages of so many are not counted


def wire_bytes(operation: str, n: Any, payload: Any) -> Any:
    """Returns the bytes that each of the n ranks sends when `payload` bytes go through a
    collective; numbers or arrays.

    The ring algorithms of Patarasu & Yuan 2009 ("Bandwidth optimal all-reduce algorithms for
    clusters of workstations") and of nccl-tests' PERFORMANCE.md: an all-reduce sends 2(n-1)/n of
    its tensor; reduce-scatter, all-gather and all-to-all (n-1)/n of the whole; broadcast and reduce
    (n-1)/n, the mean over the ring, whose last rank sends nothing. A send sends all of it.
    `payload`: the tensor that is reduced or broadcast; all that is gathered, or scattered.
    """
    if operation == "send":
        return 1.0 * payload
    return (2 if operation == "all_reduce" else 1) * (n - 1) / n * payload
