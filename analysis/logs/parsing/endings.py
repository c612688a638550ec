"""How a run ended: the line that proves it."""

import re
from collections.abc import Sequence

from analysis.logs.parsing.fields import WORD, plain
from analysis.logs.parsing.logfile import Log
from analysis.logs.record import Failure, Record
from parallel.record.ends import OUT_OF_MEMORY

# These are the cause even if something else is printed before them.
_CAUSES = {
    "node": (
        b"NODE_FAIL|uncorrectable ECC error|fallen off the bus|lost connection to node"
        b"|Node failure on"
    ).split(b"|"),
    "timeout": [b"PBS: job killed: walltime", b"TERM_RUNLIMIT"],
}
# Slurm's own line, `*** STEP 7.0 ON n1 CANCELLED AT 2021-05-24T09:50:34 DUE TO TIME LIMIT ***`.
# Without its beginning the words may stand in any text.
_CANCELLED = rb"\*\*\* (?:JOB|STEP) \d[^\r\n]{0,200}? CANCELLED (?:AT |\*\*\*)"
_OPENS = (b"*** JOB ", b"*** STEP ")
_FRAME = re.compile(rb"[^\r\n]*" + _CANCELLED)
_PATTERNS = {
    "oom": re.compile(OUT_OF_MEMORY.encode(), re.MULTILINE),
    "node": re.compile(_CANCELLED + rb"[^\r\n]{0,60}?DUE TO NODE FAIL"),
    "timeout": re.compile(_CANCELLED + rb"[^\r\n]{0,60}?DUE TO TIME ?LIMIT"),
}
# Of these the first one counts.
_SIGNS = {
    "nccl": (
        b"NCCL error|ncclSystemError|ncclInternalError|ncclRemoteError|ncclUnhandledCudaError"
        b"|DistBackendError|Watchdog caught collective operation timeout"
        b"|Some NCCL operations have failed or timed out|RCCL error|Connection reset by peer"
        b"|Connection closed by peer|Socket Timeout|/gloo/transport/|MPI_ABORT was invoked"
    ).split(b"|"),
    "cancelled": [*_OPENS, b"KeyboardInterrupt", b"SIGTERM", b"Received 15 death signal"],
}
# Not a cancelled run: after one rank failed, torchrun ends its other ranks, and srun
# --kill-on-bad-exit ends the step on the other nodes.
_SENT = re.compile(rb"[^\r\n]*(?:closing signal SIGTERM|Signal 15 \(SIGTERM\)|exitcode +: -15 )")
_STEP = re.compile(rb"[^\r\n]*\*\*\* STEP [^\r\n]* CANCELLED AT (?![^\r\n]*DUE TO)")
_BAD_EXIT = re.compile(
    rb"srun: [^\r\n]*(?:: (?:Exited with exit code|Killed|Segmentation fault|Aborted|Bus error)"
    rb"|Terminating (?:StepId|job step))"
)
# torchrun names the process that a signal ended first; its peers see a broken connection.
# It sends SIGTERM itself, and SIGABRT (6) is what NCCL's watchdog ends a rank with.
_KILLED = re.compile(
    rb"failed \(exitcode: -(?!15\)|6\)|2\))\d{1,2}\) local_rank: \d+ \(pid: (\d+)\)"
)
_TRACEBACK = (
    b"Traceback (most recent call last)",
    b"Fatal Python error",
    b"Segmentation fault",
    b"terminate called after throwing",
)
_RAISED = re.compile(WORD + rb"(?:[A-Za-z_]\w{0,60}\.){0,6}[A-Z]\w{0,60}(?:Error|Exception): ")
# The line that ends a traceback: not indented, behind the name of who printed it. torchrun's own
# says only that a rank failed.
_ENDS = re.compile(
    rb"(?:^|\r)(?:\x1b\[[\d;]{0,20}[mK]|\[?[\w.@-]{1,60}\]?: ?){0,4}"
    rb"(?:[A-Za-z_]\w{0,60}\.){0,6}(?!ChildFailedError)[A-Z]\w{0,60}(?:Error|Exception|Exit)"
    rb"(?:: |[ \t]{0,9}\r?$)",
    re.MULTILINE,
)
_FAR = 1 << 20  # bytes from a traceback to its end, with other ranks' lines between
_LAUNCHER = re.compile(
    rb"(?:^|(?<=\r))[^\r\n]{0,200}?(?:\[ERROR\]|\berror:|\bERROR:|command not found|No such file)"
    rb"[^\r\n]{0,200}",
    re.MULTILINE,
)
_LINES_BACK = 4  # ranks are interleaved: the failing one may print before the last iteration line


