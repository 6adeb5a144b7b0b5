"""Linear maps `x Wᵀ + b`. In float32 they use oneDNN for those products that it does faster on this CPU than torch.

A build of the native kernels measures that (`backends.native.products`). Without a build, `linear` is `F.linear`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halflife.files import read_json
from halflife.ops import fused
from halflife.ops.backends.constant import constant_while_tracing
from halflife.ops.backends.native import build
from halflife.ops.backends.native.products import by_onednn

FEWEST = 32  # rows; oneDNN rearranges the weights at every call, which does not pay for fewer


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x Wᵀ + b` of `x [..., D]`, `weight [E, D]` and `bias [E]`."""
    if (
        not fused.usable(x, weight)
        or x.dtype != torch.float32
        or torch.is_autocast_enabled("cpu")
        or not _onednn_helps()
        or x.shape[:-1].numel() < FEWEST
    ):
        return F.linear(x, weight, bias)
    y = _linear(x.reshape(-1, x.shape[-1]), weight)
    return (y if bias is None else y + bias).view(*x.shape[:-1], -1)


@constant_while_tracing
def _onednn_helps() -> bool:
    return any(faster().values())


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
        raise RuntimeError("second derivatives (create_graph=True) need the torch code: halflife.ops.fused.off()")
    which = list(ctx.needs_input_grad)
    dx, dweight = _linear_backward(dy, *ctx.saved_tensors, which)
    return dx if which[0] else None, dweight if which[1] else None


_linear.register_autograd(_grad, setup_context=_save)
