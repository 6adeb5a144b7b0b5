"""The (gated) delta rule: a state that corrects the value it already holds for a key.

    S' = diag(e^{g_t}) S_{t−1},      S_t = S' + β_t k_t (v_t − S'ᵀ k_t)ᵀ,      o_t = S_tᵀ q_t · scale

DeltaNet has no decay, and Gated DeltaNet a scalar one. A vector decay is allowed too. The state decays before the error
is formed. Sources: Schlag et al. 2021; Yang et al. 2024, 2025.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halflife.ops.backends import fla, native, triton
from halflife.ops.backends.dispatch import dispatch, implements, steps_by
from halflife.ops.call import Call
from halflife.ops.chunked import blocks
from halflife.ops.chunked.decays import DecayGrads
from halflife.ops.recurrent import token_loop
from halflife.ops.slow_decay import decay_and_add, split_decay
from halflife.ops.spec import define
from halflife.packing import Packing

define(
    "delta_rule", q="B T G K", k="B T G K", v="B T H V", beta="B T H", g="B T H | B T H K | None", state="N H K V",
    log_decays=["g"],
)  # fmt: skip


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None = None, *,
    scale: float | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
    cu_seqlens: Tensor | Packing | None = None, chunk_size: int = 64, backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The delta rule: `S' = diag(e^{g_t}) S_{t−1}`, `S_t = S' + β_t k_t (v_t − S'ᵀ k_t)ᵀ`, `o_t = S_tᵀ q_t · scale`.

    Args:
        q, k: queries and keys `[B, T, G, K]`. H is a multiple of G, and head h reads group h // (H / G). Keys of norm 1
            (or β‖k‖² < 2) keep the recurrence stable.
        v: values `[B, T, H, V]`.
        beta: writing strength `[B, T, H]` in [0, 1], or in [0, 2] for negative eigenvalues of the transition.
        g: log-decay ≤ 0, `[B, T, H]` or `[B, T, H, K]`. −inf erases the state; None is no decay.
        scale: factor of the output; None means `K ** -0.5`.
        initial_state: `[B, H, K, V]`, or `[N, H, K, V]` when packed; None means zeros.
        output_final_state: whether to return the state after the last token.
        cu_seqlens: boundaries `[N + 1]` of N sequences packed along T (then B = 1): 0, …, T.
        chunk_size: tokens a chunk, rounded up to a power of two. It changes speed and memory, not the result.
        backend: "auto", or one of `available_backends("delta_rule")`.

    Returns:
        `o [B, T, H, V]` in v's dtype, and the final state (float32, or float64 for float64 inputs), or None.

    Raises:
        ValueError: a shape does not fit, a log-decay is positive (see `arguments.check_decay`), or the backend cannot
            run; the message names the backends that can.
    """
    return dispatch(
        "delta_rule", {"q": q, "k": k, "v": v, "beta": beta, "g": g}, initial_state, cu_seqlens, backend,
        output_final_state, scale=scale, chunk_size=chunk_size,
    )  # fmt: skip


implements("delta_rule", "triton", triton.run, why_not=triton.why_not)
implements("delta_rule", "fla", fla.delta_rule, why_not=fla.why_not)
implements("delta_rule", "native", native.run, why_not=native.why_not, steps=True)
steps_by("delta_rule", "triton", triton.run_step, triton.why_not_step)


@implements("delta_rule", "reference")
def reference(call: Call) -> tuple[Tensor, Tensor]:
    """The definition, token by token."""
    return token_loop(_token, call, call["beta"])


def _token(state: Tensor, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None) -> tuple[Tensor, Tensor]:
    """One token: `state [B, H, K, V]`, `q, k [B, H, K]`, `v [B, H, V]`, `beta [B, H]`, `g [B, H, 1 or K]`."""
    error, held = v, k
    if g is not None:  # S'ᵀ k = Sᵀ (change ⊙ k) + Sᵀ (kept ⊙ k); the small part is subtracted first, so that it counts
        kept, change = split_decay(g)
        error, held = v - (state * (change * k).unsqueeze(-1)).sum(-2), kept * k
    error = error - (state * held.unsqueeze(-1)).sum(-2)
    state = decay_and_add(state, g, k.unsqueeze(-1) * (beta.unsqueeze(-1) * error).unsqueeze(-2))
    return (state * q.unsqueeze(-1)).sum(-2), state


