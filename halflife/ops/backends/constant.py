"""Functions whose results are computed once, and which `torch.compile` takes as constants."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any


def cached_constant(function: Callable[..., Any]) -> Any:
    """Remember the results of a function of constants; `torch.compile` calls it once while it traces.

    `cache_clear()` forgets them, and `__wrapped__` is the function itself. `torch.compiler.assume_constant_result`
    marks functions in the same way, but it imports the whole compiler, for about a second.
    """
    remembered = cache(function)

    @wraps(function)
    def call(*arguments: Any) -> Any:
        return remembered(*arguments)

    vars(call).update(_dynamo_marked_constant=True, cache_clear=remembered.cache_clear)
    return call
