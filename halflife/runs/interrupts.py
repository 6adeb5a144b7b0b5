"""Signals to end, noted for a later moment."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from halflife.training.config import on_signals
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

    with on_signals(note):
        yield check
