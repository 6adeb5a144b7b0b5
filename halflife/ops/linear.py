"""Linear maps, for the time of a block: by oneDNN on a CPU, and with weights that autocast need not cast on a GPU.

oneDNN runs where it is faster than torch's own product. A build of the native kernels measures that
(`backends.native.products`). Without a build nothing changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halflife.files import read_json
from halflife.ops.arguments import is_transformed
from halflife.ops.backends.constant import cached_constant
from halflife.ops.backends.native import build
from halflife.ops.backends.native.products import by_onednn
from halflife.precision import autocast_dtype

FEWEST_ROWS = 32  # oneDNN rearranges the weights at every call, which does not pay for fewer rows


@contextmanager
def fast_linears(model: nn.Module) -> Iterator[None]:
    """Inside this block, run the linear maps of `model` by oneDNN where that is faster.

    It replaces `forward` of the instances, and afterwards restores it. It takes modules whose class is `nn.Linear`
    itself, with a parameter of plain float32 on a CPU. Quantised and sharded weights, and adapters, stay as they are.
    """
    swapped = [m for m in model.modules() if type(m) is nn.Linear and "forward" not in vars(m)] if _helps() else []
    for module in swapped:
        module.forward = MethodType(_forward, module)
    try:
        yield
    finally:
        for module in swapped:
            vars(module).pop("forward", None)


@contextmanager
def cast_weights(model: nn.Module, x: Tensor) -> Iterator[None]:
    """Inside this block, the linear maps of `model` have weights in autocast's dtype on the device of `x`.

    One launch casts all of them, and in the backward pass one casts their gradients, where autocast has two for each.
    As in `fast_linears`, weights that are quantised, sharded or replaced otherwise stay as they are. Other modules take
    part if their class says that products alone read their parameters (`only_products`).
    """
    dtype = autocast_dtype(x.device)
    if dtype is None or is_transformed():
        yield
        return
    held = [
        (module._parameters, name, weight)
        for module in model.modules()
        if type(module) is nn.Linear or getattr(type(module), "only_products", False)
        for name, weight in module._parameters.items()
        if type(weight) is nn.Parameter and weight.dtype == torch.float32 and weight.device == x.device
    ]
    copies = _Cast.apply(dtype, *[weight for *_, weight in held])
    try:
        for (parameters, name, _), copy in zip(held, copies, strict=True):
            parameters[name] = copy
        yield
    finally:
        for parameters, name, weight in held:
            parameters[name] = weight


class _Cast(torch.autograd.Function):
    """Copies of float32 tensors in a narrower dtype."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
        copies = _copies(tensors, dtype)
        ctx.mark_non_differentiable(*[y for x, y in zip(tensors, copies, strict=True) if not x.requires_grad])
        ctx.set_materialize_grads(False)
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # under create_graph=True
            return None, *[None if d is None else d.float() for d in grads]
        wide = iter(_copies([d for d in grads if d is not None], torch.float32))
        return None, *[None if d is None else next(wide) for d in grads]


def _copies(tensors: tuple[Tensor, ...] | list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    copies = [torch.empty_like(x, dtype=dtype) for x in tensors]
    if copies:
        torch._foreach_copy_(copies, tensors)  # pyright: ignore[reportPrivateImportUsage]
    return copies


def is_fast(module: nn.Module) -> bool:
    """Whether `fast_linears` has replaced the `forward` of this module."""
    return getattr(vars(module).get("forward"), "__func__", None) is _forward


def _forward(self: nn.Linear, input: Tensor) -> Tensor:
    weight = self.weight
    if (
        type(weight) is not nn.Parameter
        or not input.dtype == weight.dtype == torch.float32
        or not input.is_cpu
        or not weight.is_cpu
        or input.shape[:-1].numel() < FEWEST_ROWS
        or torch.is_autocast_enabled("cpu")
        or is_transformed()
    ):
        return F.linear(input, weight, self.bias)
    y = _linear(input.reshape(-1, input.shape[-1]), weight)
    return (y if self.bias is None else y + self.bias).view(*input.shape[:-1], -1)


@cached_constant
def _helps() -> bool:
    return build.why_not() is None and any(faster().values())


@cache
def faster() -> dict[str, bool]:
    """Which products oneDNN does faster here: "forward", "input" (its gradient) and "weight" (its gradient)."""
    passed: Any = read_json(build.folder() / build.PASSED)
    return passed.get("onednn") or {}


@torch.library.custom_op(
    "halflife::linear", mutates_args=(), device_types="cpu", schema="(Tensor x, Tensor weight) -> Tensor"
)
def _linear(x: Tensor, weight: Tensor) -> Tensor:
    return by_onednn(x, weight) if faster()["forward"] else x @ weight.t()


@torch.library.custom_op(
    "halflife::linear_backward", mutates_args=(), device_types="cpu",
    schema="(Tensor dy, Tensor x, Tensor weight, bool[] which) -> Tensor[]",
)  # fmt: skip
def _linear_backward(dy: Tensor, x: Tensor, weight: Tensor, which: list[bool]) -> list[Tensor]:
    wins, none = faster(), x.new_empty(0)
    dx = dweight = none
    if which[0]:
        dx = by_onednn(dy, weight.t()) if wins["input"] else dy @ weight
    if which[1]:
        dweight = by_onednn(dy.t(), x.t()) if wins["weight"] else dy.t() @ x
    return [dx, dweight]


@_linear.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@_linear_backward.register_fake
def _(dy: Tensor, x: Tensor, weight: Tensor, which: list[bool]) -> list[Tensor]:
    return [part.new_empty(part.shape if needed else 0) for part, needed in zip((x, weight), which, strict=True)]


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _grad(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
    if torch.is_grad_enabled():  # only under create_graph=True
        raise RuntimeError("second derivatives (create_graph=True) need torch's product, outside of `fast_linears`")
    which = list(ctx.needs_input_grad)
    dx, dweight = _linear_backward(dy, *ctx.saved_tensors, which)
    return dx if which[0] else None, dweight if which[1] else None


_linear.register_autograd(_grad, setup_context=_save)
