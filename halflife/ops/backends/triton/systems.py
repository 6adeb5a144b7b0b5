"""The triangular systems of the delta rule as Triton kernels, and the walk over the chunks.

In a chunk with entering state S, token t adds `k_t u_tᵀ` to the state. The written values U (rows u_t) solve

    (I + L) U = β ⊙ (V − (w ⊙ K) S),      L_ij = β_i (k_i · k_j) D_ij,  j < i,

with D and the weights w of `gates.py`. `solve` inverts I + L in all chunks at once, so that `U = X − Y S`. `walk` goes
from chunk to chunk, and runs in parallel over heads, sequences and columns of the state.

Inverses, X, Y, U and states are float32, also for bfloat16 and float16 inputs. Products with them have the precision of
`gates.precision_of`. The inverse is computed exactly, because an error in one of its rows would spread to all later
rows.
"""

from __future__ import annotations

from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from halflife.ops.backends.triton.gates import (
    GATE_RANK,
    Chunks,
    Gates,
    carry_weights,
    chunk_rows,
    decay_matrix,
    dot,
    leave_weights,
    load_gates,
    mode_of,
    precision_of,
    put,
    read_weights,
    shared_rows,
    tile,
    tuned,
)
from halflife.ops.backends.triton.launch import launch
from halflife.ops.backends.triton.segments import block


@triton.jit
@no_type_check
def unit_lower_inverse(lower, C: tl.constexpr):
    """Compute `(I + L)⁻¹` of a strictly lower triangular `L [C, C]` by forward substitution.

    The blocks of 16 on the diagonal are inverted first, row by row and all at once, then blocks of 32, then of 64. The
    products are small, because exact products use no tensor cores.
    """
    BLOCKS: tl.constexpr = C // 16
    at = tl.arange(0, BLOCKS)
    diagonal = at[:, None, None, None] == at[None, None, :, None]
    small = tl.sum(tl.where(diagonal, tl.reshape(lower, [BLOCKS, 16, BLOCKS, 16]), 0.0), 2)
    row = tl.arange(0, 16)
    eye = tl.where(row[:, None] == row[None, :], 1.0, 0.0)
    inverse = tl.broadcast_to(eye[None, :, :], [BLOCKS, 16, 16])
    for step in tl.static_range(1, 16):
        here = (row == step)[None, :, None]
        coefficients = tl.sum(tl.where(here, small, 0.0), 1)
        inverse -= tl.where(here, tl.sum(coefficients[:, :, None] * inverse, 1)[:, None, :], 0.0)
    if C >= 32:
        inverse = _merge(inverse, lower, C, 16)
    if C >= 64:
        inverse = _merge(inverse, lower, C, 32)
    return tl.reshape(inverse, [C, C])


@triton.jit
@no_type_check
def _merge(inverse, lower, C: tl.constexpr, SIZE: tl.constexpr):
    """Compute the inverses of all diagonal blocks of 2·SIZE from those of SIZE `[C/SIZE, SIZE, SIZE]`.

    The inverse of `[[A, 0], [B, D]]` is `[[A⁻¹, 0], [−D⁻¹ B A⁻¹, D⁻¹]]`.
    """
    BLOCKS: tl.constexpr = C // SIZE
    PAIRS: tl.constexpr = BLOCKS // 2
    at = tl.arange(0, BLOCKS)
    here = (at[:, None, None, None] == at[None, None, :, None] + 1) & (at % 2 == 1)[:, None, None, None]
    under = tl.sum(tl.where(here, tl.reshape(lower, [BLOCKS, SIZE, BLOCKS, SIZE]), 0.0), 2)
    under = tl.sum(tl.reshape(under, [PAIRS, 2, SIZE, SIZE]), 1)  # B: zero in the first of each pair
    half = tl.arange(0, 2)
    pairs = tl.reshape(inverse, [PAIRS, 2, SIZE, SIZE])
    first = tl.sum(tl.where((half == 0)[None, :, None, None], pairs, 0.0), 1)
    second = tl.sum(tl.where((half == 1)[None, :, None, None], pairs, 0.0), 1)
    under = tl.dot(second, tl.dot(under, first, input_precision="ieee"), input_precision="ieee")
    row = half[None, :, None, None, None]
    col = half[None, None, None, :, None]
    whole = tl.where((row == 0) & (col == 0), first[:, None, :, None, :], 0.0)
    whole = tl.where((row == 1) & (col == 1), second[:, None, :, None, :], whole)
    whole = tl.where((row == 1) & (col == 0), -under[:, None, :, None, :], whole)
    return tl.reshape(whole, [PAIRS, 2 * SIZE, 2 * SIZE])


