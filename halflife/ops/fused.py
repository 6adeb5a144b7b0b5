"""Passes of a layer over memory: norms with their gates, SwiGLU, scaled heads and rotations.

Each is an op whose definition is an expression of torch. Where the native kernels are built, and on CUDA devices, it
runs as one pass over memory, forward and backward (csrc/norms.cpp and gates.cpp in `backends/native`, and
`backends/triton/passes`). `backend` is "auto", "native", "triton", or "chunked" or "reference" for the expression.
Those of RWKV-7 are in `ops/rwkv7.py`, and those of Mamba-3 in `ops/trapezoid`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import gcd
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halflife.ops.backends import native, triton
from halflife.ops.backends.dispatch import add_skip, be_kind, implements_pass, run_pass
from halflife.ops.backends.widened import product
from halflife.ops.linear import PASSES, LinearOfPass, made_again, narrowed
from halflife.ops.spec import define
from halflife.precision import autocast_dtype, compute_dtype, product_dtype
from halflife.registry import unknown

HEAD_GATES = {"silu": F.silu, "sigmoid": torch.sigmoid}
WIDEST = 8192  # channels of a norm or a head, all in one program of a Triton kernel


def why_not_triton(op: str, device: torch.device, tensors: Any = None) -> str | None:
    """The `why_not` of Triton kernels that have all channels of the first tensor in one program."""
    if tensors is not None and tensors[0].shape[-1] > WIDEST:
        return f"the Triton kernel of {op} takes at most {WIDEST} channels; got {tensors[0].shape[-1]}"
    return triton.why_not_pass(op, device, tensors)


def launch(name: str, *given: Any) -> Any:
    """Run the Triton kernel of this name on tensors and settings."""
    return triton.custom_op(name)(*given)


def _pass(
    op: str, expression: Callable[..., Tensor], kernel: Callable[..., Tensor], matrices: int,
    why_not: Any = why_not_triton,
) -> None:  # fmt: skip
    """Register a pass with one kernel of both kinds, of which the native one has `matrices` tensors of one dtype."""
    kernels = (kernel, native.why_not_matrices(matrices)), (partial(kernel, op=triton.custom_op), why_not)
    implements_pass(op, expression, native=kernels[0], triton=kernels[1])


def rms_norm(x: Tensor, weight: Tensor, eps: float, backend: str = "auto") -> Tensor:
    """RMSNorm over the last axis of `x [..., D]` with a `weight [D]`.

    Under autocast on a GPU the kernel rounds as the products that take its output would, to autocast's dtype.
    """
    return run_pass("rms_norm", backend, (x, weight), eps)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    weight = weight.to(x.dtype) if weight.dtype == torch.float16 else weight  # activations may be float32 then
    return F.rms_norm(x, weight.shape, weight, eps)


def _native_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return native.op("norm")(x, None, weight, None, None, "none", x.shape[-1], True, eps)


def _triton_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return triton.custom_op("norm")(x, None, weight, None, None, "none", x.shape[-1], True, eps, product_dtype(x))


be_kind("norms", "norm", "add_norm")
define("rms_norm", x="... D", weight="D", settings={"eps": 1e-5})
implements_pass(
    "rms_norm", _rms_norm, native=(_native_rms_norm, native.why_not_matrices(1)),
    triton=(_triton_rms_norm, why_not_triton),
)  # fmt: skip


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """`x + y` and its `rms_norm`, for a residual stream and a branch `x, y [..., D]`."""
    return run_pass("add_rms_norm", backend, (x, y, weight), eps)


def _add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return (z := x + y), _rms_norm(z, weight, eps)


def _triton_add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return triton.custom_op("add_norm")(x, y, weight, eps, autocast_dtype(x.device))


define("add_rms_norm", x="... D", y="... D", weight="D", settings={"eps": 1e-5})
implements_pass("add_rms_norm", _add_rms_norm, triton=(_triton_add_rms_norm, why_not_triton))


def rms_norm_of_gated(
    y: Tensor, z: Tensor, weight: Tensor, groups: int, eps: float, skip: tuple[Tensor, Tensor] | None = None,
    backend: str = "auto",
) -> Tensor:  # fmt: skip
    """`RMSNorm(y ⊙ silu(z)) ⊙ weight` over equal groups of channels, all `[B, T, D]`.

    Args:
        y, z: values and gate `[B, T, D]`.
        weight: `[D]`.
        groups: number of groups; each has its own mean square.
        eps: added to the mean square.
        skip: `(D [H], x [B, T, D])`; the values are then `y + D ⊙ x`, with one D per head.
        backend: see the top of the module.
    """
    scale, x = (None, None) if skip is None else skip
    return run_pass("rms_norm_of_gated", backend, (y, z, x, weight, scale), groups, eps)


def _rms_norm_of_gated(
    y: Tensor, z: Tensor, x: Tensor | None, weight: Tensor, scale: Tensor | None, groups: int, eps: float
) -> Tensor:
    if scale is not None and x is not None:
        heads = (len(scale), -1)
        y = torch.addcmul(y.unflatten(-1, heads), scale.unsqueeze(-1).to(y.dtype), x.unflatten(-1, heads)).flatten(-2)
    gated = (y * F.silu(z)).unflatten(-1, (groups, -1))
    return F.rms_norm(gated, gated.shape[-1:], eps=eps).flatten(-2) * weight


def _fused_rms_norm_of_gated(
    y: Tensor, z: Tensor, x: Tensor | None, weight: Tensor, scale: Tensor | None, groups: int, eps: float,
    op: Any = native.op,
) -> Tensor:  # fmt: skip
    return op("norm")(y, z, weight, x, scale, "silu_before", y.shape[-1] // groups, True, eps)


define(
    "rms_norm_of_gated", y="B T D", z="B T D", x="B T D | None", weight="D", scale="H | None",
    settings={"groups": 2, "eps": 1e-5},
)  # fmt: skip
_pass("rms_norm_of_gated", _rms_norm_of_gated, _fused_rms_norm_of_gated, 3)


def rms_norm_of_gated_linear(
    y: Tensor, z: Tensor, norm_weight: Tensor, groups: int, eps: float, skip: Any, weight: Tensor, backend: str = "auto"
) -> Tensor:
    """`rms_norm_of_gated(…) Wᵀ` for a `weight [N, D]`; what W reads is not kept by the Triton kernel."""
    scale, x = (None, None) if skip is None else skip
    given, narrow = (y, z, norm_weight, x, scale), narrowed(weight, y)
    if not made_again("rms_norm_of_gated", backend, given, narrow, y if x is None else x):
        return product(rms_norm_of_gated(y, z, norm_weight, groups, eps, skip, backend), weight)
    settings = "silu_before", y.shape[-1] // groups, True, eps
    return LinearOfPass.apply("norm", settings, narrow, *given)  # pyright: ignore[reportReturnType]


def _norm_again(dout: Tensor, tensors: Sequence[Any], settings: Any) -> tuple[Sequence[Any], Tensor]:
    *found, out = triton.custom_op("norm_again")(dout, *tensors, settings[1], settings[3])
    return [None if x is None else d for x, d in zip(tensors, found, strict=True)], out


def rms_norm_of_sigmoid_gated(y: Tensor, z: Tensor, weight: Tensor, eps: float, backend: str = "auto") -> Tensor:
    """`RMSNorm(y ⊙ σ(z))` over the last axis of `y, z [..., D]`, with a `weight [D]`."""
    return run_pass("rms_norm_of_sigmoid_gated", backend, (y, z, weight), eps)


def _rms_norm_of_sigmoid_gated(y: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    weight = weight.to(y.dtype) if weight.dtype == torch.float16 else weight  # activations may be float32 then
    return F.rms_norm(y * z.sigmoid(), weight.shape, weight, eps)


def _fused_rms_norm_of_sigmoid_gated(y: Tensor, z: Tensor, weight: Tensor, eps: float, op: Any = native.op) -> Tensor:
    return op("norm")(y, z, weight, None, None, "sigmoid_before", y.shape[-1], True, eps)


define("rms_norm_of_sigmoid_gated", y="... D", z="... D", weight="D", settings={"eps": 1e-5})
_pass("rms_norm_of_sigmoid_gated", _rms_norm_of_sigmoid_gated, _fused_rms_norm_of_sigmoid_gated, 2)


def gated_head_norm(
    o: Tensor, z: Tensor, weight: Tensor, eps: float, backend: str = "auto", gate: str = "silu"
) -> Tensor:
    """`RMSNorm(o) ⊙ silu(z)` with the norm over each head: `o [B, T, H, V]`, `z [B, T, H·V]`, `weight [V]`.

    With `gate="sigmoid"` it is `RMSNorm(o) ⊙ σ(z)`. Another name is a ValueError.
    """
    if gate not in HEAD_GATES:
        raise unknown("gate", gate, list(HEAD_GATES))
    return run_pass("gated_head_norm", backend, (o, z, weight), eps, gate)


def _gated_head_norm(o: Tensor, z: Tensor, weight: Tensor, eps: float, gate: str) -> Tensor:
    weight = weight.to(o.dtype) if weight.dtype == torch.float16 else weight  # activations may be float32 then
    return F.rms_norm(o, weight.shape, weight, eps).flatten(-2) * HEAD_GATES[gate](z)


def _fused_gated_head_norm(o: Tensor, z: Tensor, weight: Tensor, eps: float, gate: str, op: Any = native.op) -> Tensor:
    return op("norm")(o.flatten(-2), z, weight, None, None, f"{gate}_after", o.shape[-1], True, eps)


define("gated_head_norm", o="B T H V", z="B T D", weight="V", settings={"eps": 1e-5, "gate": "silu"})
_pass("gated_head_norm", _gated_head_norm, _fused_gated_head_norm, 2)


def l2_normalize(x: Tensor, eps: float = 1e-6, backend: str = "auto") -> Tensor:
    """`x / √(‖x‖² + eps)` over the last axis, in float32; zero vectors stay zero, with finite gradients."""
    return run_pass("l2_normalize", backend, (x,), eps)


def unit(x: Tensor, eps: float = 1e-6) -> Tensor:
    """The expression of `l2_normalize`."""
    wide = x.to(compute_dtype(x))
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def _fused_l2_normalize(x: Tensor, eps: float, op: Any = native.op) -> Tensor:
    rows = x.flatten(-2) if x.ndim > 1 else x
    return op("norm")(rows, None, None, None, None, "none", x.shape[-1], False, eps).view(x.shape)


define("l2_normalize", x="... D", settings={"eps": 1e-6})
_pass("l2_normalize", unit, _fused_l2_normalize, 1)


def swiglu(a: Tensor, b: Tensor, backend: str = "auto", skip: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """`silu(a) ⊙ b` for `a, b [..., D]`; with `skip = (D [H], x [..., D])`, `silu(a) ⊙ (b + D ⊙ x)`."""
    return run_pass("swiglu", backend, (a, b) if skip is None else (a, b, skip[1], skip[0]))


def skipped(y: Tensor, scale: Tensor | None = None, x: Tensor | None = None) -> Tensor:
    """`y + D ⊙ x` for `y, x [..., H·V]` and D `[H]`, or y."""
    if scale is None or x is None:
        return y
    heads = (len(scale), -1)
    return add_skip(y.unflatten(-1, heads), scale, x.unflatten(-1, heads)).flatten(-2)


def _swiglu(a: Tensor, b: Tensor, x: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
    return F.silu(a) * (b if x is None else skipped(b, scale, x))


def _native_swiglu(a: Tensor, b: Tensor, x: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
    return native.op("swiglu")(a, b if x is None else skipped(b, scale, x))


def _triton_swiglu(a: Tensor, b: Tensor, x: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
    if x is None:
        return triton.custom_op("swiglu")(a, b)
    return triton.custom_op("norm")(b, a, None, x, scale, "silu_before", gcd(b.shape[-1], 2048), None, 0.0)


define("swiglu", a="... D", b="... D", x="... D | None", scale="H | None")
implements_pass(
    "swiglu", _swiglu, native=(_native_swiglu, native.why_not_matrices(3)), triton=(_triton_swiglu, triton.why_not_pass)
)


def swiglu_linear(a: Tensor, b: Tensor, weight: Tensor, backend: str = "auto") -> Tensor:
    """`(silu(a) ⊙ b) Wᵀ` for `a, b [..., D]` and a `weight [N, D]`.

    By the Triton kernel a and b are kept for the backward pass, and not their product.
    """
    if not made_again("swiglu", backend, (a, b), narrow := narrowed(weight, a)):
        return product(swiglu(a, b, backend), weight)
    return LinearOfPass.apply("swiglu", (), narrow, a, b)  # pyright: ignore[reportReturnType]


def _swiglu_again(dout: Tensor, tensors: Sequence[Any], settings: Any) -> tuple[Sequence[Tensor], Tensor]:
    both, product = triton.custom_op("swiglu_again")(dout, *tensors)
    return both.chunk(2, -1), product


PASSES.update(norm=_norm_again, swiglu=_swiglu_again)


def scale_heads(x: Tensor, s: Tensor, backend: str = "auto") -> Tensor:
    """`x ⊙ s` with one number per head: `x [B, T, H, V]`, `s [B, T, H]` → x's dtype."""
    return run_pass("scale_heads", backend, (x, s))