@implements("delta_rule", "chunked")
def chunked(call: Call) -> tuple[Tensor, Tensor]:
    """The chunked form: matrix products and one triangular solve a chunk.

    In a chunk with entering state S, token t adds `k_t u_tᵀ` to the state. The written values U (rows u_t) solve

        (I + L) U = β ⊙ (V − (e^b ⊙ K) S),      L_ij = β_i (k_i · k_j) e^{b_i − b_j},  j < i.

    Therefore `U = X − Y S` with `(I + L) [X, Y] = β ⊙ [V, e^b ⊙ K]`, and X and Y do not depend on S.
    """
    return blocks.run(DeltaBlock, (call["q"], call["k"], call["v"], call["beta"], call["g"]), call)


class DeltaBlock(blocks.ChunkBlock):
    """A block of chunks. It solves the triangular system of each chunk when it is made."""

    def __init__(self, *args):
        super().__init__(*args)
        self.k, self.v, beta = self.inputs
        self.beta = beta.unsqueeze(-1)
        self.overlap = self.decay.scores(self.k, self.k).tril_(-1)  # (k_i · k_j) e^{b_i − b_j}
        # One solve against the identity costs a third of one against [V, K] (docs/log.md).
        self.inverse = blocks.unit_lower_inverse(self.beta * self.overlap)
        self.x = self.inverse @ (self.beta * self.v)
        self.y = self.inverse @ (self.beta * self.decay.weight_queries(self.k))

    def forward(self, state, initial, final):
        entering, written, state = self.states(state, initial, final)
        o = self.decay.read_state(self.q, entering)
        return blocks.add_product_(o, self.decay.scores(self.q, self.k), written), state

    def states(self, state, initial, final=None):
        """The states entering each chunk, the values written, and the state leaving the block."""
        keys = self.decay.weight_keys(self.k).transpose(-1, -2)
        written = torch.empty_like(self.x)

        def step(c: int, s: Tensor) -> Tensor:
            u = torch.sub(self.x[:, :, c], self.y[:, :, c] @ s)
            written[:, :, c] = u
            return self.decay.carry(c, s, keys[:, :, c] @ u)

        entering, state = blocks.scan(step, state, self.place, initial, final)
        return entering, written, state

    def backward(self, do, state, initial, dstate, dinitial, dfinal):
        q, k, v, beta, decay = self.q, self.k, self.v, self.beta, self.decay
        entering, written, _ = self.states(state, initial)
        scores = decay.scores(q, k)
        update = decay.weight_queries(q).transpose(-1, -2) @ do
        dwritten = scores.transpose(-1, -2) @ do
        keys, y = decay.weight_keys(k), self.y.transpose(-1, -2)

        def step(c: int, ds: Tensor) -> Tensor:
            dwritten[:, :, c] += keys[:, :, c] @ ds
            return decay.carry_back(c, ds, update[:, :, c] - y[:, :, c] @ dwritten[:, :, c])

        leaving, dstate = blocks.scan_back(step, dstate, self.place, dinitial, dfinal)

        # o = scores(q, k) U + (e^b q) S
        dscores, diagonal = blocks.split_diagonal(do @ written.transpose(-1, -2))
        dq, dk, dlog_scores = decay.scores_grad(dscores, q, k, scores)
        dread = decay.weight_queries_grad(do @ entering.transpose(-1, -2))
        # outgoing state = e^{b_C} S + (e^{b_C − b} k)ᵀ U
        dwrite = decay.weight_keys_grad(written @ leaving.transpose(-1, -2))
        # (I + L) U = β (V − (e^b k) S): the adjoint r of this system gives all other gradients
        r = self.inverse.transpose(-1, -2) @ dwritten
        dkey_read = decay.weight_queries_grad(r @ entering.transpose(-1, -2)).neg_()
        dsystem = (r @ written.transpose(-1, -2)).neg_().tril_(-1)
        dbeta = (r * v).sum(-1) + (decay.sum_over_states(dkey_read) * k).sum(-1) + (dsystem * self.overlap).sum(-1)
        drow, dcol, dlog_system = decay.scores_grad(dsystem.mul_(beta), k, k, self.overlap)
        dkey_read.mul_(beta)
        dq += decay.sum_over_states(dread)
        drow += decay.sum_over_states(dkey_read)
        dk += dcol
        if dlog_scores is not None:
            dlog_scores += dlog_system
        grads = DecayGrads([(q, dq), (k, drow)], [(k, dk)], [(q, dread), (k, dkey_read)], [(k, dwrite)], dlog_scores)
        dg = self.log_grad(grads, entering, leaving)
        dq.addcmul_(diagonal, k).mul_(self.scale)
        dk.addcmul_(diagonal, q).add_(decay.sum_over_states(dwrite)).add_(drow)
        return [dq, dk, r.mul_(beta), dbeta, dg], dstate
