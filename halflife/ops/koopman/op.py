"""Spectral Koopman attention: ridge regression on the past, read through powers of the keys' own dynamics.

Per head, keys z_t, queries q_t in R^r, values v_t in R^P; an operator is fitted to a set of past tokens:

    G = Σ z zᵀ,   M = Σ z_t z_{t−1}ᵀ,   C = Σ v zᵀ,   G̃ = G + ε m² I,   m = max ‖z‖
    x = G̃⁻¹ q,   x_K = (γ G̃⁻¹ M)^K x,   y = C ((1 − μ) x + μ x_K)

which is the paper's whitened form `C G̃⁻¹ L Â^K L⁻¹ q` without its factors (math.md §5). Raw keys with the ridge ε m²
equal keys divided by m with the ridge ε; m runs over the keys that the operator has seen, so nothing leaks.
Source: Echo, §3.2, Appendices A, F, I.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from halflife.ops.backends.dispatch import choose, implements
from halflife.ops.koopman import reference  # noqa: F401 (the reference registers itself)
from halflife.ops.koopman import state as koopman_state
from halflife.ops.koopman.layout import Layout
from halflife.ops.koopman.state import KoopmanState, Sums, unit_of
from halflife.ops.recurrent import check_cu_seqlens
from halflife.precision import compute_dtype
from halflife.registry import unknown
from halflife.shapes import Float, Int

MODES = ("chunk", "prefix", "masked")
REFRESHES = ("chunk", "token")
NORMALIZATIONS = ("causal", "sequence")
OP = "koopman_attention"


def koopman_attention(
    q: Float[Tensor, "B S H R"],
    k: Float[Tensor, "B T H R"],
    v: Float[Tensor, "B T H P"],
    *,
    gamma: float | Tensor = 1.0,
    mix: float | Tensor = 1.0,
    ridge: float = 1e-3,
    power: int = 2,
    mode: str = "chunk",
    mask: Tensor | None = None,
    chunk_size: int = 64,
    refresh: str = "chunk",
    normalization: str = "causal",
    initial_state: KoopmanState | None = None,
    output_final_state: bool = False,
    cu_seqlens: Int[Tensor, " N1"] | None = None,
    backend: str = "auto",
) -> tuple[Tensor, KoopmanState | None]:
    """Spectral Koopman attention; the equations stand at the top of the module.

    Args:
        q, k: queries and keys `[B, T, H, R]`; in modes "prefix" and "masked" queries may have a length of their own.
        v: values `[B, T, H, P]`.
        gamma, mix: γ and μ, numbers or one a head `[H]`.
        ridge: ε, relative to the largest squared norm of the keys seen.
        power: K; 0 is plain ridge regression.
        mode: "chunk": queries of a chunk of `chunk_size` tokens read the chunks before it; "prefix": all queries read
            all keys; "masked": all read the keys where `mask` is set.
        mask: `[B, T]`, 0 where a token is left out of the sums; pairs count where both tokens are in.
        refresh: "token" fits an operator a token (as `chunk_size=1`), one at a time by rank-one updates.
        normalization: "causal", or "sequence": m over the whole sequence, the future included, as the paper trains.
        initial_state, output_final_state: see `koopman_state`; a sequence cut anywhere gives what the uncut one gives.
        cu_seqlens: boundaries `[N + 1]` of N sequences packed along T (then B = 1), mode "chunk" only.
        backend: "auto", or one of `available_backends("koopman_attention")`; modes "prefix" and "masked" have one form.

    Returns:
        `y [B, T, H, P]` in v's dtype (0 where an operator has seen nothing), and the state or None.

    Raises:
        ValueError: a shape, name or size that does not fit, or a backend that cannot run.
    """
    _check(q, k, v, mode, mask, cu_seqlens)
    check_settings(ridge, power, chunk_size, refresh, normalization, mode)
    implementation, dtype = choose(OP, backend, k.device), compute_dtype(k)
    chunk_size = 1 if refresh == "token" else chunk_size
    with torch.autocast(k.device.type, enabled=False):
        tokens = q.to(dtype), k.to(dtype), v.to(dtype)
        filter_ = KoopmanReadout(gamma, mix, ridge, power, k)
        state = koopman_state.checked(initial_state, tokens, cu_seqlens, chunk_size)
        if mode != "chunk":
            y, state = _prefix(*tokens, mask, state, filter_)
        elif backend != "reference" and normalization == "causal" and _is_step(state, k, cu_seqlens):
            y, state = _step(*tokens, mask, state, filter_)
        else:
            y, state = implementation(*tokens, mask, state, filter_, chunk_size, normalization, cu_seqlens)
    return y.to(v.dtype), state if output_final_state else None


def check_settings(
    ridge: float, power: int, chunk_size: int, refresh: str, normalization: str, mode: str = "chunk"
) -> None:
    """A ValueError for a name or a size that `koopman_attention` does not take."""
    for kind, name, choices in (
        ("mode", mode, MODES), ("refresh", refresh, REFRESHES), ("normalization", normalization, NORMALIZATIONS),
    ):  # fmt: skip
        if name not in choices:
            raise unknown(kind, name, list(choices))
    if chunk_size < 1 or power < 0 or ridge <= 0:
        raise ValueError(f"need chunk_size ≥ 1, power ≥ 0 and ridge > 0; got {chunk_size}, {power}, {ridge}")


def _check(q: Tensor, k: Tensor, v: Tensor, mode: str, mask: Tensor | None, cu_seqlens: Tensor | None) -> None:
    if q.ndim != 4 or k.ndim != 4 or (q.shape[0], *q.shape[2:]) != (k.shape[0], *k.shape[2:]):
        raise ValueError(f"q and k must be [B, T, H, R]; got {tuple(q.shape)} and {tuple(k.shape)}")
    if v.ndim != 4 or v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v must be [B, T, H, P] with B, T, H = {tuple(k.shape[:3])}; got {tuple(v.shape)}")
    if mode == "chunk" and q.shape[1] != k.shape[1]:
        raise ValueError(f"in mode 'chunk' queries and keys have one length; got {q.shape[1]} and {k.shape[1]}")
    if mask is not None and mask.shape != k.shape[:2]:
        raise ValueError(f"mask must be [B, T] = {tuple(k.shape[:2])}; got {tuple(mask.shape)}")
    if mode == "masked" and mask is None:
        raise ValueError("mode 'masked' needs a mask")
    if mode != "chunk" and cu_seqlens is not None:
        raise ValueError(f"packed sequences (cu_seqlens) are for mode 'chunk'; got {mode!r}")
    check_cu_seqlens(cu_seqlens, *k.shape[:2])


class KoopmanReadout:
    """The read-out: γ, μ, ε and K of the op, applied to operators."""

    def __init__(self, gamma: float | Tensor, mix: float | Tensor, ridge: float, power: int, like: Tensor) -> None:
        dtype, heads = compute_dtype(like), like.shape[2]
        self.gamma, self.mix = (
            torch.as_tensor(x, dtype=dtype, device=like.device).expand(heads)[:, None, None] for x in (gamma, mix)
        )
        # μ = 0 as a number reads ridge regression: the powers would be multiplied by 0.
        self.ridge, self.power = ridge, 0 if isinstance(mix, (int, float)) and mix == 0 else power

    def read(self, sums: Sums, q: Tensor, limit: Tensor | None = None) -> Tensor:
        """`sums` of `[n, H, …]`, `q [n, H, S, R]` → `[n, H, S, P]`; `limit [n, H]` replaces the keys' own m²."""
        unit = unit_of(sums.norm if limit is None else limit)[..., None, None]
        settings = self.gamma, self.mix, self.ridge, self.power
        return _Read.apply(sums.gram, sums.transition, sums.values, unit, q, *settings)

    def read_by(self, inverse: Tensor, state: KoopmanState, q: Tensor) -> Tensor:
        """What `q [N, H, S, R]` read from the state by its inverse factor, through which the gradient goes."""
        unit = unit_of(state["norm"])[..., None, None].detach()  # see `invert`
        xs = _powers(lambda b: b @ inverse @ inverse.mT, state["transition"], unit, q, self.gamma, self.power)
        return torch.lerp(xs[0], xs[-1], self.mix) @ state["values"].mT


