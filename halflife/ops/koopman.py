"""Spectral Koopman attention: ridge regression on the past, read through powers of the keys' own dynamics.

Per head, keys z_t, queries q_t in R^r, values v_t in R^P; an operator is fitted to a set of past tokens:

    G = Σ z zᵀ,   M = Σ z_t z_{t−1}ᵀ,   C = Σ v zᵀ,   G̃ = G + ε m² I,   m = max ‖z‖
    x = G̃⁻¹ q,   x_K = (γ G̃⁻¹ M)^K x,   y = C ((1 − μ) x + μ x_K)

which is the paper's whitened form `C G̃⁻¹ L Â^K L⁻¹ q` without its factors (math.md §5). Raw keys with the ridge ε m²
equal keys divided by m with the ridge ε; m runs over the keys that the operator has seen, so nothing leaks.
Source: Echo, §3.2, Appendices A, F, I.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from halflife.ops import koopman_state
from halflife.ops.koopman_state import KoopmanState, Layout, Sums, blank
from halflife.ops.recurrent import check_cu_seqlens, compute_dtype
from halflife.registry import unknown
from halflife.shapes import Float, Int

MODES = ("chunk", "prefix", "masked")
REFRESHES = ("chunk", "token")
NORMALIZATIONS = ("causal", "sequence")
BACKENDS = ("auto", "chunked", "reference")


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
        backend: "chunked", "reference" (the definition, token by token), or "auto".

    Returns:
        `y [B, T, H, P]` in v's dtype (0 where an operator has seen nothing), and the state or None.

    Raises:
        ValueError: a shape, name or size that does not fit.
    """
    _check(q, k, v, mode, mask, cu_seqlens)
    for kind, name, choices in (
        ("mode", mode, MODES), ("refresh", refresh, REFRESHES), ("normalization", normalization, NORMALIZATIONS),
        ("backend of koopman_attention", backend, BACKENDS),
    ):  # fmt: skip
        if name not in choices:
            raise unknown(kind, name, list(choices))
    if chunk_size < 1 or power < 0 or ridge <= 0:
        raise ValueError(f"need chunk_size ≥ 1, power ≥ 0 and ridge > 0; got {chunk_size}, {power}, {ridge}")
    dtype = compute_dtype(k)
    chunk_size = 1 if refresh == "token" else chunk_size
    with torch.autocast(k.device.type, enabled=False):
        tokens = q.to(dtype), k.to(dtype), v.to(dtype)
        filter_ = Filter(gamma, mix, ridge, power, k)
        state = koopman_state.checked(initial_state, tokens, cu_seqlens, chunk_size)
        if mode != "chunk":
            y, state = _prefix(*tokens, mask, state, filter_)
        elif backend == "reference":
            y, state = reference(*tokens, mask, state, filter_, chunk_size, normalization, cu_seqlens)
        elif refresh == "token" and k.shape[1] == 1 and cu_seqlens is None and mask is None:
            y, state = _step(*tokens, state, filter_)
        else:
            y, state = _chunked(*tokens, mask, state, filter_, chunk_size, normalization, cu_seqlens)
    return y.to(v.dtype), state if output_final_state else None


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


class Filter:
    """The read-out: γ, μ, ε and K of the op, applied to operators."""

    def __init__(self, gamma: float | Tensor, mix: float | Tensor, ridge: float, power: int, like: Tensor) -> None:
        dtype, heads = compute_dtype(like), like.shape[2]
        self.gamma, self.mix = (
            torch.as_tensor(x, dtype=dtype, device=like.device).expand(heads)[:, None, None] for x in (gamma, mix)
        )
        self.ridge, self.power = ridge, power

    def read(self, sums: Sums, q: Tensor, limit: Tensor | None = None) -> Tensor:
        """`sums` of `[n, H, …]`, `q [n, H, R, S]` → `[n, H, P, S]`; `limit [n, H]` replaces the keys' own m²."""
        norm = sums.norm if limit is None else limit
        # In units of m² everything is of order one, whatever the size of the keys; no keys at all read as 0.
        unit = torch.where(norm > 0, norm, 1.0)[..., None, None]
        gram = sums.gram / unit + self.ridge * torch.eye(q.shape[-2], dtype=q.dtype, device=q.device)
        factor = cholesky(gram.detach())
        return self.through(lambda x: _Solve.apply(gram, factor, x), sums.transition / unit, sums.values, q / unit)

    def through(self, solve, transition: Tensor, values: Tensor, q: Tensor) -> Tensor:
        """`values ((1 − μ) x + μ (γ G̃⁻¹ M)^K x)` with `x = solve(q)`."""
        x = first = solve(q)
        for _ in range(self.power):
            x = solve(self.gamma * (transition @ x))
        return values @ torch.lerp(first, x, self.mix)


