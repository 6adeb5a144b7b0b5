"""Signals to end, noted for a later moment."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from halflife.training.config import SIGNALS
from halflife.training.fit import StoppedBySignal


@contextmanager
def signals_noted() -> Iterator[Callable[[], None]]:
    """Note signals to end. The yielded function raises `StoppedBySignal` or KeyboardInterrupt after such a signal.

    Ray's functions break if a handler raises inside them, and its own handler saves nothing.
    """
    received: list[int] = []

    def note(number: int, _: object) -> None:
        if received and number == signal.SIGINT:  # the user asks again
            raise KeyboardInterrupt
        received.append(number)

    def check() -> None:
        if signal.SIGINT in received:
            raise KeyboardInterrupt
        if received:
            raise StoppedBySignal("the comparison was stopped", received[0])

    previous = {}
    if threading.current_thread() is threading.main_thread():  # Python allows handlers in this thread only
        wanted = (number for number in (*SIGNALS, signal.SIGINT) if signal.getsignal(number) != signal.SIG_IGN)
        previous = {number: signal.signal(number, note) for number in wanted}
    try:
        yield check
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