def _powers(
    solve: Callable[[Tensor], Tensor], transition: Tensor, unit: Tensor, q: Tensor, gamma: Tensor, power: int
) -> list[Tensor]:
    """`[x_0, …, x_K]`: `x_0 = G̃⁻¹ q`, `x_i = γ G̃⁻¹ M x_{i−1}`; `solve` is by `G̃ / m²`.

    Vectors are rows here and below: of one vector a matrix, torch's batched products are up to ten times faster so.
    """
    xs, step = [solve(q / unit)], gamma / unit
    for _ in range(power):
        xs.append(solve(step * (xs[-1] @ transition.mT)))
    return xs


class _Read(torch.autograd.Function):
    """`y = C ((1 − μ) x_0 + μ x_K)`: one factor for all solves, forward and backward, and none through the factor.

    With `b_i` the gradient of what solve i is given (in raw units, `b_i = G̃⁻¹ dx_i`), `dG̃ = −Σ b_i x_iᵀ`,
    `dM = γ Σ b_i x_{i−1}ᵀ`, `dC = dy xᵀ`. m² occurs in `G̃ = G + ε m² I` alone, so that `dm² = ε tr dG̃`.
    """

    @staticmethod
    def forward(ctx, gram, transition, values, unit, q, gamma, mix, ridge: float, power: int) -> Tensor:  # type: ignore[override]
        scaled = gram / unit
        scaled.diagonal(dim1=-2, dim2=-1).add_(ridge)
        factor = cholesky(scaled)
        xs = _powers(lambda b: _solve(factor, b), transition, unit, q, gamma, power)
        ctx.save_for_backward(factor, transition, values, unit, gamma, mix, *xs)
        ctx.ridge = ridge
        return torch.lerp(xs[0], xs[-1], mix) @ values.mT

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):  # type: ignore[override]
        factor, transition, values, unit, gamma, mix, *xs = ctx.saved_tensors
        mixed = dy @ values
        dmix = (mixed * (xs[-1] - xs[0])).sum((0, -2, -1))
        dx, dgamma = mix * mixed, torch.zeros_like(dmix)
        bs = []
        for x in reversed(xs[:-1]):
            bs.append(_solve(factor, dx) / unit)
            dx = bs[-1] @ transition
            dgamma = dgamma + (dx * x).sum((0, -2, -1))
            dx = gamma * dx
        bs.append(_solve(factor, dx + (1 - mix) * mixed) / unit)
        dgram = -torch.cat(bs, -2).mT @ torch.cat(xs[::-1], -2)
        dtransition = gamma * (torch.cat(bs[:-1], -2).mT @ torch.cat(xs[-2::-1], -2)) if len(xs) > 1 else None
        dvalues = dy.mT @ torch.lerp(xs[0], xs[-1], mix)
        dunit = ctx.ridge * dgram.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
        return dgram, dtransition, dvalues, dunit, bs[-1], dgamma[:, None, None], dmix[:, None, None], None, None


