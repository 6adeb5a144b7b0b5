"""Passes of a layer over memory: norms with their gates, SwiGLU, scaled heads, rotations and the output of MIMO.

Each function is an expression of torch. Where the native kernels are built, it runs as one pass over memory, forward
and backward (csrc/norms.cpp, gates.cpp and mimo.cpp in `backends/native`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from halflife.ops.arguments import is_transformed
from halflife.ops.backends.constant import constant_while_tracing
from halflife.ops.backends.native import build
from halflife.precision import compute_dtype

SMALLEST = 4096  # entries; for fewer, a call of a custom op takes longer than torch's passes over them

_on = True


@contextmanager
def off() -> Iterator[None]:
    """Run the expressions of torch inside this block, and the short convolution too. Second derivatives need it."""
    global _on
    before, _on = _on, False
    try:
        yield
    finally:
        _on = before


def usable(*matrices: Tensor) -> bool:
    """Whether the native kernels take these tensors: on a CPU, all in float32 or all in bfloat16.

    They have no derivatives under torch.func, where the expressions of torch run.
    """
    first = matrices[0]
    if not _on or first.device.type != "cpu" or first.dtype not in (torch.float32, torch.bfloat16):
        return False
    if not all(x.dtype == first.dtype and x.device == first.device for x in matrices):
        return False
    return not is_transformed() and _built()


@constant_while_tracing
def _built() -> bool:
    if build.why_not() is not None:
        return False
    build.load()
    return True


def _pays(*matrices: Tensor) -> bool:
    return matrices[0].numel() >= SMALLEST and usable(*matrices)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last axis with a `weight [D]`."""
    if _pays(x):
        return torch.ops.halflife.norm(x, None, weight, None, None, "none", x.shape[-1], True, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


def rms_norm_of_gated(
    y: Tensor, z: Tensor, weight: Tensor, groups: int, eps: float, skip: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """`RMSNorm(y ⊙ silu(z)) ⊙ weight` over equal groups of channels, all `[B, T, D]`.

    Args:
        y, z: values and gate `[B, T, D]`.
        weight: `[D]`.
        groups: number of groups; each has its own mean square.
        eps: added to the mean square.
        skip: `(D [H], x [B, T, D])`; the values are then `y + D ⊙ x`, with one D a head.
    """
    scale, x = (None, None) if skip is None else skip
    if _pays(y, z) and (x is None or x.dtype == y.dtype):
        size = y.shape[-1] // groups
        return torch.ops.halflife.norm(y, z, weight, x, scale, "silu_before", size, True, eps)
    if scale is not None and x is not None:
        heads = (len(scale), -1)
        y = torch.addcmul(y.unflatten(-1, heads), scale.unsqueeze(-1).to(y.dtype), x.unflatten(-1, heads)).flatten(-2)
    gated = (y * F.silu(z)).unflatten(-1, (groups, -1))
    return F.rms_norm(gated, gated.shape[-1:], eps=eps).flatten(-2) * weight


def rms_norm_of_sigmoid_gated(y: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`RMSNorm(y ⊙ σ(z))` over the last axis, with a `weight [D]`."""
    if _pays(y, z):
        return torch.ops.halflife.norm(y, z, weight, None, None, "sigmoid_before", y.shape[-1], True, eps)
    return F.rms_norm(y * z.sigmoid(), weight.shape, weight, eps)


def gated_head_norm(o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`RMSNorm(o) ⊙ silu(z)` with the norm over each head: `o [B, T, H, V]`, `z [B, T, H·V]`, `weight [V]`."""
    if _pays(o, z):
        return torch.ops.halflife.norm(o.flatten(-2), z, weight, None, None, "silu_after", o.shape[-1], True, eps)
    return F.rms_norm(o, weight.shape, weight, eps).flatten(-2) * F.silu(z)


def l2_normalize(x: Tensor, eps: float = 1e-6) -> Tensor:
    """`x / √(‖x‖² + eps)` over the last axis, in float32; zero vectors stay zero, with finite gradients."""
    if _pays(x) and x.ndim > 1:
        y = torch.ops.halflife.norm(x.flatten(-2), None, None, None, None, "none", x.shape[-1], False, eps)
        return y.view(x.shape)
    wide = x.to(compute_dtype(x))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def swiglu(a: Tensor, b: Tensor) -> Tensor:
    """`silu(a) ⊙ b`."""
    return torch.ops.halflife.swiglu(a, b) if _pays(a, b) else F.silu(a) * b


def scale_heads(x: Tensor, s: Tensor) -> Tensor:
    """`x ⊙ s` with one number a head: `x [B, T, H, V]`, `s [B, T, H]` in float32 → x's dtype."""
    if _pays(x) and s.dtype == torch.float32:
        return torch.ops.halflife.scale_heads(x.flatten(-2), s).view(x.shape)
    return x * s.unsqueeze(-1).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + P) of each head, for tensors that are `usable`.

    Args:
        x: `[B, T, H, K]`.
        cos, sin: those of the angles, `[T, P]` or `[B, T, P]`, float32.
    """
    cos, sin = (part if part.ndim == 3 else part.unsqueeze(0) for part in (cos, sin))
    return torch.ops.halflife.rotate(x, cos, sin, 1.0)


def mimo_output(
    y: Tensor, later: Tensor, now: Tensor, before: Tensor, x: Tensor, z: Tensor,
    values: Tensor, gates: Tensor, outputs: Tensor,
) -> Tensor:  # fmt: skip
    """The output of Mamba-3 MIMO, `Σ_r w^o_r ⊙ u_r ⊙ silu(w^z_r ⊙ z) [B, T, H, V]`, with the u_r of `add_ranks`.

    Source: Lahoti et al. 2026, "Mamba-3".

    Args:
        y, later, now, before, x, values: as in `add_ranks`.
        z: `[B, T, H, V]`.
        gates, outputs: w^z and w^o `[R, H, V]`.
    """
    if _pays(y, before, x, z):
        later, now, values, gates, outputs = (t.float() for t in (later, now, values, gates, outputs))
        return torch.ops.halflife.mimo_output(y, later, now, before, x, z, values, gates, outputs)
    y = add_ranks(y, later, now, before, x, values)
    return (outputs.to(x.dtype) * y * F.silu(gates.to(x.dtype) * z.unsqueeze(2))).sum(2)


def add_ranks(y: Tensor, later: Tensor, now: Tensor, before: Tensor, x: Tensor, values: Tensor) -> Tensor:
    """`u_r = y_r + Σ_s (A_rs w^x_s ⊙ x' + B_rs w^x_s ⊙ x)`, `[B, T, R, H, V]`, in the dtype of x.

    Args:
        y: `[B, T, R, H, V]`.
        later, now: A and B `[B, T, H, R, R]`.
        before, x: x', the value of the token before, and x `[B, T, H, V]`.
        values: w^x `[R, H, V]`.
    """
    for weights, one in ((later, before), (now, x)):  # x stands outside the sum
        y = y + torch.einsum("bthrs,shv->btrhv", weights.to(x.dtype), values.to(x.dtype)) * one.unsqueeze(2)
    return y
