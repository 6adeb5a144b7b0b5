"""Checks of an op's numbers, of the sign of log-decays, and of what traces a call; and constants of a compiler."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import (  # pyright: ignore[reportMissingModuleSource, reportMissingImports]
    peek_interpreter_stack,
)
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.nn.modules.module import _has_any_global_hook

# The types of tensors that kernels can read, or that a compiler traces them with. Other subclasses, as those of
# quantised and sharded weights, have no memory of that layout.
PLAIN = {Tensor, torch.nn.Parameter, FakeTensor, FunctionalTensor}
HOSTS = {"cpu"}  # types of devices whose values are at hand
_SEEN: set[tuple[Any, ...]] = set()  # the calls on accelerators whose log-decays have been checked once


def check_number(name: str, x: Any) -> None:
    """Check that `x` is None or a finite number, and not a tensor, whose gradient would be lost."""
    if x is None:
        return
    if isinstance(x, bool) or not isinstance(x, int | float):
        raise TypeError(f"{name} must be a number; got {type(x).__name__}")
    if not math.isfinite(x):
        raise ValueError(f"{name} must be finite; got {x}")


def check_chunk_size(size: Any) -> None:
    """Check that the number of tokens of a chunk is an integer of at least 1."""
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"chunk_size must be an integer of at least 1; got {size!r}")


def check_decay(name: str, g: Tensor | None, key: tuple[Any, ...]) -> None:
    """Check that log-decays are not positive. The chunked forms would divide by decays that overflow.

    The check runs at every call on a CPU. There it costs 4 µs for one token, 0.1 % of an op's time for a long sequence
    with a scalar decay, and 3 % with a vector decay.
    On an accelerator it would wait for the device. There it runs at the first call with the same `key`, and at every
    call under `torch.autograd.detect_anomaly`. It does not run while a compiler or a transform of torch.func traces.

    Raises:
        ValueError: a log-decay is positive. NaN is not an error here.
    """
    if g is None or g.numel() == 0 or is_traced(g):
        return
    if g.device.type != "cpu" and not torch.is_anomaly_enabled():
        if (key := (*key, g.shape[2:], g.device)) in _SEEN:
            return
        _SEEN.add(key)
    largest = g.max().item()
    if largest > 0:
        raise ValueError(f"{name} is a log-decay, so it must not be positive; the largest is {largest:.3g}")


def may_branch(device: torch.device) -> bool:
    """Whether the host may read values on `device`. An accelerator would make it wait, and a graph has no values."""
    in_a_graph = torch.compiler.is_exporting() or torch.compiler.is_compiling()
    return device.type in HOSTS and not in_a_graph


def is_transformed() -> bool:
    """Whether this call runs under a transform of torch.func or under forward-mode differentiation.

    The chunked forms and the kernels have no rules for these. Kernels would return derivatives of 0 without an error.
    """
    if torch.compiler.is_compiling():
        return False
    return forward_ad._current_level >= 0 or peek_interpreter_stack() is not None


def dense(x: Tensor) -> Tensor:
    """A tensor whose last axis has stride 1; kernels read all other axes as they are."""
    return x if x.stride(-1) == 1 or x.shape[-1] < 2 else x.contiguous()


def even(x: Tensor) -> Tensor:
    """A contiguous `x`, also with the usual strides of axes of size 1, which torch leaves as they are."""
    return x.contiguous().view(x.shape)


def alike(state: Tensor, slow: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """A state, or two, of equal strides, of which the last one is 1."""
    if state.stride(-1) == 1 and (slow is None or slow.stride() == state.stride()):
        return state, slow
    return state.contiguous(), None if slow is None else slow.contiguous()


def not_plain(*tensors: Any) -> str | None:
    """The reason why kernels cannot read one of these values, which are tensors or not, or None if they can."""
    for x in tensors:
        if isinstance(x, Tensor) and type(x) not in PLAIN:
            return f"kernels take plain tensors; got a {type(x).__name__}"
    return None


def is_traced(x: Tensor) -> bool:
    """Whether Python cannot read the values of `x`: under torch.compile or torch.func, of fake or meta tensors."""
    return (
        torch.compiler.is_compiling()
        or x.device.type == "meta"
        or type(x) not in (Tensor, torch.nn.Parameter)
        or peek_interpreter_stack() is not None
        or (x.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def is_hooked(module: torch.nn.Module) -> bool:
    """Whether hooks see what a module reads and gives, or its gradients: its own, or those of all modules."""
    own = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(own or _has_any_global_hook())


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
