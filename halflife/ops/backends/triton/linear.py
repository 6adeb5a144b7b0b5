"""Linear attention with no decay or a scalar one, and GateRank on it, as Triton kernels.

`_walk_kernel` goes over the chunks of a segment with the state in registers, and writes outputs, the state at the end,
or the states that enter the chunks. `_scan_kernel` joins segments. The backward pass has one walk that keeps the states
entering the chunks, and one from the end (`_grads_kernel`) that holds the gradient G of the state in registers and
computes all gradients of a chunk at once:

    dS = (dO Vᵀ) ⊙ D,   dQ = dS K + w ⊙ (dO Sᵀ),   dK = dSᵀ Q + l ⊙ (V Gᵀ),   dV = (Q Kᵀ ⊙ D)ᵀ dO + l ⊙ (K G)

with the weights w of queries and l of keys of `gates.py`. Products of 16-bit inputs are computed in their dtype, with
float32 sums. In products with a state bfloat16 stays bfloat16, and float16, whose range is too small for states,
becomes TF32. float32 is exact.
"""

from __future__ import annotations

from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from halflife.ops.backends.triton.gates import (
    GATE_RANK,
    NONE,
    Gates,
    dot,
    load_gates,
    log_grads_of_sums,
    mode_of,
    pair_sums,
    precision_of,
    put_log_grad,
)
from halflife.ops.backends.triton.launch import launch
from halflife.ops.backends.triton.segments import Segments, make_segments, segment_tokens, segments_of
from halflife.ops.backends.triton.settings import Settings, block, settings_of
from halflife.ops.backends.triton.sums import (
    COUNTS,
    store_sums,
    stored_carries,
    stored_decays,
    stored_leaves,
    stored_reads,
)
from halflife.ops.chunked.groups import grads_of_heads, sum_of_heads


