"""What a user's mistake is, and the boundary of every command: what reaches the terminal, and how
a command ends."""

import argparse
import contextlib
import errno
import functools
import io
import os
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

# Control characters of both sets, what turns the direction of text or breaks its line, and bytes
# of a file's name that are no UTF-8 (they are held as surrogates).
_UNPRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
BROKEN_PIPE = 141  # 128 + SIGPIPE: what a shell reports of cat
NAMED = 3  # how many more of one reason a line names, beside the first
INTERRUPTED = 130  # 128 + SIGINT
T = TypeVar("T")


def printable(text: str) -> str:
    """Returns the text in one line without control characters: an escape of a log must not reach
    the terminal. Line breaks and tabs become spaces, the others Python's escapes, as `\\x1b`."""
    if not _UNPRINTABLE.search(text):
        return text
    text = re.sub(r"[\t\n\r]+", " ", text)
    return _UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], text)


class Answer(NamedTuple, Generic[T]):
    """A value, or None and the reason why there is none."""

    value: T | None
    reason: str = ""


class Reading(NamedTuple, Generic[T]):
    """What could be read, and what was left out (a line, a pair or a refusal) with its reason."""

    content: T
    left_out: list[Any]


def by_reason(left_out: Iterable[tuple[str, str]]) -> list[str]:
    """Returns one line per reason, from pairs of what was left out and why. Reasons that differ in
    numbers alone count as one: the line states the first pair, and names the next NAMED."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for subject, reason in left_out:
        groups.setdefault(re.sub(r"\d+(\.\d+)?", "0", reason), []).append((subject, reason))
    lines = []
    for (subject, reason), *others in groups.values():
        lines.append(f"{subject}: {reason}")
        if others:
            names = "; ".join(name for name, _ in others[:NAMED])
            more = " ..." if len(others) > NAMED else ""
            lines[-1] += f"; likewise {len(others)} more: {names}{more}"
    return lines


class UsageError(ValueError):
    """A user's mistake. Its message is one line that holds the numbers and what to do.

    `command_line` prints it on stderr and exits with status 2.
    """

    status = 2

    def __str__(self) -> str:
        return printable(super().__str__())


class OutputError(UsageError):
    """An output could not be written, to a full disk say: one line, and status 1."""

    status = 1


class Parser(argparse.ArgumentParser):
    """An argparse parser that reports a mistake in one line, without a page of usage before it, and
    prints a description as it is written."""

    def __init__(self, *args: Any, **settings: Any):
        raw = {"formatter_class": argparse.RawDescriptionHelpFormatter}
        super().__init__(*args, **raw | settings)

    def error(self, message: str) -> NoReturn:
        """Ends the command with one line that states the mistake, and status 2."""
        name = self.prog.removeprefix("python -m ")
        self.exit(2, printable(f"{name}: {message} ({self.prog} --help lists the flags)") + "\n")


def warn(name: str, *lines: object) -> None:
    """Prints lines on stderr, each of them as one line that begins with the command's name."""
    for line in lines:
        print(printable(f"{name}: {line}"), file=sys.stderr)


_last_words: list[str] = []


def warn_at_end(name: str, line: object) -> None:
    """Keeps a warning until the command has printed the rest, so that it is seen last."""
    _last_words.append(printable(f"{name}: {line}"))


def command_line(name: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Returns what decorates the `main(argv) -> exit status` of the command `name`: its boundary.

    A UsageError is one line on stderr and 2, and so is a file that the system refuses to read or
    to write. An output that cannot be written, to a full disk say, is one line and 1. When the
    reader of the output is gone, the command ends silently with 141, as cat does; after Ctrl-C it
    ends with one line and 130. A defect of ours keeps its traceback.
    """

    def decorate(main: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(main)
        def bounded(argv: list[str] | None = None) -> int:
            for stream in (sys.stdout, sys.stderr):
                if isinstance(stream, io.TextIOWrapper):  # names that are no UTF-8 are escaped
                    stream.reconfigure(errors="backslashreplace")
            try:
                try:
                    return main(argv)
                except UsageError as error:
                    print(f"{name}: {error}", file=sys.stderr)
                    return error.status
                finally:
                    sys.stdout.flush()  # here, where a failure can still be told
                    while _last_words:
                        print(_last_words.pop(0), file=sys.stderr)
            except BrokenPipeError:
                drop_output()
                return BROKEN_PIPE
            except OSError as error:
                words, status = error.strerror or str(error), 2
                # What could not be written stays in the buffer; under Python's -u there is none.
                lost = error.filename is None and error.errno in NO_ROOM
                if lost or not _flushes(sys.stdout):
                    words, status = f"cannot write the output: {words}", 1
                    drop_output()
                elif error.filename is not None:
                    words = f"{error.filename}: {words}"
                print(f"{name}: {printable(words)}", file=sys.stderr)
                return status
            except KeyboardInterrupt:
                if argv is not None:  # called as a function, by a test say: that must end, too
                    raise
                print(f"{name}: interrupted", file=sys.stderr)
                return INTERRUPTED

        return bounded

    return decorate


def drop_output() -> None:
    """Discards what is still to be printed, because its reader is gone or its disk is full.

    The file descriptors are replaced, so that no flush at the interpreter's end fails again.
    """
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        if not _flushes(stream):
            with contextlib.suppress(OSError, ValueError):  # a test's stream has no descriptor
                os.dup2(null, stream.fileno())
    os.close(null)


def _flushes(stream: io.TextIOBase) -> bool:
    """Returns whether a stream can be flushed. What failed stays in its buffer and fails again."""
    try:
        stream.flush()
        return True
    except OSError:
        return False
