"""DPLR, diagonal plus low rank: a decay and a rank-one correction of the state.

    S_t = (diag(e^{g_t}) + b_t a_tᵀ) S_{t−1} + k_t v_tᵀ,      o_t = S_tᵀ q_t · scale

RWKV-7 uses it with `a = −κ̂`, `b = κ̂ ⊙ iclr` (Peng et al. 2025), and the Decay paper studies it (§5.6). The delta rule
without decay is the case `a = −β k, b = k, k ← β k` (Yang et al. 2024). Those of Gated DeltaNet-2 and of Comba are
passes here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halflife.ops.backends import fla, native, triton
from halflife.ops.backends.dispatch import dispatch, implements, implements_pass, run_gpu_pass, steps_by
from halflife.ops.call import Call
from halflife.ops.chunked import blocks
from halflife.ops.chunked.decays import DecayGrads
from halflife.ops.chunked.groups import each_head
from halflife.ops.fused import l2_normalize, launch
from halflife.ops.recurrent import token_loop
from halflife.ops.slow_decay import decay_and_add
from halflife.ops.spec import define
from halflife.packing import Packing
from halflife.precision import ROOMY

define(
    "dplr", q="B T G K", k="B T G K", v="B T H V", a="B T H K", b="B T H K | None", g="B T H | B T H K | None",
    state="N H K V", log_decays=["g"],
)  # fmt: skip


def dplr(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor | None = None, g: Tensor | None = None, *,
    scale: float | None = None, initial_state: Tensor | None = None, output_final_state: bool = False,
    cu_seqlens: Tensor | Packing | None = None, chunk_size: int = 64, backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """DPLR: `S_t = (diag(e^{g_t}) + b_t a_tᵀ) S_{t−1} + k_t v_tᵀ`, `o_t = S_tᵀ q_t · scale`.

    Args:
        q, k: queries and keys `[B, T, G, K]`. H is a multiple of G, and head h reads group h // (H / G).
        v: values `[B, T, H, V]`.
        a, b: vectors of the correction `[B, T, H, K]`. It reads the state with a, before the decay, and writes with b;
            None is k. The norm of `diag(e^g) + b aᵀ` must be at most 1, or the state grows without bound. A chunk forms
            the products of the corrections of its tokens. If these overflow, its outputs are NaN even from a state of
            zeros and values of zeros, which only "reference" leaves at 0.
        g: log-decay ≤ 0, `[B, T, H]` or `[B, T, H, K]`. −inf erases all but the correction; None is no decay.
        scale: factor of the output; None means `K ** -0.5`.
        initial_state: `[B, H, K, V]`, or `[N, H, K, V]` when packed; None means zeros.
        output_final_state: whether to return the state after the last token.
        cu_seqlens: boundaries `[N + 1]` of N sequences packed along T (then B = 1): 0, …, T.
        chunk_size: tokens a chunk, rounded up to a power of two. It changes speed and memory, not the result.
        backend: "auto", or one of `available_backends("dplr")`.

    Returns:
        `o [B, T, H, V]` in v's dtype, and the final state (float32, or float64 for float64 inputs), or None.

    Raises:
        ValueError: a shape does not fit, a log-decay is positive (see `arguments.check_decay`), or the backend cannot
            run; the message names the backends that can.
    """
    return dispatch(
        "dplr", {"q": q, "k": k, "v": v, "a": a, "b": b, "g": g}, initial_state, cu_seqlens, backend,
        output_final_state, scale=scale, chunk_size=chunk_size,
    )  # fmt: skip


def _with_b(run: Callable[[Call], Any]) -> Callable[[Call], Any]:
    """Give a call the b that it may lack, for an implementation that needs it."""

    @functools.wraps(run)
    def filled(call: Call) -> Any:
        if call["b"] is not None:
            return run(call)
        k = call["k"]  # as a view, since torch.compile refuses an autograd function that gets one tensor twice
        return run(call.with_tensors(b=each_head(k.view_as(k), call.sizes["H"], dim=2)))

    return filled


implements("dplr", "triton", triton.run_dplr, why_not=triton.why_not)
implements("dplr", "fla", _with_b(fla.dplr), why_not=fla.why_not)
implements("dplr", "native", _with_b(native.run), why_not=native.why_not, steps=True)
steps_by("dplr", "triton", _with_b(triton.run_step), triton.why_not_step)


@implements("dplr", "reference")
@_with_b
def reference(call: Call) -> tuple[Tensor, Tensor]:
    """The definition, token by token."""
    return token_loop(_token, call, call["a"], call["b"])


def _token(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, g: Tensor | None
) -> tuple[Tensor, Tensor]:
    """One token: `state [B, H, K, V]`, `q, k, a, b [B, H, K]`, `v [B, H, V]`, `g [B, H, 1 or K]`."""
    correction = (state * a.unsqueeze(-1)).sum(-2)
    update = b.unsqueeze(-1) * correction.unsqueeze(-2) + k.unsqueeze(-1) * v.unsqueeze(-2)
    state = decay_and_add(state, g, update)
    return (state * q.unsqueeze(-1)).sum(-2), state


@implements("dplr", "chunked")
@_with_b
def chunked(call: Call) -> tuple[Tensor, Tensor]:
    """The chunked form: matrix products and one triangular solve a chunk.

    In a chunk with entering state S and cumulative log-decay c, the corrections U (rows u_t = S_{t−1}ᵀ a_t) solve

        (I − L_b) U = L_k V + (e^{c_{i−1}} ⊙ A) S,      L_y[i, j] = Σ_K a_i y_j e^{c_{i−1} − c_j},  j < i.

    Therefore `U = X + Y S`, and X and Y do not depend on S.
    """
    return blocks.run(DPLRBlock, (call["q"], call["k"], call["v"], call["a"], call["b"], call["g"]), call)


def _earlier(x: Tensor) -> Tensor:
    """Move every row to the row before it; the last row becomes 0. Token i + 1 reads with the decay up to token i."""
    return F.pad(x[..., 1:, :], (0, 0, 0, 1))


def _later(x: Tensor) -> Tensor:
    """Move every row to the row after it; the first row becomes 0."""
    return F.pad(x[..., :-1, :], (0, 0, 1, 0))


class DPLRBlock(blocks.ChunkBlock):
    """A block of chunks. It solves the triangular system of each chunk when it is made.

    `self.a` holds the vector a of each token in the row of the token before it.
    """

    def __init__(self, *args):
        super().__init__(*args)
        self.k, self.v, a, self.b = self.inputs
        decay = self.decay
        self.a = _earlier(a)
        # e^{c_{i−1}} a_i: the first token of the chunk reads the entering state without decay.
        weighted = torch.cat([a[..., :1, :], decay.weight_queries(self.a)[..., :-1, :]], -2)
        self.inverse = blocks.unit_lower_inverse(-_later(decay.scores(self.a, self.b)))
        self.from_keys = _later(decay.scores(self.a, self.k))
        self.x = self.inverse @ (self.from_keys @ self.v)
        self.y = self.inverse @ weighted

    def forward(self, state, initial, final):
        q, decay = self.q, self.decay
        entering, corrected, state = self.states(state, initial, final)
        o = blocks.add_product_(decay.read_state(q, entering), decay.scores(q, self.k), self.v)
        return blocks.add_product_(o, decay.scores(q, self.b), corrected), state

    def states(self, state, initial, final=None):
        """The states entering each chunk, the corrections U, and the state leaving the block."""
        update = self.decay.weight_keys(self.k).transpose(-1, -2) @ self.v
        keys = self.decay.weight_keys(self.b).transpose(-1, -2)
        corrected = torch.empty_like(self.x)

        def step(c: int, s: Tensor) -> Tensor:
            u = torch.add(self.x[:, :, c], self.y[:, :, c] @ s)
            corrected[:, :, c] = u
            return self.decay.carry(c, s, update[:, :, c] + keys[:, :, c] @ u)

        entering, state = blocks.scan(step, state, self.place, initial, final)
        return entering, corrected, state

    def backward(self, do, state, initial, dstate, dinitial, dfinal):
        q, k, v, a, b, decay = self.q, self.k, self.v, self.a, self.b, self.decay
        entering, corrected, _ = self.states(state, initial)
        update = decay.weight_queries(q).transpose(-1, -2) @ do
        scores_k, scores_b = decay.scores(q, k), decay.scores(q, b)
        dcorrected = scores_b.transpose(-1, -2) @ do
        keys, y = decay.weight_keys(b), self.y.transpose(-1, -2)

        def step(c: int, ds: Tensor) -> Tensor:
            dcorrected[:, :, c] += keys[:, :, c] @ ds
            return decay.carry_back(c, ds, update[:, :, c] + y[:, :, c] @ dcorrected[:, :, c])

        leaving, dstate = blocks.scan_back(step, dstate, self.place, dinitial, dfinal)
        r = self.inverse.transpose(-1, -2) @ dcorrected  # adjoint of the system's right-hand side

        # o = scores(q, k) V + scores(q, b) U + (e^c q) S
        dscores, diagonal_k = blocks.split_diagonal(do @ v.transpose(-1, -2))
        dq, dk, _ = decay.scores_grad(dscores, q, k, scores_k)
        dscores, diagonal_b = blocks.split_diagonal(do @ corrected.transpose(-1, -2))
        dq_b, db, _ = decay.scores_grad(dscores, q, b, scores_b)
        dq += dq_b
        dq += decay.weight_queries_grad(do @ entering.transpose(-1, -2))
        # outgoing state = e^{c_C} S + (e^{c_C − c} k)ᵀ V + (e^{c_C − c} b)ᵀ U
        written_k = decay.weight_keys_grad(v @ leaving.transpose(-1, -2))
        written_b = decay.weight_keys_grad(corrected @ leaving.transpose(-1, -2))
        # (I − L_b) U = L_k V + (e^c a) S, where a stands one row earlier
        dread = r @ entering.transpose(-1, -2)
        da = decay.weight_queries_grad(_earlier(dread))
        diagonals = self._system_grads(r, corrected, da, dk, db)
        grads = DecayGrads([(q, dq), (a, da)], [(k, dk), (b, db)], [], [(k, written_k), (b, written_b)])
        dg = self.log_grad(grads, entering, leaving)
        dq.addcmul_(diagonal_k, k).addcmul_(diagonal_b, b).mul_(self.scale)
        dk.addcmul_(diagonal_k, q).addcmul_(diagonals[0], a).add_(written_k)
        db.addcmul_(diagonal_b, q).addcmul_(diagonals[1], a).add_(written_b)
        da.addcmul_(diagonals[0], k).addcmul_(diagonals[1], b)
        da = torch.cat([dread[..., :1, :], da[..., :-1, :]], -2)
        dv = scores_k.transpose(-1, -2) @ do
        dv += decay.weight_keys(k) @ leaving
        dv += self.from_keys.transpose(-1, -2) @ r
        return [dq, dk, dv, da, db, dg], dstate

    def _system_grads(self, r, corrected, da, dk, db):
        """Add the gradients from L_k and L_b, without their diagonals, to da, dk and db; return both diagonals."""
        diagonals = []
        for values, y, dy in ((self.v, self.k, dk), (corrected, self.b, db)):
            dscores, diagonal = blocks.split_diagonal(_earlier(r @ values.transpose(-1, -2)).tril_())
            da_part, dy_part, _ = self.decay.scores_grad(dscores, self.a, y, None)
            da += da_part
            dy += dy_part
            diagonals.append(diagonal)
        return diagonals


def erase_write(
    erase: Tensor, write: Tensor, k: Tensor, v: Tensor, g: Tensor, most: float = 1.0, backend: str = "auto"
) -> tuple[Tensor, Tensor]:
    """What reads the state in Gated DeltaNet-2, `a = −most σ(erase) ⊙ k ⊙ e^g`, and its values `σ(write) ⊙ v`.

    Source: github.com/NVlabs/GatedDeltaNet-2.

    Args:
        erase, write: logits `[B, T, H·K]` and `[B, T, H·V]`.
        k, v: keys `[B, T, H, K]` and values `[B, T, H, V]`.
        g: log-decays, `[B, T, H]` or `[B, T, H, K]`.
        most: the limit of the erase gate.
        backend: "auto", or one of `available_backends("erase_write")`.

    Returns:
        Both in the dtypes of k and v.
    """
    return run_gpu_pass("erase_write", _erase_write, backend, (erase, write, k, v, g), most)


def _erase_write(erase: Tensor, write: Tensor, k: Tensor, v: Tensor, g: Tensor, most: float) -> tuple[Tensor, Tensor]:
    decay = (g.exp() if g.ndim == k.ndim else g.exp().unsqueeze(-1)).to(k.dtype)
    erase, write = erase.sigmoid().view_as(k), write.sigmoid().view_as(v)
    return -(erase if most == 1 else most * erase) * k * decay, write * v


def feedback_keys(
    q: Tensor, k: Tensor, logits: Tensor, share: Tensor, output: Tensor, most: float = 1.0, apart: bool = False,
    dtype: torch.dtype | None = None, backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Comba's queries `norm(q − d s k)`, keys `β norm(k)`, and what reads the state, `−s norm(k)`.

    Here `β = most · σ(logits)`, `s = σ(share)` and d is `output`. Source: Hu et al. 2025, "Comba".

    Args:
        q, k: `[B, T, H, K]`.
        logits: `[B, T, H]`.
        share, output: `[H]`.
        most: the limit of β.
        apart: whether `−norm(s k)` reads the state.
        dtype: that of the results, or None for that of q.
        backend: "auto", or one of `available_backends("feedback_keys")`.

    Returns:
        All three, `[B, T, H, K]`.
    """
    plain = functools.partial(_feedback_keys, backend=backend)
    return run_gpu_pass("feedback_keys", plain, backend, (q, k, logits, share, output), most, apart, dtype)


