"""SIGTERM, heard even while the main thread waits inside a collective. Torch-free."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def on_sigterm(say: Callable[[], None]) -> Iterator[None]:
    """Inside the block, SIGTERM runs `say` on another thread and ends the process with 143.

    A plain Python handler would wait until the main thread returns from C++, which it may never
    do when the peer it waits for is dead; the wakeup file descriptor is written by C at once.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def listen() -> None:
        while number := os.read(reader, 1):
            if number[0] == signal.SIGTERM:
                say()
                os._exit(128 + signal.SIGTERM)
        os.close(reader)

    threading.Thread(target=listen, daemon=True).start()
    old_handler = signal.signal(signal.SIGTERM, lambda *_: None)
    old_descriptor = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(old_descriptor)
        signal.signal(signal.SIGTERM, old_handler)
        os.close(writer)  # ends the listener
