"""The (gated) delta rule: a state that corrects what it already holds for a key.

    S' = diag(e^{g_t}) S_{t−1},      S_t = S' + β_t k_t (v_t − S'ᵀ k_t)ᵀ,      o_t = S_tᵀ q_t · scale

DeltaNet (no decay), Gated DeltaNet (scalar decay; the state decays before the error is formed), and the
vector-decay delta rule (Schlag et al. 2021; Yang et al. 2024, 2025).
"""

from __future__ import annotations

import torch
from torch import Tensor

from halflife.ops import recurrent
from halflife.ops.backends.dispatch import dispatch, implements
from halflife.ops.chunked import layout
from halflife.ops.chunked.decays import Grads
from halflife.shapes import Float, Int


def delta_rule(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    beta: Float[Tensor, "B T H"],
    g: Float[Tensor, "B T H *K"] | None = None,
    *,
    scale: float | None = None,
    initial_state: Float[Tensor, "N H K V"] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Int[Tensor, " N1"] | None = None,
    chunk_size: int = 64,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """The delta rule: `S' = diag(e^{g_t}) S_{t−1}`, `S_t = S' + β_t k_t (v_t − S'ᵀ k_t)ᵀ`, `o_t = S_tᵀ q_t · scale`.

    Args:
        q, k: queries and keys `[B, T, H, K]`; keys of norm 1 (or β‖k‖² < 2) keep the recurrence stable.
        v: values `[B, T, H, V]`.
        beta: writing strength `[B, T, H]`, in [0, 1] (in [0, 2] for negative eigenvalues).
        g: log-decay ≤ 0, `[B, T, H]` or `[B, T, H, K]`; −inf forgets all; None is no decay.
        scale: factor of the output; None means `K ** -0.5`.
        initial_state: `[B, H, K, V]`, or `[N, H, K, V]` when packed; None means zeros.
        output_final_state: whether to return the state after the last token.
        cu_seqlens: boundaries `[N + 1]` of N sequences packed along T (then B = 1): 0, …, T.
        chunk_size: tokens a chunk (rounded up to a power of two): speed and memory, not the result.
        backend: "auto", or one of `available_backends("delta_rule")`.

    Returns:
        `o [B, T, H, V]` in v's dtype, and the final state (float32, or float64 for float64 inputs), or None.

    Raises:
        ValueError: a shape does not fit, or the backend cannot run; the message says what would.
    """
    recurrent.check_inputs(q, k, v, g, initial_state, cu_seqlens)
    if beta.shape != q.shape[:3]:
        raise ValueError(f"beta must be [B, T, H] = {tuple(q.shape[:3])}; got {tuple(beta.shape)}")
    return dispatch(
        "delta_rule", backend, (q, k, v, beta, g), scale, initial_state, output_final_state, cu_seqlens, chunk_size
    )


@implements("delta_rule", "reference")
def reference(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, scale: float,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, chunk_size: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The definition, token by token."""
    return recurrent.token_loop(_token, (q, k, v, beta), g, scale, initial_state, cu_seqlens)


def _token(state: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None) -> tuple[Tensor, Tensor]:
    """One token: `state [B, H, K, V]`, `q, k [B, H, K]`, `v [B, H, V]`, `beta [B, H]`, `g [B, H, 1 or K]`."""
    if g is not None:
        state = state * g.exp().unsqueeze(-1)
    error = v - (state * k.unsqueeze(-1)).sum(-2)
    state = state + k.unsqueeze(-1) * (beta.unsqueeze(-1) * error).unsqueeze(-2)
    return (state * q.unsqueeze(-1)).sum(-2), state


@implements("delta_rule", "chunked")
def chunked(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None, scale: float,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, chunk_size: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same by matrix products and one triangular solve a chunk.

    In a chunk with entering state S the written values U (rows u_t, so that S_t gains k_t u_tᵀ) solve

        (I + L) U = β ⊙ (V − (e^b ⊙ K) S),      L_ij = β_i (k_i · k_j) e^{b_i − b_j},  j < i,

    so that U = X − Y S with (I + L) [X, Y] = β ⊙ [V, e^b ⊙ K], which does not depend on S.
    """
    return layout.run(Block, (q, k, v, beta, g), scale, initial_state, cu_seqlens, chunk_size)


class Block(layout.Block):
    """A block of chunks with the triangular system of each one solved."""

    def __init__(self, *args):
        super().__init__(*args)
        self.k, self.v, beta = self.inputs
        self.beta = beta.unsqueeze(-1)
        self.overlap = self.decay.scores(self.k, self.k).tril_(-1)  # (k_i · k_j) e^{b_i − b_j}
        # One solve against the identity costs a third of one against [V, K] (docs/log.md).
        self.inverse = layout.unit_lower_inverse(self.beta * self.overlap)
        self.x = self.inverse @ (self.beta * self.v)
        self.y = self.inverse @ (self.beta * self.decay.reading(self.k))

    def forward(self, state, initial, final):
        entering, written, state = self.states(state, initial, final)
        o = self.decay.read(self.q, entering)
        return layout.add_product_(o, self.decay.scores(self.q, self.k), written), state

    def states(self, state, initial, final=None):
        """The states entering each chunk, the values written, and the state leaving the block."""
        left = self.decay.leaving(self.k).transpose(-1, -2)
        written = torch.empty_like(self.x)

        def step(c: int, s: Tensor) -> Tensor:
            u = torch.sub(self.x[:, :, c], self.y[:, :, c] @ s)
            written[:, :, c] = u
            return self.decay.carry(c, s, left[:, :, c] @ u)

        entering, state = layout.scan(step, state, *self.where, initial, final)
        return entering, written, state

    def backward(self, do, state, initial, dstate, dinitial, dfinal):
        q, k, v, beta, decay = self.q, self.k, self.v, self.beta, self.decay
        entering, written, _ = self.states(state, initial)
        scores = decay.scores(q, k)
        read = decay.reading(q).transpose(-1, -2) @ do
        dwritten = scores.transpose(-1, -2) @ do
        left, y = decay.leaving(k), self.y.transpose(-1, -2)

        def step(c: int, ds: Tensor) -> Tensor:
            dwritten[:, :, c] += left[:, :, c] @ ds
            return decay.carry_back(c, ds, read[:, :, c] - y[:, :, c] @ dwritten[:, :, c])

        leaving, dstate = layout.scan_back(step, dstate, *self.where, dinitial, dfinal)

        # o = scores(q, k) U + (e^b q) S
        dscores, diagonal = layout.split_diagonal(do @ written.transpose(-1, -2))
        dq, dk, pairs = decay.scores_grad(dscores, q, k, scores)
        dread = decay.reading_grad(do @ entering.transpose(-1, -2))
        # outgoing state: e^{b_C} S + (e^{b_C − b} k)ᵀ U
        dleft = decay.leaving_grad(written @ leaving.transpose(-1, -2))
        # (I + L) U = β (V − (e^b k) S): the adjoint r of U's system gives all the rest
        r = self.inverse.transpose(-1, -2) @ dwritten
        dkey = decay.reading_grad(r @ entering.transpose(-1, -2)).neg_()
        dsystem = (r @ written.transpose(-1, -2)).neg_().tril_(-1)
        dbeta = (r * v).sum(-1) + (decay.fold(dkey) * k).sum(-1) + (dsystem * self.overlap).sum(-1)
        drow, dcol, system_pairs = decay.scores_grad(dsystem.mul_(beta), k, k, self.overlap)
        dkey.mul_(beta)
        dq += decay.fold(dread)
        drow += decay.fold(dkey)
        dk += dcol
        if pairs is not None:
            pairs += system_pairs
        grads = Grads([(q, dq), (k, drow)], [(k, dk)], [(q, dread), (k, dkey)], [(k, dleft)], pairs)
        dg = self.log_grad(grads, entering, leaving)
        dq.addcmul_(diagonal, k).mul_(self.scale)
        dk.addcmul_(diagonal, q).add_(decay.fold(dleft)).add_(drow)
        return [dq, dk, r.mul_(beta), dbeta, dg], dstate