def _solve(factor: Tensor, b: Tensor) -> Tensor:
    """`(L Lᵀ)⁻¹` of the rows `b [..., S, R]`; columns are what LAPACK reads, so that nothing is copied."""
    return torch.cholesky_solve(b.mT, factor).mT


JITTER = 1e-4  # of m²
retries = 0  # operators whose Cholesky factorisation failed and was repeated with a larger ridge


def cholesky(gram: Tensor) -> Tensor:
    """Lower factors of `gram [..., R, R]` in units of m²; where one fails, again with ten times the jitter each time.

    Rounding errors of a long sum can exceed the ridge. Every operator that needed it is counted in `retries`.
    """
    global retries
    factor, info = torch.linalg.cholesky_ex(gram)
    jitter, eye = JITTER, torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    while info.any():
        failed = info > 0
        retries += int(failed.sum())
        if jitter > 1 or not gram.isfinite().all():
            raise ValueError("keys of koopman_attention are not finite: their Gram matrix cannot be factorised")
        again, still = torch.linalg.cholesky_ex(gram[failed] + jitter * eye)
        factor, info = factor.clone(), info.clone()
        factor[failed], info[failed] = again, still
        jitter *= 10
    return factor


# ------------------------------------------------------------------------------------------ the modes


def _prefix(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, state: KoopmanState, filter_: KoopmanReadout
) -> tuple[Tensor, KoopmanState]:
    """One operator for all tokens, those of the state included; all queries read it."""
    k, v = koopman_state.with_pending(k, v, mask, state)
    sums = koopman_state.sums(k, v, koopman_state.previous(k, state["last"])).after(state)
    y = filter_.read(sums, q.transpose(1, 2)).transpose(1, 2)
    return y, sums.state(k[:, -1] if k.shape[1] else state["last"], state, commit=True)


@implements(OP, "chunked")
def chunked(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, state: KoopmanState, filter_: KoopmanReadout, chunk_size: int,
    normalization: str, cu_seqlens: Tensor | None,
) -> tuple[Tensor, KoopmanState]:  # fmt: skip
    """An operator a chunk, all in one batch: sums of each chunk, running sums, one factorisation, K + 1 solves."""
    layout = Layout(k, state, chunk_size, cu_seqlens)
    keys = layout.place(koopman_state.masked(k, mask), state["pending_keys"])
    values = layout.place(v, state["pending_values"])
    before = layout.split(layout.before(keys, state["last"]))
    chunks = layout.split(keys)
    entering, leaving = layout.run(chunks, before, layout.split(values), state)
    limit = None if normalization == "causal" else layout.longest(chunks, state)
    queries = layout.split(layout.place(q))
    y = filter_.read(entering, queries.flatten(0, 1), limit).unflatten(0, queries.shape[:2])
    return layout.take(y), layout.final(leaving, keys, values, state)


def _is_step(state: KoopmanState, k: Tensor, cu_seqlens: Tensor | None) -> bool:
    """Whether this is a single token that leaves no chunk of more than one token full."""
    room = state["pending_keys"].shape[1]
    return k.shape[1] == 1 and cu_seqlens is None and (room == 0 or bool((state["pending"] < room).all()))


def _step(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, state: KoopmanState, filter_: KoopmanReadout
) -> tuple[Tensor, KoopmanState]:
    """One token, O(K r²): it reads by the inverse factor of the state, and then waits or is added at once."""
    waits = state["pending_keys"].shape[1] > 0
    inverse = state.get("inverse")
    if waits or inverse is None:
        inverse = koopman_state.inverse_of(state, filter_.ridge, cholesky)
    y = filter_.read_by(inverse, state, q.transpose(1, 2)).transpose(1, 2)
    key, value = koopman_state.masked(k, mask)[:, 0], v[:, 0]
    if waits:
        return y, koopman_state.wait(key, value, state)
    return y, koopman_state.add_token(key, value, state, inverse, filter_.ridge, cholesky)
