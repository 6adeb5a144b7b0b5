"""Shapes and gradients of the custom ops that are passes over memory (conv.cpp, norms.cpp, gates.cpp, mimo.cpp)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_ops = torch.ops.halflife


def _register(
    name: str, count: int, like: tuple[int, ...] = (0,), constants: int = 0, fake: Callable[..., Any] | None = None
) -> None:
    """Register `name(*tensors, *settings)` with `count` tensors, and `name_backward(*gradients, *tensors, *settings)`.

    The outputs have the shapes of the tensors at `like`, and the dtype of the first one, unless `fake` makes them. The
    backward op returns the gradients of all but the last `constants` tensors, without entries where a tensor is None.
    """
    kernel = getattr(_ops, f"{name}_backward")

    def outputs(*inputs: Any) -> Any:
        made = [inputs[0].new_empty(inputs[i].shape) for i in like]
        return made if len(like) > 1 else made[0]

    def fake_backward(*inputs: Any) -> list[Tensor]:
        tensors = inputs[len(like) :][: count - constants]
        return [tensors[0].new_empty(0) if x is None else x.new_empty(x.shape) for x in tensors]

    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[:count])
        ctx.settings = inputs[count:]

    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():  # only under create_graph=True; autograd cannot see into the kernels
            raise RuntimeError("second derivatives (create_graph=True) need backend='reference'")
        tensors = ctx.saved_tensors  # read once: gradient checkpointing unpacks each tensor a single time
        found = kernel(*grads, *tensors, *ctx.settings)
        known = [None if x is None else d for x, d in zip(tensors, found, strict=False)]
        return *known, *[None] * (constants + len(ctx.settings))

    torch.library.register_fake(f"halflife::{name}")(fake or outputs)
    torch.library.register_fake(f"halflife::{name}_backward")(fake_backward)
    torch.library.register_autograd(f"halflife::{name}", backward, setup_context=save)


def _running(f: Tensor, first: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return first.new_empty(f.shape), first.new_empty(first.shape), f.new_empty(f.shape)


def _keys(c: Tensor, b: Tensor, angle: Tensor, query: Any, bias: Tensor | None, *_: Any) -> tuple[Tensor, ...]:
    heads, size = (angle.shape[2], c.shape[-1] // angle.shape[2]) if bias is None else bias.shape
    shapes = (heads, size), (heads, size), (heads,)
    return tuple(c.new_empty(*c.shape[:2], *shape, dtype=torch.float32) for shape in shapes)


def _products(q: Tensor, k: Tensor, before: Tensor, weight: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
    rank = q.shape[2]
    return tuple(weight.new_empty(*weight.shape, rank, rank) for _ in range(2))  # type: ignore[return-value]


_register("causal_conv", 5, like=(0, 3), constants=1)  # x, weight, bias, state, cu_seqlens
_register("norm", 5)  # x, gate, weight, skip, scale
_register("swiglu", 2)
_register("scale_heads", 2)
_register("running_decay", 3, like=(0, 1, 0), constants=1, fake=_running)  # f, first, cu_seqlens
_register("trapezoid_keys", 9, like=(0, 0, 0), constants=2, fake=_keys)  # c, b, φ, the norms', cos, sin
_register("trapezoid_output", 6, fake=lambda o, *_: o.new_empty(o.flatten(2).shape))  # o, v, q·k, gain, skip, z
_register("mimo_products", 6, like=(3, 4), fake=_products)  # q, k, before, weight, gain, skip
_register("mimo_output", 9, like=(2,))  # y, before, x, z, later, now, values, gates, outputs


def _rotate_save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *angle, ctx.sign = inputs
    ctx.save_for_backward(*angle)


def _rotate_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    if torch.is_grad_enabled():  # only under create_graph=True; autograd cannot see into the kernel
        raise RuntimeError("second derivatives (create_graph=True) need backend='reference'")
    return _ops.rotate(dy, *ctx.saved_tensors, -ctx.sign), None, None, None


torch.library.register_fake("halflife::rotate")(lambda x, cos, sin, sign: x.new_empty(x.shape))
torch.library.register_autograd("halflife::rotate", _rotate_backward, setup_context=_rotate_save)
