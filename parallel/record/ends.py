"""How a run ends: the states and kinds that status.json may hold, and what a log says of an end.
Torch-free.

`state` says where the run is, `kind` why it failed or stopped, and `reason` says that in words for
a person. A program decides by the kind. `kind_of` takes it from the words of a log, and of a
status.json that has no kind.
"""

import builtins
import errno
import re
from enum import StrEnum
from typing import NamedTuple

from base.errors import UsageError

RUNNING, COMPLETE, INTERRUPTED, FAILED = "running", "complete", "interrupted", "failed"
PENDING = "pending"  # in no file: a job was submitted and has written nothing yet
FULL = (errno.ENOSPC, errno.EDQUOT)  # no room on the disk, or in the user's share of it


class Kind(StrEnum):
    """The kind of an end: why a run failed or was interrupted."""

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


class End(NamedTuple):
    """The end of a run or of a rank, as status.json says it: its kind, and why in words."""

    kind: Kind | str
    reason: str


# These follow from another event: a later word about that event replaces them.
CONSEQUENCES = (Kind.LOST_PEER, Kind.SIGNAL, Kind.UNKNOWN)

# The same run may end otherwise when it is started again: its node, its network or its time failed
# it. Of an end that nobody knows nothing says that it would come again.
RETRY_MENDS = (Kind.KILLED, Kind.HANG, Kind.COMMUNICATION, Kind.LOST_PEER, Kind.TIME_LIMIT)
RETRY_MENDS += (Kind.UNKNOWN,)

# What says that a GPU ran out of memory: PyTorch and the libraries on GPUs, NCCL (in quotes). And
# the host: PyTorch on CPU, Python and NumPy, the kernel, Slurm.
_GPU_MEMORY = (
    r"(?:CUDA|HIP|XPU|[Ee]rror:|Error \[CUDA\]:) out of memory|OutOfMemoryError|'out of memory'"
    r"|[A-Z]_STATUS_ALLOC_FAILED"
)
HOST_MEMORY = (
    r"DefaultCPUAllocator: (?:can't allocate|not enough) memory"
    r"|(?<!except )(?<!raise )(?<!\w)(?:_Array)?MemoryError(?::|[ \r]*$)"
    r"|\[Errno 12\] Cannot allocate memory|[Oo]ut of memory: Kill|invoked oom-killer"
    r"|\boom[-_]kill(?: event|:)|xceeded (?:(?:job|step) )?memory limit|: Out Of Memory"
)
OUT_OF_MEMORY = f"{_GPU_MEMORY}|{HOST_MEMORY}"

# What torch, NCCL and gloo say of a message that did not arrive.
_BROKEN = (
    r"NCCL error|ncclSystemError|ncclInternalError|ncclRemoteError|ncclUnhandledCudaError"
    r"|DistBackendError|Watchdog caught collective operation timeout"
    r"|Some NCCL operations have failed or timed out|RCCL error|Connection reset by peer"
    r"|Connection closed by peer|Connection closed by remote peer|NET/IB : Got completion"
    r"|Socket Timeout|/gloo/transport/|MPI_ABORT was invoked"
)
# Python's own exceptions that say by their name what they are. The others hold a library's or the
# system's words.
_SPEAKING = (Exception, RuntimeError, OSError, SystemError, ConnectionError, TimeoutError)
_MISTAKES = "|".join(
    name
    for name, kind in vars(builtins).items()
    if isinstance(kind, type)
    and issubclass(kind, Exception)
    and kind not in _SPEAKING
    and not issubclass(kind, (ConnectionError, MemoryError))
)

