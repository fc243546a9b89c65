"""A thread that calls a function periodically. Imports the standard library."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def repeated(look: Callable[[], object], period_s: float, name: str) -> Iterator[None]:
    """Call a function every `period_s` seconds in a thread, and once more at the end."""
    over = threading.Event()

    def work() -> None:
        while not over.wait(period_s):
            look()

    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        look()
