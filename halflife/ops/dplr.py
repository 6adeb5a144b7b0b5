"""Diagonal plus low rank: a decay, and a rank-one correction of what the state holds.

    S_t = (diag(e^{g_t}) + b_t a_tᵀ) S_{t−1} + k_t v_tᵀ,      o_t = S_tᵀ q_t · scale

RWKV-7 (`a = −κ̂`, `b = κ̂ ⊙ iclr`) and the DPLR study of the Decay paper (§5.6). The delta rule without decay is
`a = −β k, b = k, k ← β k` (Peng et al. 2025; Yang et al. 2024).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from halflife.ops import recurrent
from halflife.ops.backends.dispatch import dispatch, implements
from halflife.ops.chunked import layout
from halflife.ops.chunked.decays import Grads
from halflife.shapes import Float, Int


def dplr(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    a: Float[Tensor, "B T H K"],
    b: Float[Tensor, "B T H K"],
    g: Float[Tensor, "B T H *K"] | None = None,
    *,
    scale: float | None = None,
    initial_state: Float[Tensor, "N H K V"] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Int[Tensor, " N1"] | None = None,
    chunk_size: int = 64,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """DPLR: `S_t = (diag(e^{g_t}) + b_t a_tᵀ) S_{t−1} + k_t v_tᵀ`, `o_t = S_tᵀ q_t · scale`.

    Args:
        q, k: queries and keys `[B, T, H, K]`.
        v: values `[B, T, H, V]`.
        a, b: what the correction reads and where it writes `[B, T, H, K]`; it sees the state before the decay.
            `diag(e^g) + b aᵀ` must not expand, or the state grows without bound.
        g: log-decay ≤ 0, `[B, T, H]` or `[B, T, H, K]`; −inf forgets all but the correction; None is no decay.
        scale: factor of the output; None means `K ** -0.5`.
        initial_state: `[B, H, K, V]`, or `[N, H, K, V]` when packed; None means zeros.
        output_final_state: whether to return the state after the last token.
        cu_seqlens: boundaries `[N + 1]` of N sequences packed along T (then B = 1): 0, …, T.
        chunk_size: tokens a chunk (rounded up to a power of two): speed and memory, not the result.
        backend: "auto", or one of `available_backends("dplr")`.

    Returns:
        `o [B, T, H, V]` in v's dtype, and the final state (float32, or float64 for float64 inputs), or None.

    Raises:
        ValueError: a shape does not fit, or the backend cannot run; the message says what would.
    """
    recurrent.check_inputs(q, k, v, g, initial_state, cu_seqlens)
    for name, x in (("a", a), ("b", b)):
        if x.shape != q.shape:
            raise ValueError(f"{name} must be [B, T, H, K] = {tuple(q.shape)}; got {tuple(x.shape)}")
    return dispatch(
        "dplr", backend, (q, k, v, a, b, g), scale, initial_state, output_final_state, cu_seqlens, chunk_size
    )


@implements("dplr", "reference")
def reference(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, g: Tensor | None, scale: float,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, chunk_size: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The definition, token by token."""
    return recurrent.token_loop(_token, (q, k, v, a, b), g, scale, initial_state, cu_seqlens)


def _token(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, g: Tensor | None
) -> tuple[Tensor, Tensor]:
    """One token: `state [B, H, K, V]`, `q, k, a, b [B, H, K]`, `v [B, H, V]`, `g [B, H, 1 or K]`."""
    correction = (state * a.unsqueeze(-1)).sum(-2)
    if g is not None:
        state = state * g.exp().unsqueeze(-1)
    state = state + b.unsqueeze(-1) * correction.unsqueeze(-2) + k.unsqueeze(-1) * v.unsqueeze(-2)
    return (state * q.unsqueeze(-1)).sum(-2), state