# What this program says of its own ends; everything else that it says is a refusal.
_OWN_LINES = [
    (Kind.DIVERGED, r"(validation )?loss is (nan|-?inf) |gradient norm is nan "),
    (Kind.HANG, r"no progress for \S+ s"),
    (Kind.COMMUNICATION, r"rank \d+ did not meet the other"),
    (Kind.DISK, r"OSError: .*(No space left on device|Disk quota exceeded)"),
]
# Lines of libraries, launchers and Slurm; the first match counts.
_LINES = [
    *_OWN_LINES,
    (Kind.REFUSED, r"UsageError\b"),
    (Kind.RAISED, rf"(builtins\.)?({_MISTAKES})\b"),
    (Kind.MEMORY, rf".*(?:{OUT_OF_MEMORY})"),
    (
        Kind.UNKNOWN,
        r"(exit status \d+|srun: error: .*|max_restarts: .*|Slurm: .*|Slurm no longer .*"
        r"|no status and no log|)$",
    ),
    (Kind.DISK, r".*(No space left on device|Disk quota exceeded)"),
    (Kind.LOST_PEER, r".*(Connection (reset|closed)|Broken pipe|ncclRemoteError|Failed to recv)"),
    (
        Kind.COMMUNICATION,
        rf".*({_BROKEN}|NCCL communicator|Gloo connect|[Tt]imed out"
        r"|(Connection|Timeout|DistNetwork|DistStore)\w*Error)",
    ),
    (Kind.TIME_LIMIT, r"(?i).*time limit"),
    (Kind.SIGNAL, r"(?i).*(KeyboardInterrupt|SIGTERM|SIGINT|SIGHUP|cancelled)"),
    (Kind.KILLED, r".*\b(Signal \d+|SIG[A-Z]+)\b"),
    (Kind.RAISED, r".*\b\w*(Error|Exception|Interrupt)\b"),
]


def kind_of(line: str) -> Kind:
    """Returns the kind of an end of which only one line of text is known.

    A line that matches nothing says why a run could not start: such lines are in nobody's list.
    """
    line = re.sub(r"exit status \d+: ", "", line, count=1)
    message = line.removeprefix("parallel.train: ")
    patterns = _LINES if message == line else _OWN_LINES
    return next((kind for kind, text in patterns if re.match(text, message)), Kind.REFUSED)


def kind_of_error(error: BaseException) -> Kind:
    """Returns the kind of an end by an exception; libraries put theirs into RuntimeError's text."""
    if isinstance(error, UsageError):
        return Kind.REFUSED
    if isinstance(error, OSError) and error.errno in FULL:
        return Kind.DISK
    kind = kind_of(f"{type(error).__name__}: {error}")
    return Kind.RAISED if kind in (Kind.REFUSED, Kind.UNKNOWN, Kind.DIVERGED) else kind


# --- what a log says -----------------------------------------------------------------------------