def _feedback_keys(
    q: Tensor, k: Tensor, logits: Tensor, share: Tensor, output: Tensor, most: float, apart: bool,
    dtype: torch.dtype | None, backend: str = "chunked",
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dtype, share = dtype or q.dtype, share.sigmoid().unsqueeze(-1)
    parts = q - output.unsqueeze(-1) * share * k, k, *([share * k] if apart else [])
    q, k, *read = (l2_normalize(part.to(ROOMY[part.dtype]), backend=backend) for part in parts)
    beta = logits.to(ROOMY[logits.dtype]).sigmoid().unsqueeze(-1)
    found = q, (beta if most == 1 else most * beta) * k, -(read[0] if read else share * k)
    return found[0].to(dtype), found[1].to(dtype), found[2].to(dtype)


def _launch_feedback(*given: Any) -> Any:
    *tensors, most, apart, dtype = given
    return launch("feedback_keys", *tensors, most, apart, dtype or tensors[0].dtype)


def _why_not(op: str, device: torch.device, tensors: Any = None) -> str | None:
    """The `why_not` of Triton kernels that have all channels of a head in one program."""
    if tensors is not None:
        if op == "erase_write" and tensors[4].ndim == 3:
            return "the Triton kernel of erase_write takes a vector decay"
        if (wide := triton.too_wide(op, max(x.shape[-1] for x in tensors if x.ndim == 4))) is not None:
            return wide
    return triton.why_not_pass(op, device, tensors)


define(
    "erase_write", erase="B T D", write="B T D", k="B T H K", v="B T H V", g="B T H K | B T H", log_decays=["g"],
    settings={"most": 1.0},
)  # fmt: skip
define(
    "feedback_keys", q="B T H K", k="B T H K", logits="B T H", share="H", output="H",
    settings={"most": 1.0, "apart": False, "dtype": None},
)  # fmt: skip
implements_pass("erase_write", _erase_write, triton=(functools.partial(launch, "erase_write"), _why_not))
implements_pass("feedback_keys", _feedback_keys, triton=(_launch_feedback, _why_not))