@implements("dplr", "chunked")
def chunked(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, g: Tensor | None, scale: float,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, chunk_size: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same by matrix products and one triangular solve a chunk.

    In a chunk with entering state S, the corrections U (rows u_t = S_{t−1}ᵀ a_t) solve, with c the cumulative
    log-decay,

        (I − L_b) U = L_k V + (e^{c_{i−1}} ⊙ A) S,      L_y[i, j] = Σ_K a_i y_j e^{c_{i−1} − c_j},  j < i,

    so that U = X + Y S with X and Y independent of S.
    """
    return layout.run(_Block, (q, k, v, a, b, g), scale, initial_state, cu_seqlens, chunk_size)


def _earlier(x: Tensor) -> Tensor:
    """Row i of the result is row i + 1 of x, the last one 0: what token i + 1 reads, at the decay of token i."""
    return F.pad(x[..., 1:, :], (0, 0, 0, 1))


def _later(x: Tensor) -> Tensor:
    """The inverse shift: row i is row i − 1 of x, the first one 0."""
    return F.pad(x[..., :-1, :], (0, 0, 1, 0))


class _Block(layout.Block):
    """A block of chunks with the triangular system of each one solved; `a` stands one row earlier than its token."""

    def __init__(self, *args):
        super().__init__(*args)
        self.k, self.v, a, self.b = self.inputs
        decay = self.decay
        self.a, self.first = _earlier(a), a[..., :1, :]
        # e^{c_{i−1}} a_i: the chunk's first token reads the entering state as it is.
        self.read = torch.cat([self.first, decay.reading(self.a)[..., :-1, :]], -2)
        self.inverse = layout.unit_lower_inverse(-_later(decay.scores(self.a, self.b)))
        self.from_keys = _later(decay.scores(self.a, self.k))
        self.x = self.inverse @ (self.from_keys @ self.v)
        self.y = self.inverse @ self.read

    def forward(self, state, initial, final):
        q, decay = self.q, self.decay
        entering, corrected, state = self.states(state, initial, final)
        o = layout.add_product_(decay.read(q, entering), decay.scores(q, self.k), self.v)
        return layout.add_product_(o, decay.scores(q, self.b), corrected), state

    def states(self, state, initial, final=None):
        """The states entering each chunk, the corrections U, and the state leaving the block."""
        update = self.decay.leaving(self.k).transpose(-1, -2) @ self.v
        left = self.decay.leaving(self.b).transpose(-1, -2)
        corrected = torch.empty_like(self.x)

        def step(c: int, s: Tensor) -> Tensor:
            u = torch.add(self.x[:, :, c], self.y[:, :, c] @ s)
            corrected[:, :, c] = u
            return self.decay.carry(c, s, update[:, :, c] + left[:, :, c] @ u)

        entering, state = layout.scan(step, state, *self.where, initial, final)
        return entering, corrected, state

    def backward(self, do, state, initial, dstate, dinitial, dfinal):
        q, k, v, a, b, decay = self.q, self.k, self.v, self.a, self.b, self.decay
        entering, corrected, _ = self.states(state, initial)
        read = decay.reading(q).transpose(-1, -2) @ do
        scores_k, scores_b = decay.scores(q, k), decay.scores(q, b)
        dcorrected = scores_b.transpose(-1, -2) @ do
        left, y = decay.leaving(b), self.y.transpose(-1, -2)

        def step(c: int, ds: Tensor) -> Tensor:
            dcorrected[:, :, c] += left[:, :, c] @ ds
            return decay.carry_back(c, ds, read[:, :, c] + y[:, :, c] @ dcorrected[:, :, c])

        leaving, dstate = layout.scan_back(step, dstate, *self.where, dinitial, dfinal)
        r = self.inverse.transpose(-1, -2) @ dcorrected  # adjoint of the system's right-hand side

        # o = scores(q, k) V + scores(q, b) U + (e^c q) S
        dkeys, diagonal_k = layout.split_diagonal(do @ v.transpose(-1, -2))
        dq, dk, _ = decay.scores_grad(dkeys, q, k, scores_k)
        dscores, diagonal_b = layout.split_diagonal(do @ corrected.transpose(-1, -2))
        dq_b, db, _ = decay.scores_grad(dscores, q, b, scores_b)
        dq += dq_b
        dq += decay.reading_grad(do @ entering.transpose(-1, -2))
        # outgoing state: e^{c_C} S + (e^{c_C − c} k)ᵀ V + (e^{c_C − c} b)ᵀ U
        left_k = decay.leaving_grad(v @ leaving.transpose(-1, -2))
        left_b = decay.leaving_grad(corrected @ leaving.transpose(-1, -2))
        # (I − L_b) U = L_k V + (e^c a) S, with a one row earlier
        dread = r @ entering.transpose(-1, -2)
        da = decay.reading_grad(_earlier(dread))
        diagonals = self._system_grads(r, corrected, da, dk, db)
        grads = Grads([(q, dq), (a, da)], [(k, dk), (b, db)], [], [(k, left_k), (b, left_b)])
        dg = self.log_grad(grads, entering, leaving)
        dq.addcmul_(diagonal_k, k).addcmul_(diagonal_b, b).mul_(self.scale)
        dk.addcmul_(diagonal_k, q).addcmul_(diagonals[0], a).add_(left_k)
        db.addcmul_(diagonal_b, q).addcmul_(diagonals[1], a).add_(left_b)
        da.addcmul_(diagonals[0], k).addcmul_(diagonals[1], b)
        da = torch.cat([dread[..., :1, :], da[..., :-1, :]], -2)
        dv = scores_k.transpose(-1, -2) @ do
        dv += decay.leaving(k) @ leaving
        dv += self.from_keys.transpose(-1, -2) @ r
        return [dq, dk, dv, da, db, dg], dstate

    def _system_grads(self, r, corrected, da, dk, db):
        """What L_k and L_b give: adds their off-diagonal parts to da, dk and db; returns the diagonals of both."""
        diagonals = []
        for read_by, y, dy in ((self.v, self.k, dk), (corrected, self.b, db)):
            dscores, diagonal = layout.split_diagonal(_earlier(r @ read_by.transpose(-1, -2)).tril_())
            more, added, _ = self.decay.scores_grad(dscores, self.a, y, None)
            da += more
            dy += added
            diagonals.append(diagonal)
        return diagonals
