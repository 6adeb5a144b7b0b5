"""Functions whose results `torch.compile` takes as constants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def constant_while_tracing(function: Function) -> Function:
    """Mark a function whose arguments are constants, so that `torch.compile` calls it once while it traces.

    `torch.compiler.assume_constant_result` does the same, but it imports the whole compiler, for about a second.
    """
    function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return function