@triton.jit
@no_type_check
def load(at, rows, cols, inside, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Load rows (where `inside`) and columns (below SIZE) of a matrix at `at`, whose rows are `stride` apart."""
    mask = inside[:, None]
    if SIZE != BLOCK:
        mask = mask & (cols < SIZE)[None, :]
    return tl.load(at + rows[:, None] * stride + cols[None, :], mask=mask, other=0.0)


@triton.jit
@no_type_check
def store(at, value, rows, cols, inside, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Store `value` at the places that `load` reads."""
    mask = inside[:, None]
    if SIZE != BLOCK:
        mask = mask & (cols < SIZE)[None, :]
    tl.store(at + rows[:, None] * stride + cols[None, :], value.to(at.dtype.element_ty), mask=mask)


@triton.jit
@no_type_check
def load_state(at, rows, cols, K: tl.constexpr, V: tl.constexpr):
    """Load a block of a state `[K, V]`."""
    return tl.load(at + rows[:, None] * V + cols[None, :], mask=(rows < K)[:, None] & (cols < V)[None, :], other=0.0)


@triton.jit
@no_type_check
def store_state(at, value, rows, cols, K: tl.constexpr, V: tl.constexpr):
    """Store a block of a state."""
    mask = (rows < K)[:, None] & (cols < V)[None, :]
    tl.store(at + rows[:, None] * V + cols[None, :], value.to(at.dtype.element_ty), mask=mask)


@triton.jit
@no_type_check
def beside_state(x):
    """Convert an operand of a product with a state: float16 becomes float32, for its range."""
    if x.dtype == tl.float16:
        return x.to(tl.float32)
    return x


@triton.jit
@no_type_check
def weighted(x, weight):
    """Compute `weight ⊙ x` of rows, in the dtype of x."""
    return (x.to(tl.float32) * weight[:, None]).to(x.dtype)


@triton.jit
@no_type_check
def _sums_kernel(
    sums, g_slow, g_fast, table, T, LENGTH, PER, TOKENS, H: tl.constexpr, C: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """The sums of the log-decays of one chunk and head, `[planes, H, TOKENS]`; see `sums.py`."""
    segment = tl.program_id(0) // (LENGTH // C)
    index = tl.program_id(0) % (LENGTH // C)
    h = tl.program_id(1)
    first, tokens = segment_tokens(table, segment, T, LENGTH, PER)
    cc = tl.arange(0, C)
    inside = cc < tokens - index * C
    token = first + index * C
    EXACT: tl.constexpr = sums.dtype.element_ty == tl.float64
    a, b, fast, reset, seg = load_gates(g_slow, g_fast, (token + cc) * H + h, inside, C, MODE, EXACT)
    store_sums(sums + h * TOKENS + token, H * TOKENS, cc, inside, a, b, fast, reset, seg, C, MODE)


@triton.jit
@no_type_check
def _walk_kernel(
    q, k, v, sums, entering, out, leaving, carried, states, table, scale, T, LENGTH, PER, TOKENS,
    H: tl.constexpr, SQ: tl.constexpr, SK: tl.constexpr, QT: tl.constexpr, QH: tl.constexpr, KT: tl.constexpr,
    KH: tl.constexpr, VT: tl.constexpr, VH: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    MODE: tl.constexpr, BACK: tl.constexpr, PRECISION: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The walk over a segment, for one head and BV columns of its state. What is None is not read or written.

    It starts from `entering`, or zeros, and writes `out`, the state after the segment and the factors of a state that
    passes it (`leaving`, `carried`), and the state entering each chunk (`states`). BACK walks from the end with the
    gradient of the state: k are queries and v the gradients of outputs.
    """
    PARTS: tl.constexpr = (V + BV - 1) // BV
    STATE: tl.constexpr = 2 * K * V if MODE == 2 else K * V
    h = tl.program_id(0) // PARTS
    segment = tl.program_id(1)
    first, tokens = segment_tokens(table, segment, T, LENGTH, PER)
    cc = tl.arange(0, C)
    kk = tl.arange(0, BK)
    vv = (tl.program_id(0) % PARTS) * BV + tl.arange(0, BV)
    place = (segment.to(tl.int64) * H + h) * STATE
    fast = tl.zeros([BK, BV], tl.float32)
    slow = tl.zeros([BK, BV], tl.float32)
    if entering is not None:
        fast = load_state(entering + place, kk, vv, K, V)
        if MODE == 2:
            slow = load_state(entering + place + K * V, kk, vv, K, V)
    kept_all = 1.0
    joined_all = 0.0
    stays_all = 1.0
    count = tl.cdiv(tokens, C)
    for step in tl.range(0, count, num_stages=STAGES):
        index = count - 1 - step if BACK else step
        inside = cc < tokens - index * C
        token = first + index * C
        ks = load(k + token * KT + (h // SK) * KH, cc, kk, inside, KT, K, BK)
        vs = load(v + token * VT + h * VH, cc, vv, inside, VT, V, BV)
        at = token if MODE == 0 else sums + h * TOKENS + token
        size = tl.minimum(C, tokens - index * C)
        if states is not None:
            here = states + ((token // C + segment) * H + h) * STATE
            store_state(here, fast, kk, vv, K, V)
            if MODE == 2:
                store_state(here + K * V, slow, kk, vv, K, V)
        if out is not None:
            qs = load(q + token * QT + (h // SQ) * QH, cc, kk, inside, QT, K, BK)
            if BACK:
                weight, weight_slow = stored_leaves(at, H * TOKENS, cc, inside, size, C, MODE)
            else:
                weight, weight_slow = stored_reads(at, H * TOKENS, cc, inside, C, MODE)
                weight *= scale
                weight_slow *= scale
            wide = beside_state(qs)
            o = dot(wide, fast.to(wide.dtype), tl.zeros([C, BV], tl.float32), PRECISION) * weight[:, None]
            if MODE == 2:
                read = dot(wide, slow.to(wide.dtype), tl.zeros([C, BV], tl.float32), PRECISION)
                o += read * weight_slow[:, None]
            scores = dot(qs, tl.trans(ks), tl.zeros([C, C], tl.float32), PRECISION)
            scores *= stored_decays(at, H * TOKENS, cc, cc, inside, inside, MODE, BACK) * scale
            o = dot(scores.to(vs.dtype), vs, o, PRECISION)
            store(out + (token * H + h) * V, o, cc, vv, inside, H * V, V, BV)
        kept, joined, stays = stored_carries(at, H * TOKENS, size, MODE)
        if BACK:
            left, left_slow = stored_reads(at, H * TOKENS, cc, inside, C, MODE)
            left *= scale
            left_slow *= scale
        else:
            left, left_slow = stored_leaves(at, H * TOKENS, cc, inside, size, C, MODE)
        written = tl.trans(ks)
        if MODE == 2:
            if BACK:
                fast = dot(written, weighted(vs, left), kept * fast + joined * slow, PRECISION)
                slow = dot(written, weighted(vs, left_slow), stays * slow, PRECISION)
            else:
                slow = dot(written, weighted(vs, left_slow), stays * slow + joined * fast, PRECISION)
                fast = dot(written, weighted(vs, left), kept * fast, PRECISION)
            joined_all = stays * joined_all + joined * kept_all
            stays_all *= stays
            kept_all *= kept
        elif MODE == 1:
            fast = dot(written, weighted(vs, left), kept * fast, PRECISION)
            kept_all *= kept
        else:
            fast = dot(written, weighted(vs, left) if BACK else vs, fast, PRECISION)
    if leaving is not None:
        store_state(leaving + place, fast, kk, vv, K, V)
        if MODE == 2:
            store_state(leaving + place + K * V, slow, kk, vv, K, V)
    if carried is not None:  # noqa: SIM102, as None is known when compiled
        if tl.program_id(0) % PARTS == 0:
            at = carried + (segment.to(tl.int64) * H + h) * 3
            tl.store(at, kept_all)
            tl.store(at + 1, joined_all)
            tl.store(at + 2, stays_all)


@triton.jit
@no_type_check
def _scan_kernel(
    update, carried, first, entering, last, sequences, PER, H, SIZE: tl.constexpr, MODE: tl.constexpr,
    BACK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The states that enter the segments of one sequence and head, and the last one, for a block of their entries.

    BACK goes from the last segment to the first, with gradients.
    """
    STATE: tl.constexpr = 2 * SIZE if MODE == 2 else SIZE
    head = tl.program_id(0) % H
    start, count = segments_of(sequences, tl.program_id(0) // H, PER)
    whole = tl.program_id(0).to(tl.int64) * STATE
    entry = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = entry < SIZE
    fast = tl.load(first + whole + entry, mask=mask, other=0.0)
    slow = tl.zeros([BLOCK], tl.float32)
    if MODE == 2:
        slow = tl.load(first + whole + SIZE + entry, mask=mask, other=0.0)
    for step in tl.range(0, count, num_stages=4):
        place = (start + (count - 1 - step if BACK else step)) * H + head
        at = place * STATE + entry
        added = tl.load(update + at, mask=mask, other=0.0)
        kept = tl.load(carried + 3 * place)
        tl.store(entering + at, fast, mask=mask)
        if MODE == 2:
            added_slow = tl.load(update + at + SIZE, mask=mask, other=0.0)
            joined = tl.load(carried + 3 * place + 1)
            stays = tl.load(carried + 3 * place + 2)
            tl.store(entering + at + SIZE, slow, mask=mask)
            if BACK:
                fast = kept * fast + joined * slow + added
                slow = stays * slow + added_slow
            else:
                slow = stays * slow + joined * fast + added_slow
                fast = kept * fast + added
        else:
            fast = kept * fast + added
    tl.store(last + whole + entry, fast, mask=mask)
    if MODE == 2:
        tl.store(last + whole + SIZE + entry, slow, mask=mask)


@triton.jit
@no_type_check
def _grads_kernel(
    q, k, v, do, sums, g_slow, g_fast, states, entering, leaving, dq, dk, dg_slow, dg_fast, table, scale, T, LENGTH,
    PER, TOKENS, H: tl.constexpr, SQ: tl.constexpr, SK: tl.constexpr, QT: tl.constexpr, QH: tl.constexpr,
    KT: tl.constexpr, KH: tl.constexpr, VT: tl.constexpr, VH: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    C: tl.constexpr, MODE: tl.constexpr, PRECISION: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The walk from the end of a segment for one head and BK rows of its state: gradients of q, k and log-decays.

    `entering` is the gradient of the state after the segment, and `leaving` becomes that of the state before it. The
    gradients of log-decays are sums over the blocks of rows, and each program stores its own.
    """
    PARTS: tl.constexpr = (K + BK - 1) // BK
    STATE: tl.constexpr = 2 * K * V if MODE == 2 else K * V
    h = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    segment = tl.program_id(1)
    first, tokens = segment_tokens(table, segment, T, LENGTH, PER)
    cc = tl.arange(0, C)
    kk = part * BK + tl.arange(0, BK)
    vv = tl.arange(0, BV)
    place = (segment.to(tl.int64) * H + h) * STATE
    fast = load_state(entering + place, kk, vv, K, V)
    slow = tl.zeros([BK, BV], tl.float32)
    if MODE == 2:
        slow = load_state(entering + place + K * V, kk, vv, K, V)
    count = tl.cdiv(tokens, C)
    for step in tl.range(0, count, num_stages=STAGES):
        index = count - 1 - step
        inside = cc < tokens - index * C
        token = first + index * C
        rows = (token + cc) * H + h
        vs = load(v + token * VT + h * VH, cc, vv, inside, VT, V, BV)
        dos = load(do + (token * H + h) * V, cc, vv, inside, H * V, V, BV)
        here = states + ((token // C + segment) * H + h) * STATE
        at = token if MODE == 0 else sums + h * TOKENS + token
        size = tl.minimum(C, tokens - index * C)
        weight, weight_slow = stored_reads(at, H * TOKENS, cc, inside, C, MODE)
        weight *= scale
        weight_slow *= scale
        left, left_slow = stored_leaves(at, H * TOKENS, cc, inside, size, C, MODE)
        wide_v = beside_state(vs)
        wide_do = beside_state(dos)

        dscores = dot(dos, tl.trans(vs), tl.zeros([C, C], tl.float32), PRECISION)
        dscores *= stored_decays(at, H * TOKENS, cc, cc, inside, inside, MODE) * scale
        qs = load(q + token * QT + (h // SQ) * QH, cc, kk, inside, QT, K, BK)
        ks = load(k + token * KT + (h // SK) * KH, cc, kk, inside, KT, K, BK)
        if MODE != 0:
            scores = dot(qs, tl.trans(ks), tl.zeros([C, C], tl.float32), PRECISION)
            seg = tl.zeros([C], tl.float32)
            if MODE == 2:
                seg = tl.load(at + 4 * H * TOKENS + cc, mask=inside, other=0.0).to(tl.float32)
            within, across, gone = pair_sums(scores * dscores, seg, C, MODE)
        dscores = dscores.to(qs.dtype)

        state = load_state(here, kk, vv, K, V)
        dqs = dot(wide_do, tl.trans(state), tl.zeros([C, BK], tl.float32), PRECISION) * weight[:, None]
        if MODE != 0:
            read_fast = tl.sum(dqs * qs.to(tl.float32), 1)
        if MODE == 2:
            state_slow = load_state(here + K * V, kk, vv, K, V)
            through = dot(wide_do, tl.trans(state_slow), tl.zeros([C, BK], tl.float32), PRECISION)
            through *= weight_slow[:, None]
            read_slowly = tl.sum(through * qs.to(tl.float32), 1)
            dqs += through
        dqs = dot(dscores, ks, dqs, PRECISION)
        store(dq + (token * H + h) * K, dqs, cc, kk, inside, H * K, K, BK)

        # dKᵀ, so that neither dS nor G, which are results of products, is an operand's transpose (see gates.py).
        dks = dot(fast.to(wide_v.dtype), tl.trans(wide_v), tl.zeros([BK, C], tl.float32), PRECISION) * left[None, :]
        if MODE != 0:
            keys = tl.trans(ks).to(tl.float32)
            left_fast = tl.sum(dks * keys, 0)
        if MODE == 2:
            through = dot(slow.to(wide_v.dtype), tl.trans(wide_v), tl.zeros([BK, C], tl.float32), PRECISION)
            through *= left_slow[None, :]
            left_slowly = tl.sum(through * keys, 0)
            dks += through
        dks = dot(tl.trans(qs), dscores, dks, PRECISION)
        there = inside[None, :] & (kk < K)[:, None]
        column = dk + (token * H + h) * K + cc[None, :] * (H * K) + kk[:, None]
        tl.store(column, dks.to(dk.dtype.element_ty), mask=there)

        kept, joined, stays = stored_carries(at, H * TOKENS, size, MODE)
        if MODE != 0:
            again = load_state(here, kk, vv, K, V)  # once more, so that it holds no registers until here
            passed = kept * tl.sum(again.to(tl.float32) * fast)
            met = 0.0
            stayed = 0.0
            if MODE == 2:
                met = joined * tl.sum(again.to(tl.float32) * slow)
                again = load_state(here + K * V, kk, vv, K, V)
                stayed = stays * tl.sum(again.to(tl.float32) * slow)
                reset = (tl.load(g_slow + rows, mask=inside, other=0.0) != 0).to(tl.int32)
                grad_slow, grad_fast = log_grads_of_sums(
                    within, across, gone, read_fast, read_slowly, left_fast, left_slowly, passed + met, met, stayed,
                    reset, seg, C,
                )  # fmt: skip
                put_log_grad(dg_slow + part * H * TOKENS, grad_slow, g_slow, rows, inside)
            else:
                later = cc[:, None] >= cc[None, :]  # [i, t]; sums in which nothing cancels
                grad_fast = tl.sum(tl.where(later, (within + read_fast)[:, None], left_fast[:, None]), 0) + passed
            put_log_grad(dg_fast + part * H * TOKENS, grad_fast, g_fast, rows, inside)
        queries = tl.trans(qs)
        if MODE == 2:
            fast = dot(queries, weighted(dos, weight), kept * fast + joined * slow, PRECISION)
            slow = dot(queries, weighted(dos, weight_slow), stays * slow, PRECISION)
        else:
            fast = dot(queries, weighted(dos, weight), kept * fast, PRECISION)
    if leaving is not None:
        store_state(leaving + place, fast, kk, vv, K, V)
        if MODE == 2:
            store_state(leaving + place + K * V, slow, kk, vv, K, V)


class _Call(NamedTuple):
    """What the kernels of one pass share."""

    q: Tensor
    k: Tensor
    v: Tensor
    gates: Gates
    sums: Tensor | None
    scale: float
    segments: Segments
    walk: Settings
    grads: Settings

    @property
    def mode(self) -> int:
        return mode_of(*self.gates)

    @property
    def heads(self) -> int:
        return self.v.shape[2]

    def new_states(self, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Allocate states `[count, H, K', V]`, with K' = 2K for two states."""
        rows = self.q.shape[3] * (2 if self.mode == GATE_RANK else 1)
        return self.q.new_empty(count, self.heads, rows, self.v.shape[3], dtype=dtype)

    def tail(self) -> tuple:
        """The arguments about places, which are the last ones of both walks."""
        s, shared = self.segments, (self.heads // max(1, x.shape[2]) for x in (self.q, self.k))
        strides = (stride for x in (self.q, self.k, self.v) for stride in (x.stride(1), x.stride(2)))
        length, tokens = self.v.shape[1], self.v.shape[0] * self.v.shape[1]
        return s.table, self.scale, length, s.length, s.per_sequence, tokens, self.heads, *shared, *strides

    def constants(self, tiles: Settings) -> dict:
        return {
            "K": self.q.shape[3], "V": self.v.shape[3], "C": tiles.chunk, "MODE": self.mode,
            "PRECISION": precision_of(self.q), "BK": tiles.rows, "BV": tiles.columns, "STAGES": tiles.stages,
            "num_warps": tiles.warps,
        }  # fmt: skip


def rows_of(x: Tensor) -> Tensor:
    """`x [B, T, H, D]` itself if its tokens are evenly spaced rows, as in a slice of channels, else a copy."""
    even = x.stride(3) == 1 and (x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1))
    return x if even else x.contiguous()


def _call(
    q: Tensor, k: Tensor, v: Tensor, g_slow: Tensor | None, g_fast: Tensor | None, cu_seqlens: Tensor | None,
    scale: float, chunk_size: int, back: bool,
) -> _Call:  # fmt: skip
    (batch, length, heads, value), key, gates = v.shape, q.shape[3], (g_slow, g_fast)
    chunk, mode = block(min(chunk_size, length)), mode_of(*gates)
    segments = make_segments(batch, length, cu_seqlens, chunk, heads * triton.cdiv(value, 64))
    states = 2 if mode == GATE_RANK else 1
    walk, grads = (settings_of(kind, key, value, q.dtype, states, chunk) for kind in ("walk", "grads"))
    if back:  # one size of chunks, whose sums are computed once
        walk = walk._replace(chunk=grads.chunk)
    sums = None
    if mode != NONE:
        dtype = torch.float64 if q.dtype == torch.float32 else torch.float32
        sums = q.new_empty(COUNTS[mode], heads, batch * length, dtype=dtype)
        if segments.count * heads:
            launch(_sums_kernel, (segments.count * (segments.length // walk.chunk), heads))(
                sums, g_slow, g_fast, segments.table, length, segments.length, segments.per_sequence, batch * length,
                heads, walk.chunk, mode, num_warps=1,
            )  # fmt: skip
    return _Call(rows_of(q), rows_of(k), rows_of(v), gates, sums, scale, segments, walk, grads)


def _walk(
    call: _Call, *, entering: Tensor | None = None, out: Tensor | None = None, leaving: Tensor | None = None,
    carried: Tensor | None = None, states: Tensor | None = None,
) -> None:  # fmt: skip
    _launch_walk(call, False, entering, out, leaving, carried, states)


def _walk_back(
    call: _Call, do: Tensor, *, entering: Tensor | None = None, out: Tensor | None = None, leaving: Tensor | None = None
) -> None:
    """The walk from the end: what each segment adds to the gradient of its entering state, or the gradients of v."""
    _launch_walk(call._replace(q=call.k, k=call.q, v=do), True, entering, out, leaving, None, None)


def _launch_walk(call: _Call, back: bool, *written: Tensor | None) -> None:
    if call.segments.count * call.heads:
        launch(_walk_kernel, (call.heads * triton.cdiv(call.v.shape[3], call.walk.columns), call.segments.count))(
            call.q, call.k, call.v, call.sums, *written, *call.tail(), BACK=back, **call.constants(call.walk)
        )


def _scan(call: _Call, update: Tensor, carried: Tensor, first: Tensor, back: bool) -> tuple[Tensor, Tensor]:
    """The states entering the segments, and the last ones of all sequences."""
    entering, last = torch.empty_like(update), torch.empty_like(first)
    size, segments = call.q.shape[3] * call.v.shape[3], call.segments
    if first.shape[0] * call.heads:
        launch(_scan_kernel, (first.shape[0] * call.heads, triton.cdiv(size, 256)))(
            update, carried, first, entering, last, segments.sequences, segments.per_sequence, call.heads, size,
            call.mode, back, 256, num_warps=2,
        )  # fmt: skip
    return entering, last


def forward(
    q: Tensor, k: Tensor, v: Tensor, g_slow: Tensor | None, g_fast: Tensor | None, initial: Tensor,
    cu_seqlens: Tensor | None, scale: float, chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the outputs, the final states, and of segments the entering states and the factors of passing states.

    The last two are empty where each sequence is one segment, and else go to `backward`.
    """
    call = _call(q, k, v, g_slow, g_fast, cu_seqlens, scale, chunk_size, back=False)
    out, count = torch.empty(v.shape, dtype=v.dtype, device=v.device), call.segments.count
    if call.segments.whole:
        final = torch.empty_like(initial)
        _walk(call, entering=initial, out=out, leaving=final)
        return out, final, initial.new_empty(0), initial.new_empty(0)
    update, carried = call.new_states(count), q.new_empty(count, call.heads, 3, dtype=torch.float32)
    _walk(call, leaving=update, carried=carried)
    entering, final = _scan(call, update, carried, initial, back=False)
    _walk(call, entering=entering, out=out)
    return out, final, entering, carried


def backward(
    q: Tensor, k: Tensor, v: Tensor, g_slow: Tensor | None, g_fast: Tensor | None, initial: Tensor, entering: Tensor,
    carried: Tensor, cu_seqlens: Tensor | None, scale: float, chunk_size: int, do: Tensor, dfinal: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor]:  # fmt: skip
    """Return the gradients of q, k, v, both log-decays and the initial states."""
    call = _call(q, k, v, g_slow, g_fast, cu_seqlens, scale, chunk_size, back=True)
    segments, heads, tiles = call.segments, call.heads, call.grads
    narrow = torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float32
    states = call.new_states(v.shape[0] * v.shape[1] // tiles.chunk + segments.count, narrow)
    _walk(call, entering=initial if segments.whole else entering, states=states)
    if segments.whole:
        after, before = dfinal, torch.empty_like(initial)
        dinitial = before
    else:
        update = call.new_states(segments.count)
        _walk_back(call, do, leaving=update)
        (after, dinitial), before = _scan(call, update, carried, dfinal, back=True), None
    dq, dk, dv = grads_of_heads(q, heads), grads_of_heads(k, heads), torch.empty_like(do)
    parts = triton.cdiv(q.shape[3], tiles.rows)
    dg_slow, dg_fast = (None if g is None else g.new_empty(parts, *g.shape, dtype=torch.float32) for g in call.gates)
    if segments.count * heads:
        launch(_grads_kernel, (heads * parts, segments.count))(
            call.q, call.k, call.v, do, call.sums, *call.gates, states, after, before, dq, dk, dg_slow, dg_fast,
            *call.tail(), **call.constants(tiles),
        )  # fmt: skip
        _walk_back(call, do, entering=after, out=dv)
    dg_slow, dg_fast = (
        None if g is None or dg is None else (dg[0] if parts == 1 else dg.sum(0)).to(g.dtype)
        for g, dg in zip(call.gates, (dg_slow, dg_fast), strict=True)
    )
    return sum_of_heads(dq, q), sum_of_heads(dk, k), dv, dg_slow, dg_fast, dinitial
