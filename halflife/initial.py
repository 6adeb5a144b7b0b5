"""Methods that draw the initial values of a module."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch


def draws(method: Callable[[Any], None]) -> Callable[[Any], None]:
    """Let a module's method draw its parameters and buffers without gradients, and not at all on the meta device.

    Tensors there have no numbers, and torch would follow each operation on them in Python, which takes longer than to
    draw those of a small model. The device is that of the module's first tensor.
    """

    @functools.wraps(method)
    def run(self: Any) -> None:
        first = next(chain(self.parameters(), self.buffers()), None)
        if first is None or not first.is_meta:
            with torch.no_grad():
                method(self)

    return run
