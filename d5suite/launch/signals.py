"""Blocks of code that Ctrl-C and other signals do not interrupt."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

DELAYED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay signals that have a handler in Python until the block ends.

    A signal mask would not do: it leaves the process's other threads, such as one that refreshes
    the terminal, to take the signal.
    """
    came: list[int] = []
    before = {each: signal.getsignal(each) for each in DELAYED}
    handlers = {each: handler for each, handler in before.items() if callable(handler)}
    if threading.current_thread() is not threading.main_thread():
        handlers = {}
    try:
        for each in handlers:
            signal.signal(each, lambda number, frame: came.append(number))
        yield
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
        for number in came[:1]:
            handlers[signal.Signals(number)](number, None)