# Slurm's own line, `*** STEP 7.0 ON n1 CANCELLED AT 2021-05-24T09:50:34 DUE TO TIME LIMIT ***`.
# Without its beginning the words may stand in any text.
_FRAME = rb"\*\*\* (?:JOB|STEP) \d[^\r\n]{0,200}? CANCELLED (?:AT |\*\*\*)"
# What a log says of its run's end, by sign.
_PATTERNS = {
    "oom": re.compile(OUT_OF_MEMORY.encode(), re.MULTILINE),
    "node": re.compile(
        rb"NODE_FAIL|uncorrectable ECC error|fallen off the bus|lost connection to node"
        rb"|[Nn]ode failure on|" + _FRAME + rb"[^\r\n]{0,60}?DUE TO NODE FAIL"
    ),
    "timeout": re.compile(
        rb"PBS: job killed: walltime|TERM_RUNLIMIT|" + _FRAME + rb"[^\r\n]{0,60}?DUE TO TIME ?LIMIT"
    ),
    "nccl": re.compile(_BROKEN.encode()),
    "cancelled": re.compile(rb"KeyboardInterrupt|SIGTERM|Received 15 death signal|" + _FRAME),
    "scancel": re.compile(_FRAME),
}
# These are the cause even if something else is printed before them. Of the others the first counts.
_CAUSES = ("oom", "node", "timeout")
# A line without any of these words has no such sign. They are found far sooner than the patterns.
_WORDS = {
    "oom": b"ut of memory|Out Of Memory|MemoryError|ALLOC_FAILED|CPUAllocator: |allocate memory"
    b"|oom-kill|oom_kill|emory limit",
    "node": b"NODE_FAIL|ECC error|fallen off the bus|lost connection to node|ode failure on"
    b"|DUE TO NODE FAIL",
    "timeout": b"PBS: job killed|TERM_RUNLIMIT|DUE TO TIME",
    "nccl": _BROKEN.encode(),
    "cancelled": b"KeyboardInterrupt|SIGTERM|Received 15 death signal| CANCELLED ",
    "scancel": b" CANCELLED ",
}
# Not a cancelled run: after one rank failed, torchrun ends its other ranks, and srun
# --kill-on-bad-exit ends the step on the other nodes.
_SENT = re.compile(rb"[^\r\n]*(?:closing signal SIGTERM|Signal 15 \(SIGTERM\)|exitcode +: -15 )")
_STEP = re.compile(rb"[^\r\n]*\*\*\* STEP [^\r\n]* CANCELLED AT (?![^\r\n]*DUE TO)")
SIGNALS = r"Killed|Segmentation fault|Aborted|Bus error"  # in the words of srun and of a shell
_SIGNALS = SIGNALS.encode()
_BAD_EXIT = re.compile(
    rb"srun: [^\r\n]*(?:: (?:Exited with exit code|%b)|Terminating (?:StepId|job step))" % _SIGNALS
)
# The words of srun, and of a shell, on a process that ended. 143 is what SIGTERM makes of it.
_EXITED = re.compile(
    rb"srun: error: [^\r\n ]{1,300}: tasks? [\d,-]{1,300}: (?:Exited with exit code (?!143\b)|%b)"
    rb"|^[^\r\n ]{1,200}: line \d{1,6}: {1,9}\d{1,9} (?:%b)" % (_SIGNALS, _SIGNALS),
    re.MULTILINE,
)
NOT_ASKED = r"(?!-(?:15|2)\b)"  # an exit code that is none of a rank that torchrun ended itself
# torchrun names the process that a signal ended first; its peers see a broken connection. SIGABRT
# (6) is what NCCL's watchdog ends a rank with.
_KILLED = re.compile(
    rb"failed \(exitcode: %b-(?!6\))\d{1,2}\) local_rank: \d+ \(pid: (\d+)\)" % NOT_ASKED.encode()
)
_FAILED = re.compile(rb"failed \(exitcode: %b-?\d{1,3}\) local_rank: \d" % NOT_ASKED.encode())
_TRACEBACK = re.compile(
    rb"Traceback \(most recent call last\)|Fatal Python error|Segmentation fault"
    rb"|terminate called after throwing"
)
_RAISED = re.compile(
    rb"(?:(?<![\w.])|(?<=[0-9;\[]m))(?:[A-Za-z_]\w{0,60}\.){0,6}[A-Z]\w{0,60}(?:Error|Exception): "
)
# The line that ends a traceback: not indented, behind the name of who printed it. torchrun's own
# says only that a rank failed.
_LAST_LINE = re.compile(
    rb"(?:^|\r)(?![\r\n])(?:\x1b\[[\d;]{0,20}[mK]|\[?[\w.@-]{1,60}\]?: ?){0,4}"
    rb"(?:[A-Za-z_]\w{0,60}\.){0,6}(?!ChildFailedError)[A-Z]\w{0,60}(?:Error|Exception|Exit)"
    rb"(?:: |[ \t]{0,9}\r?$)",
    re.MULTILINE,
)
_FAR = 1 << 20  # bytes from a traceback to its end, with other ranks' lines between


class Sign(NamedTuple):
    """A sign in a log of how its run ended: oom, node, timeout, nccl, cancelled, traceback or
    exited.

    at: the byte of the text where it begins. raised: that where the line ends that closes a
    traceback.
    """

    kind: str
    at: int
    raised: int | None = None


