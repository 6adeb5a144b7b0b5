"""Passes of RWKV-7's layers. Each is an expression of torch, and one launch on a CUDA device (`halflife.ops.fused`).

Native kernels take part where an expression has a norm. On a CPU "auto" is the expression.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halflife.ops.backends import triton
from halflife.ops.backends.dispatch import be_kind, implements, implements_pass, run_gpu_pass
from halflife.ops.fused import l2_normalize, launch, why_not_triton
from halflife.ops.laws import Unevaluated
from halflife.ops.spec import define
from halflife.precision import ROOMY, product_dtype

MIXTURES = 6  # of a Triton kernel, all in one program


def token_mix(
    x: Tensor, before: Tensor | None, mu: Sequence[Tensor], last: bool = False, backend: str = "auto"
) -> tuple[Tensor, ...]:
    """RWKV's mixtures `x + μ_i ⊙ (x' − x)` of each token with x', the one before, `[B, T, D]` for each μ_i.

    Under autocast on a GPU the kernel rounds them to autocast's dtype, as the products that take them would.

    Args:
        x: `[B, T, D]`.
        before: x' `[B, T, D]`, or `[B, D]` for what precedes the first token of each row; None means zeros there.
        mu: any number of μ_i `[D]`.
        last: whether to return a copy of the last token of each row too, `[B, D]`. Then T ≥ 1.
        backend: see the top of the module.
    """
    return run_gpu_pass("token_mix", _token_mix, backend, (x, before, *mu), last)


def _token_mix(x: Tensor, before: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    *mu, last = rest
    if before is None or before.ndim == 2:
        first = x.new_zeros(len(x), x.shape[2]) if before is None else before
        before = torch.cat([first.unsqueeze(1), x], 1)[:, :-1]
    change = before - x
    mixed = tuple([torch.addcmul(x, change, factor) for factor in mu])
    return (*mixed, x[:, -1].clone()) if last else mixed


def _why_not_mix(op: str, device: torch.device, tensors: Any = None) -> str | None:
    others = 2 if op == "token_mix" else 5
    if tensors is not None and len(tensors) - others > MIXTURES:
        return f"the Triton kernel makes at most {MIXTURES} mixtures; got {len(tensors) - others}"
    return triton.why_not_pass(op, device, tensors)


def _rows(mu: list[Tensor]) -> Tensor:
    return mu[0].unsqueeze(0) if len(mu) == 1 else torch.stack(mu)


def _triton_token_mix(x: Tensor, before: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    *mu, last = rest
    return tuple(triton.custom_op("token_mix")(x, before, _rows(mu), None, None, None, 0.0, product_dtype(x), last))


define("token_mix", x="B T D", before="B T D | B D | None", mu_1="D", mu_2="D", settings={"last": False})
implements_pass("token_mix", _token_mix, triton=(_triton_token_mix, _why_not_mix))


def token_mix_of_norm(
    x: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor, before: Tensor | None, mu: Sequence[Tensor],
    eps: float, backend: str = "auto",
) -> tuple[Tensor, ...]:  # fmt: skip
    """The mixtures of `token_mix` of LayerNorms n of `x + branch [B, T, D]`, the last n of each row, and that sum.

    Args:
        x, branch: `[B, T, D]`, T ≥ 1; None is no branch.
        weight, bias, eps: of the norm, `[D]`.
        before: the n before the first token of each row `[B, D]`; None is zeros.
        mu: as in `token_mix`.
        backend: see the top of the module.
    """
    return run_gpu_pass("token_mix_of_norm", _mix_of_norm, backend, (x, branch, weight, bias, before, *mu), eps)


def _mix_of_norm(
    x: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor, before: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    *mu, eps = rest
    total = x if branch is None else x + branch
    n = F.layer_norm(total, weight.shape, weight.to(total.dtype), bias.to(total.dtype), eps)
    return *_token_mix(n, before, *mu, True), total


def _triton_mix_of_norm(
    x: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor, before: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    *mu, eps = rest
    settings = eps, product_dtype(x), True
    found = triton.custom_op("token_mix")(x, before, _rows(mu), branch, weight, bias, *settings)
    return (*found, x) if branch is None else tuple(found)


define(
    "token_mix_of_norm", x="B T D", branch="B T D | None", weight="D", bias="D", before="B D | None", mu_1="D",
    mu_2="D", settings={"eps": 1e-5},
)  # fmt: skip
implements_pass("token_mix_of_norm", _mix_of_norm, triton=(_triton_mix_of_norm, _why_not_mix))


def rwkv7_keys(
    key: Tensor, rate: Tensor, r: Tensor | None, bias: Tensor, unit: Tensor, change: Tensor, bonus: Tensor | None,
    dtype: torch.dtype | None = None, backend: str = "auto",
) -> tuple[Tensor, ...]:  # fmt: skip
    """What RWKV-7's state is written with, from a key and the activation of its learning rate.

        a = σ(bias + rate),  κ̂ = normalize(key ⊙ unit),  k = key ⊙ (1 + (a − 1) ⊙ change),  s = Σ_K r ⊙ k ⊙ bonus

    Args:
        key, rate, r: `[B, T, H, K]`; r may be None.
        bias, unit, change, bonus: parameters `[H, K]`; bonus is None if r is.
        dtype: that of k, −κ̂ and κ̂ ⊙ a; None for what the expression gives.
        backend: see `halflife.ops.fused`.

    Returns:
        k, −κ̂ and κ̂ ⊙ a `[B, T, H, K]`, and s `[B, T, H]` if there is r.

    Source: Peng et al. 2025, "RWKV-7".
    """
    return run_gpu_pass("rwkv7_keys", _keys, backend, (key, rate, r, bias, unit, change, bonus), dtype)


def _keys(
    key: Tensor, rate: Tensor, r: Tensor | None, bias: Tensor, unit: Tensor, change: Tensor, bonus: Tensor | None,
    dtype: torch.dtype | None, backend: str = "auto",
) -> tuple[Tensor, ...]:  # fmt: skip
    a = (bias + rate).sigmoid()
    removed = l2_normalize(key * unit, eps=1e-24, backend=backend)  # √eps = 1e-12, that of F.normalize
    k = key * (1 + (a - 1) * change)
    made = k, -removed, removed * a
    made = made if dtype is None else tuple([x.to(dtype) for x in made])
    return made if r is None or bonus is None else (*made, bonus_of(r, made[0], bonus))


def bonus_of(r: Tensor, k: Tensor, bonus: Tensor) -> Tensor:
    """`Σ_K r ⊙ k ⊙ bonus [B, T, H]` of `r, k [B, T, H, K]` and `bonus [H, K]`: what a token reads of its own value."""
    return (r.to(ROOMY[r.dtype]) * k * bonus).sum(-1)


define(
    "rwkv7_keys", key="B T H K", rate="B T H K", r="B T H K | None", bias="H K", unit="H K", change="H K",
    bonus="H K | None", settings={"dtype": None},
)  # fmt: skip
be_kind("norms", "rwkv7_keys")
for _backend in ("chunked", "reference"):
    implements("rwkv7_keys", _backend, partial(_keys, backend=_backend), traceable=True)


@implements("rwkv7_keys", "triton", why_not=why_not_triton)
def _triton_keys(
    key: Tensor, rate: Tensor, r: Tensor | None, bias: Tensor, unit: Tensor, change: Tensor, bonus: Tensor | None,
    dtype: torch.dtype | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    dtype = dtype or torch.promote_types(key.dtype, change.dtype)
    return tuple(triton.custom_op("rwkv7_keys")(key, rate, r, bias, unit, change, bonus, dtype))


def rwkv7_output(
    o: Tensor, s: Tensor, v: Tensor, gate: Tensor, weight: Tensor, bias: Tensor, eps: float,
    dtype: torch.dtype | None = None, backend: str = "auto",
) -> Tensor:  # fmt: skip
    """RWKV-7's output before its last product, `(LayerNorm(o) ⊙ weight + bias + s v) ⊙ gate [B, T, H·V]`.

    Args:
        o, v: `[B, T, H, V]`. The norm is over each head.
        s: the weight of each token's own value, `[B, T, H]`.
        gate: `[B, T, H·V]`.
        weight, bias: `[H·V]`.
        eps: added to the variance.
        dtype: that of the result; None for what the expression gives.
        backend: see `halflife.ops.fused`.
    """
    return run_gpu_pass("rwkv7_output", _output, backend, (o, s, v, gate, weight, bias), eps, dtype)


def _output(
    o: Tensor, s: Tensor, v: Tensor, gate: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype | None
) -> Tensor:
    normed = F.layer_norm(o, o.shape[-1:], eps=eps).flatten(-2) * weight + bias
    y = (normed + (s.unsqueeze(-1) * v).flatten(-2)) * gate
    return y if dtype is None else y.to(dtype)


def _triton_output(*given: Any) -> Tensor:
    *tensors, eps, dtype = given
    return triton.custom_op("rwkv7_output")(*tensors, eps, dtype or torch.promote_types(given[0].dtype, given[4].dtype))


define(
    "rwkv7_output", o="B T H V", s="B T H", v="B T H V", gate="B T D", weight="D", bias="D",
    settings={"eps": 1e-3, "dtype": None},
)  # fmt: skip
implements_pass("rwkv7_output", _output, triton=(_triton_output, why_not_triton))


def rwkv7_values(v: Tensor, first: Tensor, rate: Tensor, bias: Tensor, backend: str = "auto") -> Tensor:
    """RWKV-7's values in layers after the first, `v + (first − v) ⊙ σ(bias + rate)`, in the dtype of v.

    Args:
        v, first, rate: values, those of the first layer, and the activation of their weight, `[B, T, H, V]`.
        bias: `[H, V]`.
        backend: see `halflife.ops.fused`.
    """
    return run_gpu_pass("rwkv7_values", _values, backend, (v, first, rate, bias))


def _values(v: Tensor, first: Tensor, rate: Tensor, bias: Tensor) -> Tensor:
    return (v + (first - v) * (bias + rate).sigmoid()).to(v.dtype)


def relu_square(x: Tensor, backend: str = "auto") -> Tensor:
    """`relu(x)²`, between the two maps of RWKV-7's channel mix."""
    return run_gpu_pass("relu_square", _relu_square, backend, (x,))


def _relu_square(x: Tensor) -> Tensor:
    return x.relu().square()


define("rwkv7_values", v="B T H V", first="B T H V", rate="B T H V", bias="H V")
implements_pass("rwkv7_values", _values, triton=(partial(launch, "rwkv7_values"), why_not_triton))
define("relu_square", x="... D")
implements_pass("relu_square", _relu_square, triton=(partial(launch, "relu_square"), triton.why_not_pass))


def rwkv7_token(
    rows: list[Tensor], first: Tensor | None, low: list[Tensor], ups: Sequence[Tensor], vectors: Sequence[Tensor],
    state: Tensor, eps: float, dtype: torch.dtype, g: Unevaluated,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One token of each sequence from its projections to the input of the last map `[B, 1, H·V]`, and the next state.

    The arguments are those of the kernel (`backends/triton/dplr/rwkv7_token.py`), and g are the log-decays.
    """
    *_, law = g.given()
    state, vectors = state.contiguous(), [x.contiguous() for x in vectors]
    found = triton.custom_op("rwkv7_token")(
        rows, first, low, [x.contiguous() for x in ups], vectors, state, eps, dtype, *law[2:]
    )
    return tuple(found)


def mixed_maps(
    x: Tensor, before: Tensor, mu: list[Tensor], weights: list[Tensor], branch: Tensor | None = None,
    norm: Sequence[Tensor] = (), eps: float = 0.0,
) -> list[Tensor]:  # fmt: skip
    """Maps `[B, 1, Fᵢ]` of `n + μ_i ⊙ (before − n)` by weights `[Fᵢ, D]`, then n `[B, D]`, and with a norm the sum.

    n is `x [B, 1, D]`, or the LayerNorm of `x + branch` with the weight and bias in `norm`. `before` is `[B, D]`.
    `recurrent.takes_map` must accept these tensors, of which at most 7 are weights.
    """
    out, *rest = triton.custom_op("mixed_maps")(x, before, mu, weights, branch, list(norm), eps)
    maps = [y[..., : len(weight)] for y, weight in zip(out.unbind(0), weights, strict=True)]
    if not norm:
        return [*maps, x[:, -1]]
    return [*maps, rest[0], rest[1] if len(rest) > 1 else x]
