"""Passes of Mamba-3's layers: running angles, weights of the trapezoidal rule, queries with keys, outputs, and MIMO.

Each is an expression of torch, and one launch on a CUDA device (`angles.py`, `weights.py` and `trapezoid.py` in
`backends/triton/passes`, and `backends/triton/mimo`). All but the first two have native kernels too. `packing` says
where sequences lie (None: in rows), and a `first` tensor is what the state kept of the token before each of them (None:
zeros).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halflife.ops.backends import native, triton
from halflife.ops.backends.dispatch import implements_pass, run_gpu_pass, run_pass
from halflife.ops.backends.widened import times
from halflife.ops.chunked.layout import running_angle
from halflife.ops.fused import launch, turned
from halflife.ops.spec import define
from halflife.packing import Packing
from halflife.precision import ROOMY, compute_dtype


def _packed(packing: Packing | None, x: Tensor) -> Packing:
    return Packing(x.shape[0], x.shape[1]) if packing is None else packing


def running_angles(
    step: Tensor, rate: Tensor, first: Tensor | None, bounded: bool, packing: Packing | None, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """Running sums φ of `Δ tanh(r) / 2`, or of `Δ r / 2π` if not `bounded`, in turns of 2π without whole turns.

    Args:
        step: Δ `[B, T, H]`, float32 or wider.
        rate: r `[B, T, P]`, or `[B, T, H, P]` for each head.
        first: φ `[N, H, P]` before the first token of each sequence, or None.
        bounded: whether there is a tanh.
        packing, backend: see the top of the module.

    Returns:
        φ `[B, T, H, P]`, and that of the last token of each sequence, `[N, H, P]` in float64.
    """
    return run_gpu_pass("running_angles", _angles, backend, (step, rate, first), bounded, packing)


def _angles(
    step: Tensor, rate: Tensor, first: Tensor | None, bounded: bool, packing: Packing | None
) -> tuple[Tensor, Tensor]:
    rate = rate.to(compute_dtype(rate))
    rate = rate.unsqueeze(2) if rate.ndim == 3 else rate
    turns = step.unsqueeze(-1) * rate.tanh() / 2 if bounded else step.unsqueeze(-1) * rate / (2 * math.pi)
    return running_angle(turns, first, _packed(packing, turns))


def trapezoid_weights(
    g: Tensor, step: Tensor, share: Tensor, first: Tensor | None, packing: Packing | None, backend: str = "auto"
) -> tuple[Tensor, Tensor, Tensor]:
    """How much of the token before, and of itself, a token writes at the end of its step.

        e^{g_t} (λ_{t−1} Δ_{t−1} + (1 − λ_t) Δ_t)   and   λ_t Δ_t,   with λ = σ(l)

    Args:
        g, step: log-decay g and step size Δ `[B, T, H]`, float32 or wider.
        share: l `[B, T, H]`.
        first: `λ Δ [N, H]` of the token before each sequence, or None.
        packing, backend: see the top of the module.

    Returns:
        Both `[B, T, H]`, and λ Δ of the last token of each sequence, `[N, H]`.
    """
    return run_gpu_pass("trapezoid_weights", _weights, backend, (g, step, share, first), packing)


def _weights(
    g: Tensor, step: Tensor, share: Tensor, first: Tensor | None, packing: Packing | None
) -> tuple[Tensor, Tensor, Tensor]:
    end = share.to(compute_dtype(share)).sigmoid()
    gain = end * step
    before, last = _packed(packing, gain).delay(gain, first)
    return g.exp() * (before + (1 - end) * step), gain, last


def trapezoid_keys(
    c: Tensor, b: Tensor, v: Tensor, angle: Tensor, query: tuple[Tensor, Tensor] | None,
    key: tuple[Tensor, Tensor] | None, first: tuple[Tensor | None, Tensor | None], eps: float, whole: bool,
    packing: Packing | None, backend: str = "auto",
) -> tuple[Tensor, ...]:  # fmt: skip
    """Queries, and the keys and values of the token before each token.

        q = R(φ) (norm(c) ⊙ w_q + b_q),   k = R(φ) (norm(b) ⊙ w_k + b_k)

    R(φ) rotates the pairs (i, i + P) of the first 2P channels. The norm is over the channels of each group.

    Args:
        c, b: `[B, T, G·K]`.
        v: values `[B, T, H', V]`.
        angle: φ `[B, T, A, P]` in turns of 2π. Head h has that of h mod A, so the R heads of a MIMO head share one.
        query, key: weight `[K]` and bias `[H, K]` of the norms. None is no norm and no bias, and then H = G.
        first: key `[N, H, K]` and value `[N, H', V]` of the token before each sequence, or None.
        eps: of the norms.
        whole: whether to return k too.
        packing, backend: see the top of the module.

    Returns:
        q and the keys before `[B, T, H, K]` in the dtype of v, the values before `[B, T, H', V]`, the products q·k of
        each token with itself `[B, T, H]`, key and value of the last token of each sequence, and k if asked for.
    """
    parameters = (*(query or (None, None)), *(key or (None, None)))
    return run_pass("trapezoid_keys", backend, (c, b, v, angle, *parameters, *first), eps, whole, packing)


def _turned_keys(c: Tensor, b: Tensor, angle: Tensor, *norms: Any) -> tuple[Tensor, Tensor, Tensor]:
    (*weights, eps), heads, (cos, sin) = norms, angle.shape[2], _cos_sin(angle)
    q, k = (
        turned(normed(x, weight, bias, eps, heads).unflatten(2, (-1, heads)), cos, sin).flatten(2, 3)
        for x, weight, bias in ((c, *weights[:2]), (b, *weights[2:]))
    )
    return q, k, (q * k).sum(-1)


def _cos_sin(angle: Tensor) -> tuple[Tensor, Tensor]:
    turns = 2 * math.pi * angle.to(compute_dtype(angle)).unsqueeze(2)
    return turns.cos(), turns.sin()


def _keys(
    c: Tensor, b: Tensor, v: Tensor, angle: Tensor, query: Tensor | None, query_bias: Tensor | None,
    key: Tensor | None, key_bias: Tensor | None, first_key: Tensor | None, first_value: Tensor | None, eps: float,
    whole: bool, packing: Packing | None, make: Any = _turned_keys,
) -> tuple[Tensor, ...]:  # fmt: skip
    packing = _packed(packing, c)
    q, k, dot = make(c, b, angle, query, query_bias, key, key_bias, eps)
    before, last_key = packing.delay(k, first_key)
    v_before, value = packing.delay(v, first_value)
    found = q.to(v.dtype), before.to(v.dtype), v_before, dot, last_key, value
    return (*found, k.to(v.dtype)) if whole else found


def _native_keys(c: Tensor, b: Tensor, angle: Tensor, *norms: Any) -> tuple[Tensor, Tensor, Tensor]:
    *weights, eps = (x.float() if isinstance(x, Tensor) else x for x in norms)
    with torch.no_grad():  # the kernel has the gradient of φ
        turns = _cos_sin(angle.float())
    return native.op("trapezoid_keys")(c, b, angle, *weights, *turns, eps)


def normed(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, heads: int) -> Tensor:
    """`RMSNorm(x) ⊙ weight + bias` with the norm over each group, `[B, T, G·K]` → `[B, T, H, K]` in float32 or wider.

    Without weight and bias it is x, in `heads` heads.
    """
    x = x.to(compute_dtype(x))
    if weight is None or bias is None:
        return x.unflatten(-1, (heads, -1))
    size = bias.shape[-1]
    x = F.rms_norm(x.unflatten(-1, (-1, size)), (size,), eps=eps) * weight
    return (x.unsqueeze(3) + bias.unflatten(0, (x.shape[2], -1))).flatten(2, 3)


def trapezoid_output(
    o: Tensor, v: Tensor, dot: Tensor, gain: Tensor, skip: Tensor | None, z: Tensor | None, backend: str = "auto"
) -> Tensor:
    """`(o + (gain · dot + D) v) ⊙ silu(z)`: what a token reads of itself, the skip and the gate.

    Args:
        o, v: `[B, T, H, V]`.
        dot, gain: `[B, T, H]`, float32 or wider.
        skip: D `[H]` or None.
        z: `[B, T, H·V]`, or None for no gate.
        backend: see the top of the module.

    Returns:
        `[B, T, H·V]`, in the dtype of o.
    """
    return run_pass("trapezoid_output", backend, (o, v, dot, gain, skip, z))


def _output(o: Tensor, v: Tensor, dot: Tensor, gain: Tensor, skip: Tensor | None, z: Tensor | None) -> Tensor:
    factor = gain * dot if skip is None else torch.addcmul(skip, gain, dot)
    y = torch.addcmul(o, factor.unsqueeze(-1).to(o.dtype), v.to(o.dtype)).flatten(-2)
    return y if z is None else y * F.silu(z.to(y.dtype))


def _native_output(
    o: Tensor, v: Tensor, dot: Tensor, gain: Tensor, skip: Tensor | None, z: Tensor | None
) -> Tensor:  # fmt: skip
    skip, z = None if skip is None else skip.float(), None if z is None else z.to(o.dtype)
    return native.op("trapezoid_output")(o, v, dot.float(), gain.float(), skip, z)


def mimo_products(
    q: Tensor, k: Tensor, before: Tensor, weight: Tensor, gain: Tensor, skip: Tensor, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """The weights in output r of the values s that its state has not yet: A of the token before, B of its own token.

        A_rs = w q_r · k'_s for s > r, else 0,   B_rs = γ q_r · k_s, and + D for r = s

    The rows up to r of the token before are in the state already. Source: Lahoti et al. 2026, "Mamba-3".

    Args:
        q, k, before: queries, keys and k', the keys of the token before, `[B, T, R, H, K]`.
        weight, gain: w and γ `[B, T, H]`, float32 or wider.
        skip: D `[H]`.
        backend: see the top of the module.

    Returns:
        A and B `[B, T, H, R, R]`, float32 or wider.
    """
    return run_pass("mimo_products", backend, (q, k, before, weight, gain, skip))


def _mimo_products(
    q: Tensor, k: Tensor, before: Tensor, weight: Tensor, gain: Tensor, skip: Tensor
) -> tuple[Tensor, Tensor]:
    q, k, before = (x.to(ROOMY[x.dtype]).transpose(2, 3) for x in (q, k, before))
    later = weight[..., None, None] * times(q, before.transpose(-1, -2)).triu(1)
    now = gain[..., None, None] * times(q, k.transpose(-1, -2))
    rank = torch.eye(q.shape[3], device=now.device, dtype=now.dtype)
    return later, now + skip[:, None, None].to(now) * rank


def mimo_output(
    y: Tensor, later: Tensor, now: Tensor, before: Tensor, x: Tensor, z: Tensor,
    values: Tensor, gates: Tensor, outputs: Tensor, backend: str = "auto",
) -> Tensor:  # fmt: skip
    """The output of Mamba-3 MIMO, `Σ_r w^o_r ⊙ u_r ⊙ silu(w^z_r ⊙ z) [B, T, H, V]`, with the u_r of `add_ranks`.

    Source: Lahoti et al. 2026, "Mamba-3".

    Args:
        y, later, now, before, x, values: as in `add_ranks`.
        z: `[B, T, H, V]`.
        gates, outputs: w^z and w^o `[R, H, V]`.
        backend: see the top of the module.
    """
    return run_pass("mimo_output", backend, (y, before, x, z, later, now, values, gates, outputs))


def _mimo_output(
    y: Tensor, before: Tensor, x: Tensor, z: Tensor, later: Tensor, now: Tensor, values: Tensor, gates: Tensor,
    outputs: Tensor,
) -> Tensor:  # fmt: skip
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
        y = y + times(weights.to(x.dtype), values.to(x.dtype).transpose(0, 1)).transpose(2, 3) * one.unsqueeze(2)
    return y


define(
    "running_angles", step="B T H", rate="B T P | B T H P", first="B H P | None",
    settings={"bounded": True, "packing": None},
)  # fmt: skip
define(
    "trapezoid_weights", g="B T H", step="B T H", share="B T H", first="B H | None", log_decays=["g"],
    settings={"packing": None},
)  # fmt: skip
define(
    "trapezoid_keys", c="B T K", b="B T K", v="B T H V", angle="B T H P", query="K", query_bias="H K", key="K",
    key_bias="H K", first_key="B H K | None", first_value="B H V | None",
    settings={"eps": 1e-5, "whole": True, "packing": None},
)  # fmt: skip
define(
    "trapezoid_output", o="B T H V", v="B T H V", dot="B T H", gain="B T H", skip="H | None", z="B T D | None",
)  # fmt: skip
define(
    "mimo_products", q="B T R H K", k="B T R H K", before="B T R H K", weight="B T H", gain="B T H", skip="H"
)  # fmt: skip
define(
    "mimo_output", y="B T R H V", before="B T H V", x="B T H V", z="B T H V", later="B T H R R", now="B T H R R",
    values="R H V", gates="R H V", outputs="R H V",
)  # fmt: skip


def _why_not(op: str, device: torch.device, tensors: Any = None) -> str | None:
    """The `why_not` of the Triton kernels, which have all channels of a head in one program; φ may be float64."""
    if tensors is not None:
        heads = {"running_angles": tensors[1:2], "trapezoid_keys": tensors[2:6:3]}.get(op, tensors[:1])
        size = max([1, *(x.shape[-1] for x in heads if x is not None)])
        if op == "trapezoid_keys" and tensors[5] is None:
            size = max(size, tensors[0].shape[-1] // tensors[3].shape[2])
        if (wide := triton.too_wide(op, size)) is not None:
            return wide
        tensors = tensors[:-1] if op == "running_angles" else tensors
    return triton.why_not_pass(op, device, tensors)


def _launch(name: str, count: int, *given: Any) -> tuple[Tensor, ...]:
    """Run a Triton kernel on `count` tensors and the boundaries of the packing, which comes last, and the settings."""
    *settings, packing = given[count:]
    bounds = None if packing is None else packing.cu_seqlens
    return tuple(triton.custom_op(name)(*given[:count], bounds, *settings))


def _native(name: str, count: int, *given: Tensor) -> Any:
    return native.op(name)(*given[:count], *(x.float() for x in given[count:]))


for _op, _expression, _count in (("running_angles", _angles, 3), ("trapezoid_weights", _weights, 4)):
    implements_pass(_op, _expression, triton=(partial(_launch, _op, _count), _why_not))
implements_pass(
    "trapezoid_keys", _keys, native=(partial(_keys, make=_native_keys), native.why_not_matrices(2)),
    triton=(partial(_launch, "trapezoid_keys", 10), _why_not),
)  # fmt: skip
implements_pass(
    "trapezoid_output", _output, native=(_native_output, native.why_not_matrices(2)),
    triton=(partial(launch, "trapezoid_output"), _why_not),
)  # fmt: skip
for _op, _expression, _count in (("mimo_products", _mimo_products, 3), ("mimo_output", _mimo_output, 4)):
    implements_pass(
        _op, _expression, native=(partial(_native, _op, _count), native.why_not_matrices(_count)),
        triton=(partial(launch, _op), _why_not),
    )  # fmt: skip