class _Solve(torch.autograd.Function):
    """`G⁻¹ b` for symmetric G with Cholesky factor L: one factor serves all solves, and no gradient goes through it."""

    @staticmethod
    def forward(ctx, gram: Tensor, factor: Tensor, b: Tensor) -> Tensor:  # type: ignore[override]
        x = torch.cholesky_solve(b, factor)
        ctx.save_for_backward(factor, x)
        return x

    @staticmethod
    def backward(ctx, dx: Tensor):  # type: ignore[override]
        factor, x = ctx.saved_tensors
        db = torch.cholesky_solve(dx, factor)
        return -db @ x.transpose(-1, -2), None, db


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
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, state: KoopmanState, filter_: Filter
) -> tuple[Tensor, KoopmanState]:
    """One operator for all tokens, those of the state included; all queries read it."""
    k, v = koopman_state.with_pending(k, v, mask, state)
    sums = koopman_state.sums(k, v, koopman_state.previous(k, state["last"])).after(state)
    y = filter_.read(sums, q.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    return y, sums.state(k[:, -1] if k.shape[1] else state["last"], state, commit=True)


def _chunked(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, state: KoopmanState, filter_: Filter, chunk_size: int,
    normalization: str, cu_seqlens: Tensor | None,
) -> tuple[Tensor, KoopmanState]:  # fmt: skip
    """An operator a chunk, all in one batch: sums of each chunk, running sums, one factorisation, K + 1 solves."""
    layout = Layout(k, state, chunk_size, cu_seqlens)
    seen = k if mask is None else k * mask[..., None, None].to(k.dtype)
    keys, values = layout.place(seen, state["pending_keys"]), layout.place(v, state["pending_values"])
    before = layout.before(keys, state["last"])
    entering, leaving = layout.run(koopman_state.sums(keys, values, before), state)
    limit = None if normalization == "causal" else layout.longest(keys, state)
    y = filter_.read(entering, layout.place(q).permute(0, 2, 3, 1), limit).permute(0, 3, 1, 2)
    return layout.take(y), layout.final(leaving, keys, values, state)


def _step(q: Tensor, k: Tensor, v: Tensor, state: KoopmanState, filter_: Filter) -> tuple[Tensor, KoopmanState]:
    """One token with an operator a token: the factor of G̃ follows by a rank-one update, O(K r²)."""
    unit = torch.where(state["norm"] > 0, state["norm"], 1.0)[..., None, None]
    factor = state.get("factor")
    if factor is None:
        factor = koopman_state.factorise(state, filter_.ridge, cholesky)
    query = q[:, 0].unsqueeze(-1) / unit
    y = filter_.through(lambda x: torch.cholesky_solve(x, factor), state["transition"] / unit, state["values"], query)
    return y.squeeze(-1).unsqueeze(1), koopman_state.add_token(k[:, 0], v[:, 0], state, factor, filter_.ridge, cholesky)


def reference(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, state: KoopmanState, filter_: Filter, chunk_size: int,
    normalization: str, cu_seqlens: Tensor | None,
) -> tuple[Tensor, KoopmanState]:  # fmt: skip
    """The definition: a loop over sequences and tokens, each with its operator summed up and solved anew."""
    bounds = [0, k.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    outputs, states = [], []
    for i, (start, stop) in enumerate(pairwise(bounds)):
        own = state if cu_seqlens is None else {name: x[i : i + 1] for name, x in state.items()}
        visible = None if mask is None else mask[:, start:stop]
        y, last = _loop(
            q[:, start:stop], k[:, start:stop], v[:, start:stop], visible, own, filter_, chunk_size, normalization
        )
        outputs.append(y)
        states.append(last)
    whole = {name: torch.cat([s[name] for s in states]) for name in blank(k, v, 0, chunk_size)}
    return (torch.cat(outputs, 1) if outputs else torch.zeros_like(v)), whole


def _loop(q, k, v, mask, state, filter_: Filter, chunk_size: int, normalization: str):
    """One row of sequences of equal length whose states hold equally many pending tokens."""
    pending = int(state["pending"].max()) if len(state["pending"]) else 0
    k = k if mask is None else k * mask[..., None, None].to(k.dtype)
    k = torch.cat([state["pending_keys"][:, :pending], k], 1)
    v = torch.cat([state["pending_values"][:, :pending], v], 1)
    before = koopman_state.previous(k, state["last"])
    limit = torch.cat([state["norm"].unsqueeze(1), k.square().sum(-1)], 1).amax(1)

    def upto(stop: int) -> Sums:
        return koopman_state.sums(k[:, :stop], v[:, :stop], before[:, :stop]).after(state)

    rows = []
    for t in range(q.shape[1]):
        sums = upto((pending + t) // chunk_size * chunk_size)
        rows.append(filter_.read(sums, q[:, t].unsqueeze(-1), None if normalization == "causal" else limit).squeeze(-1))
    whole = k.shape[1] // chunk_size * chunk_size
    last = k[:, whole - 1] if whole else state["last"]
    final = upto(whole).state(last, state)
    left = k.shape[1] - whole
    for name, x in (("pending_keys", k), ("pending_values", v)):
        final[name] = torch.cat([x[:, whole:], torch.zeros_like(state[name][:, left:])], 1)
    final["pending"] = torch.full_like(state["pending"], left)
    return (torch.stack(rows, 1) if rows else torch.zeros_like(v[:, :0])), final