def line_of(text: bytes, at: int) -> bytes:
    """Returns the line that holds the byte at `at`, cut 300 bytes before and behind it."""
    first = max(at - 300, 0)
    begin = 1 + max(text.rfind(b"\n", first, at), text.rfind(b"\r", first, at), first - 1)
    return re.split(rb"[\r\n]", text[begin : at + 300], maxsplit=1)[0]


def outside_sign(text: bytes) -> Sign | None:
    """Returns the first sign that memory, a node or time was lacking; None where there is none."""
    for kind in _CAUSES:
        places = [_first_in_lines(_PATTERNS[kind], word, text) for word in _WORDS[kind].split(b"|")]
        if places := [place for place in places if place is not None]:
            return Sign(kind, min(places))
    return None


def _first_in_lines(pattern: re.Pattern[bytes], word: bytes, text: bytes) -> int | None:
    """Returns where the pattern first matches in a line that holds the word."""
    place = text.find(word)
    while place >= 0:
        end = text.find(b"\n", place)
        end = len(text) if end < 0 else end
        if match := pattern.search(text, text.rfind(b"\n", 0, place) + 1, end):
            return match.start()
        place = text.find(word, end)
    return None


def first_sign(text: bytes, kind: str) -> Sign | None:
    """Returns the first sign of a broken connection (nccl), of a cancelled run or of Slurm's own
    word on it (scancel). One that follows from the end of another process is none."""
    if not any(word in text for word in _WORDS[kind].split(b"|")):
        return None
    for match in _PATTERNS[kind].finditer(text):
        line = line_of(text, match.start())
        if _SENT.match(line):
            continue
        if _STEP.match(line):
            bad_exit = _BAD_EXIT.search(text)
            if bad_exit and bad_exit.start() < match.start():
                continue
        return Sign(kind, match.start())
    return None


def find_sign(text: bytes) -> Sign | None:
    """Returns the sign of how a run ended: a cause if its log shows one, else the first sign."""
    if sign := outside_sign(text):
        return sign
    if killed := _KILLED.search(text):
        named = re.compile(rb"Signal \d+ \(SIG\w+\) received by PID %b\b" % killed[1])
        return Sign("traceback", (named.search(text, killed.start()) or killed).start())
    signs = [sign for kind in ("nccl", "cancelled") if (sign := first_sign(text, kind))]
    sign = min(signs, key=lambda sign: sign.at, default=None)
    traceback = _TRACEBACK.search(text)
    if traceback is None:
        return sign
    if sign is None:
        return _raised(text, traceback)
    # The traceback may raise the sign itself. If it raised something else, that came first.
    for error in _RAISED.finditer(text, traceback.start(), min(sign.at, traceback.start() + _FAR)):
        ends = text.find(b"\n", error.start(), sign.at) >= 0
        if ends and not _PATTERNS[sign.kind].search(error[0]):
            return _raised(text, traceback)
    return sign


def exit_sign(text: bytes) -> Sign | None:
    """Returns the first word of srun or a shell on a process that ended, for a log that has no
    other sign."""
    exited = _EXITED.search(text)
    return Sign("exited", exited.start()) if exited else None


def _raised(text: bytes, traceback: re.Match[bytes]) -> Sign:
    """Returns the sign of a traceback and, where the log shows it, the line of what it raised."""
    begin = traceback.start()
    last = None
    if traceback[0].startswith(b"Traceback"):
        last = _LAST_LINE.search(text, begin, begin + _FAR)
        if last is None and (failed := _FAILED.search(text)):
            return Sign("traceback", failed.start())  # the traceback is torchrun's own
    # The last byte of the match, which may begin with the end of the line before.
    raised = last.start() + len(last[0].rstrip()) - 1 if last else None
    return Sign("traceback", begin, raised)