def _fused_scale_heads(x: Tensor, s: Tensor, op: Any = native.op) -> Tensor:
    return op("scale_heads")(x.flatten(-2), s.float()).view(x.shape)


define("scale_heads", x="B T H V", s="B T H")
_pass("scale_heads", lambda x, s: x * s.unsqueeze(-1).to(x.dtype), _fused_scale_heads, 1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, backend: str = "auto") -> Tensor:
    """Rotate the pairs (i, i + P) of each head; channels beyond 2 P do not change.

    Args:
        x: `[B, T, H, K]`.
        cos, sin: those of the angles, `[T, P]` or `[B, T, P]`, float32 or wider.
        backend: see the top of the module.
    """
    return run_pass("rotate", backend, (x, cos, sin), always=True)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The expression of `rotate` for any shapes that broadcast, `[…, K]` and `[…, P]`."""
    pairs, wide = cos.shape[-1], torch.promote_types(x.dtype, cos.dtype)
    first, second, rest = x.to(wide).tensor_split([pairs, 2 * pairs], -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1).to(x.dtype)


def _fused_rotate(x: Tensor, cos: Tensor, sin: Tensor, op: Any = native.op) -> Tensor:
    cos, sin = (part.float() if part.ndim == 3 else part.float().unsqueeze(0) for part in (cos, sin))
    return op("rotate")(x, cos, sin, 1.0)


define("rotate", x="B T H K", cos="T P | B T P", sin="T P | B T P", constants=["cos", "sin"])
_pass("rotate", lambda x, cos, sin: turned(x, cos.unsqueeze(-2), sin.unsqueeze(-2)), _fused_rotate, 1)
