"""Linear attention with no, scalar or vector decay.

    S_t = diag(e^{g_t}) S_{t−1} + k_t v_tᵀ,      o_t = S_tᵀ q_t · scale

The update of RetNet, TNL, Mamba-2, GLA, HGRN2, LightNet and Simple Decay (Katharopoulos et al. 2020; the
chunked form after Dao & Gu 2024 and Yang et al. 2024).
"""

from __future__ import annotations

from torch import Tensor

from halflife.ops import recurrent
from halflife.ops.backends.dispatch import dispatch, implements
from halflife.ops.chunked import layout
from halflife.ops.chunked.decays import Grads
from halflife.shapes import Float, Int


def linear_attention(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T H V"],
    g: Float[Tensor, "B T H *K"] | None = None,
    *,
    scale: float | None = None,
    initial_state: Float[Tensor, "N H K V"] | None = None,
    output_final_state: bool = False,
    cu_seqlens: Int[Tensor, " N1"] | None = None,
    chunk_size: int = 64,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Linear attention: `S_t = diag(e^{g_t}) S_{t−1} + k_t v_tᵀ`, `o_t = S_tᵀ q_t · scale`.

    Args:
        q, k: queries and keys `[B, T, H, K]`.
        v: values `[B, T, H, V]`.
        g: log-decay ≤ 0, `[B, T, H]` (one a head) or `[B, T, H, K]` (one a channel); −inf forgets all;
            None is no decay.
        scale: factor of the output; None means `K ** -0.5`.
        initial_state: `[B, H, K, V]`, or `[N, H, K, V]` when packed; None means zeros.
        output_final_state: whether to return the state after the last token.
        cu_seqlens: boundaries `[N + 1]` of N sequences packed along T (then B = 1): 0, …, T.
        chunk_size: tokens a chunk (rounded up to a power of two): speed and memory, not the result.
        backend: "auto", or one of `available_backends("linear_attention")`.

    Returns:
        `o [B, T, H, V]` in v's dtype, and the final state (float32, or float64 for float64 inputs), or None.

    Raises:
        ValueError: a shape does not fit, or the backend cannot run; the message says what would.
    """
    recurrent.check_inputs(q, k, v, g, initial_state, cu_seqlens)
    return dispatch(
        "linear_attention", backend, (q, k, v, g), scale, initial_state, output_final_state, cu_seqlens, chunk_size
    )


@implements("linear_attention", "reference")
def reference(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, scale: float,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, chunk_size: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The definition, token by token."""
    return recurrent.token_loop(_token, (q, k, v), g, scale, initial_state, cu_seqlens)


def _token(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None) -> tuple[Tensor, Tensor]:
    """One token: `state [B, H, K, V]`, `q, k [B, H, K]`, `v [B, H, V]`, `g [B, H, 1 or K]`."""
    if g is not None:
        state = state * g.exp().unsqueeze(-1)
    state = state + k.unsqueeze(-1) * v.unsqueeze(-2)
    return (state * q.unsqueeze(-1)).sum(-2), state


@implements("linear_attention", "chunked")
def chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, scale: float,
    initial_state: Tensor | None, cu_seqlens: Tensor | None, chunk_size: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same by matrix products inside chunks of C tokens, the state carried from chunk to chunk."""
    return layout.run(Block, (q, k, v, g), scale, initial_state, cu_seqlens, chunk_size)


class Block(layout.Block):
    """`o = scores(q, k) V + (e^b q) S` and `S ← e^{b_C} S + (e^{b_C − b} k)ᵀ V` in each chunk."""

    def __init__(self, *args):
        super().__init__(*args)
        self.k, self.v = self.inputs

    def forward(self, state, initial, final):
        entering, state = self.states(state, initial, final)
        o = self.decay.read(self.q, entering)
        return layout.add_product_(o, self.decay.scores(self.q, self.k), self.v), state

    def states(self, state, initial, final=None):
        """The states entering each chunk `[b, H, c, K', V]`, and the one leaving the block."""
        update = self.decay.leaving(self.k).transpose(-1, -2) @ self.v
        return layout.scan(lambda c, s: self.decay.carry(c, s, update[:, :, c]), state, *self.where, initial, final)

    def backward(self, do, state, initial, dstate, dinitial, dfinal):
        q, k, v, decay = self.q, self.k, self.v, self.decay
        entering, _ = self.states(state, initial)
        read = decay.reading(q).transpose(-1, -2) @ do
        leaving, dstate = layout.scan_back(
            lambda c, ds: decay.carry_back(c, ds, read[:, :, c]), dstate, *self.where, dinitial, dfinal
        )
        # The diagonal has weight 1 whatever the decay: left out of what the log-decays' gradient sums.
        dscores, diagonal = layout.split_diagonal(do @ v.transpose(-1, -2))
        scores = decay.scores(q, k)
        dv = scores.transpose(-1, -2) @ do
        dv += decay.leaving(k) @ leaving
        dq, dk, pairs = decay.scores_grad(dscores, q, k, scores)
        dread = decay.reading_grad(do @ entering.transpose(-1, -2))
        dleft = decay.leaving_grad(v @ leaving.transpose(-1, -2))
        dq += decay.fold(dread)
        grads = Grads([(q, dq)], [(k, dk)], [(q, dread)], [(k, dleft)], pairs)
        dg = self.log_grad(grads, entering, leaving)
        dq.addcmul_(diagonal, k).mul_(self.scale)
        dk.addcmul_(diagonal, q).add_(decay.fold(dleft))
        return [dq, dk, dv, dg], dstate
