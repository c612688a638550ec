"""How a run ends: the states and kinds that status.json may hold. Torch-free.

`state` says where the run is, `kind` why it failed or stopped, and `reason` says that in words for
a person. A program decides by the kind. A status.json written before there was a kind has none:
the reader then takes it from the words, with `kind_of`.
"""

import errno
import re
from enum import StrEnum

from base.errors import UsageError

RUNNING, COMPLETE, INTERRUPTED, FAILED = "running", "complete", "interrupted", "failed"
PENDING = "pending"  # in no file: a job was submitted and has written nothing yet
FULL = (errno.ENOSPC, errno.EDQUOT)  # no room on the disk, or in the user's share of it


class Kind(StrEnum):
    """Why a run failed or was interrupted."""

    REFUSED = "refused"  # it could not start: a setting, the data or the machine does not fit
    RAISED = "raised"  # the program raised an error
    MEMORY = "memory"  # a GPU or the host ran out of memory
    DISK = "disk"  # the disk is full
    DIVERGED = "diverged"  # at the end the loss or the gradient norm is not finite
    HANG = "hang"  # no rank made progress
    COMMUNICATION = "communication"  # the ranks did not meet, or a collective failed
    LOST_PEER = "lost peer"  # another rank ended first: the connection to it broke
    KILLED = "killed"  # a signal that no process can handle ended a rank
    SIGNAL = "signal"  # asked to stop from outside: scancel, Ctrl-C, a launcher that ended
    TIME_LIMIT = "time limit"  # the job reached its time limit
    UNKNOWN = "unknown"  # only that it ended is known, an exit status for example


# These follow from another event: a later word about that event replaces them.
CONSEQUENCES = (Kind.LOST_PEER, Kind.SIGNAL, Kind.UNKNOWN)

# What says that a GPU or the host ran out of memory: PyTorch and the libraries on GPUs, NCCL (in
# quotes), PyTorch on CPU, Python and NumPy, the kernel, Slurm.
OUT_OF_MEMORY = (
    r"(?:CUDA|HIP|XPU|[Ee]rror:|Error \[CUDA\]:) out of memory|OutOfMemoryError|'out of memory'"
    r"|[A-Z]_STATUS_ALLOC_FAILED|DefaultCPUAllocator: (?:can't allocate|not enough) memory"
    r"|(?<!except )(?<!raise )(?<!\w)(?:_Array)?MemoryError(?::|[ \r]*$)"
    r"|\[Errno 12\] Cannot allocate memory|[Oo]ut of memory: Kill|invoked oom-killer"
    r"|\boom[-_]kill(?: event|:)|xceeded (?:(?:job|step) )?memory limit|: Out Of Memory"
)

# Lines of libraries, launchers, Slurm and earlier versions of this program; the first match counts.
_LINES = [
    (kind, re.compile(pattern))
    for kind, pattern in (
        (Kind.MEMORY, f".*(?:{OUT_OF_MEMORY})"),
        (
            Kind.UNKNOWN,
            r"(exit status \d+(: srun: error: .*)?|srun: error: .*|max_restarts: .*|Slurm: .*"
            r"|Slurm no longer .*|no status and no log|)$",
        ),
        (Kind.DIVERGED, r"(validation )?loss is (nan|-?inf) |gradient norm is nan "),
        (Kind.DISK, r".*(No space left on device|Disk quota exceeded)"),
        (Kind.HANG, r".*no progress for \S+ s"),
        (
            Kind.LOST_PEER,
            r".*(Connection (reset|closed)|Broken pipe|ncclRemoteError|Failed to recv)",
        ),
        (Kind.COMMUNICATION, r"(?i).*(nccl|gloo|timed out|connection|did not meet)"),
        (Kind.TIME_LIMIT, r"(?i).*time limit"),
        (Kind.SIGNAL, r"(?i).*(KeyboardInterrupt|SIGTERM|SIGINT|SIGHUP|cancelled)"),
        (Kind.KILLED, r".*\b(Signal \d+|SIG[A-Z]+)\b"),
        (Kind.RAISED, r".*\b\w*(Error|Exception|Interrupt)\b"),
    )
]


def kind_of(line: str) -> Kind:
    """The kind of an end of which only one line of text is known.

    A line that matches nothing says why a run could not start: such lines are in nobody's list.
    """
    return next((kind for kind, pattern in _LINES if pattern.match(line)), Kind.REFUSED)


def kind_of_error(error: BaseException) -> Kind:
    """The kind of an end by an exception; libraries put theirs into RuntimeError's text."""
    if isinstance(error, UsageError):
        return Kind.REFUSED
    if isinstance(error, OSError) and error.errno in FULL:
        return Kind.DISK
    kind = kind_of(f"{type(error).__name__}: {error}")
    return Kind.RAISED if kind in (Kind.REFUSED, Kind.UNKNOWN, Kind.DIVERGED) else kind
