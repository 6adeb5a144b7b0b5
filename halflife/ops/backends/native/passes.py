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


def _register_pass(name: str, count: int, like: tuple[int, ...] = (0,), constants: int = 0) -> None:
    """Register `name(*tensors, *settings)` and `name_backward(*gradients of the outputs, *tensors, *settings)`.

    There are `count` tensors, and the outputs have the shapes of those at `like`. The backward op returns the gradients
    of all but the last `constants` tensors, without entries where a tensor is None.
    """
    backward = getattr(_ops, f"{name}_backward")

    def fake(*inputs: Any) -> Any:
        outputs = [inputs[i].new_empty(inputs[i].shape) for i in like]
        return outputs if len(like) > 1 else outputs[0]

    def fake_backward(*inputs: Any) -> list[Tensor]:
        tensors = inputs[len(like) :][: count - constants]
        return [tensors[0].new_empty(0) if x is None else x.new_empty(x.shape) for x in tensors]

    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[:count])
        ctx.settings = inputs[count:]

    def grad(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors  # read once: gradient checkpointing unpacks each tensor a single time
        found = backward(*grads, *tensors, *ctx.settings)
        known = [None if x is None else d for x, d in zip(tensors, found, strict=False)]
        return *known, *[None] * (constants + len(ctx.settings))

    torch.library.register_fake(f"halflife::{name}_backward")(fake_backward)
    _register(name, fake, save, grad)


_register_pass("causal_conv", 5, like=(0, 3), constants=1)  # x, weight, bias, state, cu_seqlens
_register_pass("norm", 5)  # x, gate, weight, skip, scale
_register_pass("swiglu", 2)
_register_pass("scale_heads", 2)
_register_pass("mimo_output", 9, like=(4,))  # y, later, now, before, x, z, values, gates, outputs


def _rotate_save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *angle, ctx.sign = inputs
    ctx.save_for_backward(*angle)


def _rotate_grad(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    return _ops.rotate(dy, *ctx.saved_tensors, -ctx.sign), None, None, None


_register("rotate", lambda x, cos, sin, sign: x.new_empty(x.shape), _rotate_save, _rotate_grad)
