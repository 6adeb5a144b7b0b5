"""Launches of kernels: on the device, or as nodes of the graph that a compiler traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
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
            wrap_triton(kernel)[grid](*arguments, **options)

    return run


def is_traced(x: Any) -> bool:
    """Whether `x` is a tensor with which a compiler traces host code."""
    return isinstance(x, FakeTensor | FunctionalTensor)


def only_first_derivatives() -> None:
    """Raise an error in a backward pass that autograd is to differentiate, because it cannot see into the kernels."""
    if torch.is_grad_enabled():  # only under create_graph=True
        raise RuntimeError("second derivatives (create_graph=True) need backend='reference'")
