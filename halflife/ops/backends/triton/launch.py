"""Launches of kernels: on the device, or as nodes of the graph that a compiler traces."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import torch
import triton
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.library import wrap_triton

from halflife.ops.backends.triton import interpreted


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
    """Return the function that runs `kernel` on a `grid` of programs; its first argument is a tensor.

    Tensors of a compiler have no data. For them the launch becomes a node of the graph, which notes that the kernel
    writes into its arguments. Kernels of Triton's interpreter cannot be nodes, so they are left out (see `op.declare`).
    """

    def run(*arguments: Any, **options: Any) -> None:
        if not is_traced(arguments[0]):
            with torch.cuda.device_of(arguments[0]):
                kernel[grid](*arguments, **options)
        elif not interpreted():
            names = zip(kernel.arg_names, arguments, strict=False)
            floats = frozenset(name for name, x in names if isinstance(x, float))
            wrap_triton(_with_constants(kernel, floats))[grid](*arguments, **options)

    return run


def target_of(x: Tensor) -> Any:
    """The kind of GPU that a tensor is on (backend and arch), which need not be the current one."""
    return _target(x.device) if x.is_cuda else _current()


@cache
def _target(device: torch.device) -> Any:
    """The kind of a GPU. Host code asks for it several times a launch, and the driver takes microseconds."""
    with torch.cuda.device(device):
        return _current()


def _current() -> Any:
    return triton.runtime.driver.active.get_current_target()


@cache
def _with_constants(kernel: Any, names: frozenset[str]) -> Any:
    """A copy of a kernel to which these arguments are constants.

    The compiler of torch 2.13 declares a kernel's floating-point numbers as float64, and not as float32 as Triton does.
    What is multiplied with them would become float64.
    """
    given = kernel.fn
    copy = FunctionType(given.__code__, given.__globals__, given.__name__, given.__defaults__, given.__closure__)
    copy.__annotations__ = given.__annotations__ | dict.fromkeys(names, "tl.constexpr")
    copy.__module__, copy.__qualname__ = given.__module__, given.__qualname__
    return triton.jit(copy)


def is_traced(x: Any) -> bool:
    """Whether `x` is a tensor with which a compiler traces host code."""
    return isinstance(x, FakeTensor | FunctionalTensor)


def only_first_derivatives() -> None:
    """Raise an error in a backward pass that autograd is to differentiate, because it cannot see into the kernels."""
    if torch.is_grad_enabled():  # only under create_graph=True
        raise RuntimeError("second derivatives (create_graph=True) need backend='reference'")
