"""Numbers that stay float32: parameters and buffers of decays, and the dtype of decays, solves and states."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

# The dtype for sums over tokens and products of activations, which may exceed float16's 65,504 before a norm.
ROOMY = {torch.float16: torch.float32} | {x: x for x in (torch.float32, torch.bfloat16, torch.float64)}


class Float32Module(nn.Module):
    """A module whose direct parameters and buffers stay float32 (or wider) through `.to()`, `.half()`, `.bfloat16()`.

    They are also created in float32 if torch's default dtype is narrower. Decay parameters in bfloat16 would lose the
    spectrum, because neighbouring rates become equal and `A` near 0 becomes 0. Children that are not `Float32Module`s
    are cast as usual.
    """

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if param is not None and _is_narrow(param):
            param = nn.Parameter(param.detach().float(), requires_grad=param.requires_grad)
        super().register_parameter(name, param)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        if tensor is not None and _is_narrow(tensor):
            tensor = tensor.float()
        super().register_buffer(name, tensor, persistent)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        def keep(x: Tensor) -> Tensor:
            moved = fn(x)
            return x.to(moved.device) if _is_narrow(moved) else moved

        if recurse:
            for child in self.children():
                child._apply(fn)
        return super()._apply(keep, recurse=False)


def wide_classes(model: nn.Module) -> list[str]:
    """The names of the classes of the `Float32Module`s in a model that have parameters."""
    wide = (module for module in model.modules() if isinstance(module, Float32Module))
    return sorted({type(module).__name__ for module in wide if [*module.parameters(recurse=False)]})


def _is_narrow(x: Tensor) -> bool:
    return x.is_floating_point() and x.dtype.itemsize < 4


def inverse_softplus(y: Tensor) -> Tensor:
    """Solve softplus(x) = y for y > 0: `x = y + log(1 − e^{−y})`."""
    return y + torch.log(-torch.expm1(-y))


def inverse_softplus_of(y: float) -> float:
    """`inverse_softplus` of one number, which also works while modules are built on the meta device."""
    return y + math.log(-math.expm1(-y))


def wide(x: Tensor) -> Tensor:
    """Return `x` in float64, for exact sums and angles (in float32 on Apple's MPS, which has no float64)."""
    return x.float() if x.device.type == "mps" else x.double()


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which autocast changes no dtype on `device`; the meta device has no autocast."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype to which autocast rounds what products on `device` take, or None without autocast."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a product takes x: that of autocast on x's device, or its own. Autocast leaves float64."""
    return x.dtype if x.dtype == torch.float64 else autocast_dtype(x.device) or x.dtype


def lacks_products(x: Tensor) -> bool:
    """Whether a product takes x in 16 bits on a CPU without instructions for that (`ops.backends.widened`).

    Tensors without numbers stand for any device, so estimates do not depend on the CPU that makes them.
    """
    real = x.is_cpu and not torch.compiler.is_compiling() and not isinstance(x, FakeTensor)
    return real and not _has_products(product_dtype(x))


def has_all_products() -> bool:
    """Whether the CPU has instructions for all products of 16 bits."""
    return _has_products(torch.bfloat16) and _has_products(torch.float16)


@cache
def _has_products(dtype: torch.dtype) -> bool:
    known = torch.ops.mkldnn
    if dtype == torch.bfloat16:
        return known._is_mkldnn_bf16_supported()
    return dtype != torch.float16 or known._is_mkldnn_fp16_supported()


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """The dtype of decays, solves and states: float64 if an input is float64, float32 otherwise."""
    for x in tensors:
        if x.dtype == torch.float64:
            return torch.float64
    return torch.float32