def judge_end(record: Record, log: Log, offsets: list[int], trained: bool = True) -> None:
    """Set `failure`, from what stands after the last record, and settle `completed`.

    offsets: where the records are. A traceback after a completed run is noted, but no failure.
    """
    failure = None
    for back in (1, _LINES_BACK):
        start = offsets[-min(back, len(offsets))] if offsets else 0
        if failure := find_failure(log, start):
            break
        if not offsets or record.completed:
            break
    if failure is None and not offsets:
        failure = _launcher_error(log)
    if failure and record.completed:
        record.notes.append(
            f"line {failure.line_no}: {failure.kind} after the run had completed: {failure.line}"
        )
    else:
        record.failure = failure


def find_failure(log: Log, start: int = 0) -> Failure | None:
    """The evidence at or after `start`: a cause if there is one, else the first sign."""
    for kind, pattern in _PATTERNS.items():
        at = _first(log, _CAUSES.get(kind, ()), start)
        if line := next(log.matches(pattern, start), None):
            at = line[0] if at is None else min(at, line[0])
        if at is not None:
            return _failure(log, kind, at)
    if (killed := next(log.matches(_KILLED, start), None)) is not None:
        at, match = killed
        named = re.compile(rb"Signal \d+ \(SIG\w+\) received by PID %b\b" % match[1])
        return _failure(log, "traceback", next(log.matches(named, at), (at, None))[0])
    signs = {kind: _first_sign(log, needles, start) for kind, needles in _SIGNS.items()}
    found = [(at, kind) for kind, at in signs.items() if at is not None]
    sign = min(found, default=None)
    traceback = _first(log, _TRACEBACK, start)
    if traceback is None:
        return _failure(log, sign[1], sign[0]) if sign else None
    if sign is None:
        return _raised(log, traceback)
    # The traceback may raise the sign itself. If it raised something else, that came first.
    if traceback < sign[0]:
        for at, match in log.matches(_RAISED, traceback, min(sign[0], traceback + _FAR)):
            if not any(needle in match[0] for needle in _SIGNS[sign[1]]):
                line_end = log.slice(at, at + 400).split(b"\n")[0]
                if at + len(line_end) < sign[0]:
                    return _raised(log, traceback)
    return _failure(log, sign[1], sign[0])


def _raised(log: Log, traceback: int) -> Failure:
    """The line that opens a traceback and, where the log shows it, the one with what was raised."""
    failure = _failure(log, "traceback", traceback)
    if log.slice(traceback, traceback + 9) == b"Traceback":
        for at, match in log.matches(_ENDS, traceback, traceback + _FAR):
            # Its last byte: the match may begin with the end of the line before.
            ended = _failure(log, "traceback", at + len(match[0].rstrip()) - 1)
            failure.line = f"{failure.line.rstrip(':')}, line {ended.line_no}: {ended.line}"
            break
    return failure


def _first(log: Log, needles: Sequence[bytes], start: int) -> int | None:
    for offset, block in log.blocks(start):
        at = [i for needle in needles if (i := block.find(needle)) >= 0]
        if at:
            return offset + min(at)
    return None


def _first_sign(log: Log, needles: Sequence[bytes], start: int) -> int | None:
    """The first line with a needle that does not follow from the end of another process."""
    at, bad_exit = _first(log, needles, start), None
    while at is not None:
        begin, line = _line(log, at)
        prose = any(opens in line for opens in _OPENS) and not _FRAME.match(line)
        if not prose and not _SENT.match(line):
            if not _STEP.match(line):
                return at
            if bad_exit is None:
                bad_exit = next(log.matches(_BAD_EXIT, start), (log.size, None))[0]
            if at < bad_exit:
                return at
        at = _first(log, needles, begin + len(line) + 1)
    return None


def _line(log: Log, at: int) -> tuple[int, bytes]:
    """Where the line that holds the byte at `at` begins, and its first bytes, 300 past `at`."""
    before = log.slice(at - 300, at)
    begin = at - (len(before) - 1 - max(before.rfind(b"\n"), before.rfind(b"\r")))
    return begin, re.split(rb"[\r\n]", log.slice(begin, at + 300))[0]


def _failure(log: Log, kind: str, at: int) -> Failure:
    line = _line(log, at)[1]
    text = plain(line).replace(b"\0", b"").decode("utf-8", "replace").strip()
    return Failure(kind, log.line_no(at), text[:300])


def _launcher_error(log: Log) -> Failure | None:
    """The first line that says error, where nothing was trained at all."""
    for at, match in log.matches(_LAUNCHER):
        return _failure(log, "launcher", at + len(match[0]) - 1)
    return None