@tuned("K", "V", "C", "MODE", "KEEP")
@triton.jit
@no_type_check
def _solve_kernel(
    k, v, beta, g_slow, g_fast, x, y, y_slow, inverse, chunks, H, SK, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    MODE: tl.constexpr, KEEP: tl.constexpr, PRECISION: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """`(I + L)⁻¹ [β V, β w K]` of chunk n, head h, with `L_ij = β_i (k_i · k_j) D_ij` for j < i.

    w are the weights with which keys read the entering states. KEEP stores the inverse too.
    """
    at = tl.program_id(0)
    rows, inside = chunk_rows(chunks, at // H, at % H, H, C)
    rows_k = shared_rows(chunks, at // H, at % H, H, SK, C)
    overlap = tl.zeros([C, C], tl.float32)
    for start in range(0, K, BK):
        ks = tile(k, rows_k, start + tl.arange(0, BK), inside, K)
        overlap = dot(ks, tl.trans(ks), overlap, PRECISION)
    a, b, fast, reset, seg = load_gates(g_slow, g_fast, rows, inside, C, MODE)
    strength = tl.load(beta + rows, mask=inside, other=0.0).to(tl.float32)
    index = tl.arange(0, C)
    lower = overlap * decay_matrix(a, b, fast, reset, seg, C, MODE) * strength[:, None]
    solved = unit_lower_inverse(tl.where(index[:, None] > index[None, :], lower, 0.0), C)
    if KEEP:
        put(inverse, solved, rows, index, inside, C)
    for start in range(0, V, BV):
        vv = start + tl.arange(0, BV)
        vs = tile(v, rows, vv, inside, V).to(tl.float32) * strength[:, None]
        put(x, tl.dot(solved, vs, input_precision=PRECISION), rows, vv, inside, V)
    weight, weight_slow = read_weights(a, fast, reset, seg)
    for start in range(0, K, BK):
        kk = start + tl.arange(0, BK)
        ks = tile(k, rows_k, kk, inside, K).to(tl.float32) * strength[:, None]
        put(y, tl.dot(solved, ks * weight[:, None], input_precision=PRECISION), rows, kk, inside, K)
        if MODE == 2:
            put(y_slow, tl.dot(solved, ks * weight_slow[:, None], input_precision=PRECISION), rows, kk, inside, K)


@tuned("K", "V", "C", "MODE")
@triton.jit
@no_type_check
def _walk_kernel(
    k, x, y, y_slow, g_slow, g_fast, first, last, states, written, chunks, sequences, H, SK,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, MODE: tl.constexpr, PRECISION: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The walk over the chunks of one sequence and head, for a block of V.

    Each step stores the entering state S, computes `U = X − Y S` and updates `S ← carry(S) + (w K)ᵀ U`, where w are the
    weights with which keys are written into the outgoing state. BK covers K, so the whole state is in registers.
    """
    STATE: tl.constexpr = 2 * K * V if MODE == 2 else K * V
    program = tl.program_id(0)
    head = program % H
    start = tl.load(sequences + 2 * (program // H))
    count = tl.load(sequences + 2 * (program // H) + 1)
    kk = tl.arange(0, BK)
    vv = tl.program_id(1) * BV + tl.arange(0, BV)
    there = kk < K
    place = program.to(tl.int64) * STATE
    state = tile(first + place, kk, vv, there, V)
    slow_state = tl.zeros([BK, BV], tl.float32)
    if MODE == 2:
        slow_state = tile(first + place + K * V, kk, vv, there, V)
    for step in range(0, count.to(tl.int32)):
        chunk = start + step
        rows, inside = chunk_rows(chunks, chunk, head, H, C)
        here = states + (chunk * H + head) * STATE
        put(here, state, kk, vv, there, V)
        us = tile(x, rows, vv, inside, V) - tl.dot(tile(y, rows, kk, inside, K), state, input_precision=PRECISION)
        if MODE == 2:
            put(here + K * V, slow_state, kk, vv, there, V)
            us -= tl.dot(tile(y_slow, rows, kk, inside, K), slow_state, input_precision=PRECISION)
        put(written, us, rows, vv, inside, V)
        a, b, fast, reset, seg = load_gates(g_slow, g_fast, rows, inside, C, MODE)
        left, left_slow = leave_weights(a, b, fast, reset, seg, C, MODE)
        kept, joined, stays = carry_weights(a, b, fast, reset, seg, C)
        ks = tl.trans(tile(k, shared_rows(chunks, chunk, head, H, SK, C), kk, inside, K).to(tl.float32))
        if MODE == 2:
            added = tl.dot(ks, us * left_slow[:, None], input_precision=PRECISION)
            slow_state = stays * slow_state + joined * state + added
        state = kept * state + tl.dot(ks, us * left[:, None], input_precision=PRECISION)
    put(last + place, state, kk, vv, there, V)
    if MODE == 2:
        put(last + place + K * V, slow_state, kk, vv, there, V)


class Solved(NamedTuple):
    """The systems of all chunks."""

    x: Tensor  # `(I + L)⁻¹ β V`, `[B, T, H, V]`
    y: Tensor  # `(I + L)⁻¹ β w K` for the fast state and, in GateRank, for the slow one: `[1 or 2, B, T, H, K]`
    inverse: Tensor | None  # `(I + L)⁻¹`, one row per token `[B, T, H, C]`, or None


def solve(k: Tensor, v: Tensor, beta: Tensor, gates: Gates, chunks: Chunks, keep: bool) -> Solved:
    """Invert the systems of all chunks. `keep` returns the inverses too, which the backward pass needs."""
    key, (heads, value), mode, n = k.shape[-1], v.shape[2:], mode_of(*gates), chunks.chunks.shape[0]
    x = torch.empty_like(v, dtype=torch.float32)
    y = k.new_empty(2 if mode == GATE_RANK else 1, *v.shape[:3], key, dtype=torch.float32)
    inverse = k.new_empty(*v.shape[:3], chunks.size, dtype=torch.float32) if keep else None
    if n * heads:
        launch(_solve_kernel, (n * heads,))(
            k, v, beta, *gates, x, y[0], y[-1], inverse, chunks.chunks, heads, heads // k.shape[2], key, value,
            chunks.size, mode, keep, precision_of(k), block(key), block(value),
        )  # fmt: skip
    return Solved(x, y, inverse)


def walk_columns(key: int, value: int) -> int:
    """Return how many columns of the state a walk holds at once. All rows of the state must fit with them."""
    return block(value, 32 if key <= 128 else 16)


def empty_states(like: Tensor, chunks: Chunks) -> Tensor:
    """Allocate a state like `[N, H, K', V]` for every chunk: `[n, H, K', V]`.

    A walk fills the states of chunks with tokens. The other chunks (at most one a sequence, all at the end, see
    `gates.make_chunks`) need finite numbers, so their states are set to 0.
    """
    states = like.new_empty(chunks.chunks.shape[0], *like.shape[1:])
    states[-chunks.sequences.shape[0] :].zero_()
    return states


def walk(k: Tensor, solved: Solved, gates: Gates, initial: Tensor, chunks: Chunks) -> tuple[Tensor, Tensor, Tensor]:
    """Return the states entering the chunks `[n, H, K', V]`, the values written `[B, T, H, V]` and the final states.

    All are float32 (K' = 2K with two states).
    """
    x, y, _ = solved
    key, (heads, value), sequences = k.shape[-1], x.shape[2:], chunks.sequences.shape[0]
    states, columns = empty_states(initial, chunks), walk_columns(key, value)
    written, final = torch.empty_like(x), torch.empty_like(initial)
    if sequences * heads:
        launch(_walk_kernel, (sequences * heads, triton.cdiv(value, columns)))(
            k, x, y[0], y[-1], *gates, initial, final, states, written, chunks.chunks, chunks.sequences, heads,
            heads // k.shape[2], key, value, chunks.size, mode_of(*gates), precision_of(k), block(key, 256), columns,
        )  # fmt: skip
    return states, written, final
