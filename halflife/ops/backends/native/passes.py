"""Shapes and gradients of the custom ops that are passes over memory (conv.cpp, norms.cpp, gates.cpp, mimo.cpp)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_ops = torch.ops.halflife


def _register(name: str, fake: Callable[..., Any], save: Callable[..., None], grad: Callable[..., Any]) -> None:
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled():  # only under create_graph=True; autograd cannot see into the kernels
            raise RuntimeError("second derivatives (create_graph=True) need backend='reference'")
        return grad(ctx, *grads)

    torch.library.register_fake(f"halflife::{name}")(fake)
    torch.library.register_autograd(f"halflife::{name}", backward, setup_context=save)


def _like(x: Tensor | None, reference: Tensor) -> Tensor:
    """An empty tensor for the gradient of x; it has no entries where there is no x."""
    return reference.new_empty(0) if x is None else x.new_empty(x.shape)


def _conv(x, weight, bias, state, cu_seqlens, activated):
    return x.new_empty(x.shape), x.new_empty(state.shape)


@torch.library.register_fake("halflife::causal_conv_backward")
def _conv_backward(dy, dfinal, x, weight, bias, state, cu_seqlens, activated):
    return x.new_empty(x.shape), weight.new_empty(weight.shape), _like(bias, weight), state.new_empty(state.shape)


def _conv_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.activated = inputs
    ctx.save_for_backward(*tensors)


def _conv_grad(ctx: Any, dy: Tensor, dfinal: Tensor) -> tuple[Any, ...]:
    x, weight, bias, state, cu_seqlens = ctx.saved_tensors
    dx, dweight, dbias, dstate = _ops.causal_conv_backward(
        dy, dfinal, x, weight, bias, state, cu_seqlens, ctx.activated
    )
    return dx, dweight, None if bias is None else dbias, dstate, None, None


_register("causal_conv", _conv, _conv_save, _conv_grad)


def _norm(x, gate, weight, skip, scale, kind, group, mean, eps):
    return x.new_empty(x.shape)


@torch.library.register_fake("halflife::norm_backward")
def _norm_backward(dy, x, gate, weight, skip, scale, kind, group, mean, eps):
    return [_like(part, x) for part in (x, gate, weight, skip, scale)]


def _norm_save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.settings = inputs[5:]


def _norm_grad(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    inputs = ctx.saved_tensors  # read once: gradient checkpointing unpacks each tensor a single time
    grads = _ops.norm_backward(dy, *inputs, *ctx.settings)
    return *[None if x is None else grad for x, grad in zip(inputs, grads, strict=True)], *[None] * 4


_register("norm", _norm, _norm_save, _norm_grad)


def _pair_fake(a, b):
    return a.new_empty(a.shape)


def _pair_backward(dy, a, b):
    return a.new_empty(a.shape), b.new_empty(b.shape)


def _pair_save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


for _name in ("swiglu", "scale_heads"):
    _function = getattr(_ops, f"{_name}_backward")
    torch.library.register_fake(f"halflife::{_name}_backward")(_pair_backward)
    _register(_name, _pair_fake, _pair_save, lambda ctx, dy, f=_function: f(dy, *ctx.saved_tensors))


def _rotate_save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *angle, ctx.sign = inputs
    ctx.save_for_backward(*angle)


def _rotate_grad(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    return _ops.rotate(dy, *ctx.saved_tensors, -ctx.sign), None, None, None


_register("rotate", lambda x, cos, sin, sign: x.new_empty(x.shape), _rotate_save, _rotate_grad)


@torch.library.register_fake("halflife::mimo_output_backward")
def _mimo_backward(dout, *inputs):
    return [x.new_empty(x.shape) for x in inputs]


_register(
    "mimo_output",
    lambda y, later, now, before, x, *_: x.new_empty(x.shape),
    lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    lambda ctx, dout: tuple(_ops.mimo_output_backward(dout, *ctx.saved_tensors)),
)
