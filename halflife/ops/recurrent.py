"""What every op on a state shares: the checks of its arguments, and the token loop that defines it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from halflife.precision import compute_dtype


def check_inputs(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, initial_state: Tensor | None, cu_seqlens: Tensor | None
) -> None:
    """Shapes of `design.md`'s op signatures; a wrong one is a ValueError that says what was expected."""
    if q.ndim != 4 or k.shape != q.shape:
        raise ValueError(f"q and k must both be [B, T, H, K]; got {tuple(q.shape)} and {tuple(k.shape)}")
    batch, length, heads, key = q.shape
    if v.ndim != 4 or v.shape[:3] != q.shape[:3]:
        raise ValueError(f"v must be [B, T, H, V] with B, T, H = {batch, length, heads}; got {tuple(v.shape)}")
    if g is not None and tuple(g.shape) not in ((batch, length, heads), (batch, length, heads, key)):
        raise ValueError(
            f"g must be None, [B, T, H] = {batch, length, heads} (scalar) or [B, T, H, K] = "
            f"{batch, length, heads, key} (vector); got {tuple(g.shape)}"
        )
    sequences = check_cu_seqlens(cu_seqlens, batch, length)
    expected = (sequences, heads, key, v.shape[-1])
    if initial_state is not None and tuple(initial_state.shape) != expected:
        raise ValueError(f"initial_state must be [sequences, H, K, V] = {expected}; got {tuple(initial_state.shape)}")


def check_cu_seqlens(cu_seqlens: Tensor | None, batch: int, length: int) -> int:
    """The number of sequences, after checking the boundaries `[N+1]` from 0 to T, non-decreasing, B = 1."""
    if cu_seqlens is None:
        return batch
    if batch != 1:
        raise ValueError(f"packed input (cu_seqlens) has batch size 1, one row of all tokens; got {batch}")
    if cu_seqlens.ndim != 1 or cu_seqlens.numel() < 1 or cu_seqlens.is_floating_point():
        raise ValueError("cu_seqlens must be integers [N + 1]: the cumulative lengths, starting with 0")
    bounds: Sequence[int] = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != length or any(b < a for a, b in pairwise(bounds)):
        raise ValueError(f"cu_seqlens must rise from 0 to T = {length}; got {list(bounds)}")
    return len(bounds) - 1


def first_state(q: Tensor, v: Tensor, initial_state: Tensor | None, sequences: int, parts: int = 1) -> Tensor:
    """The initial state in the compute dtype, zeros if none was given: `[N, H, parts · K, V]`."""
    if initial_state is not None:
        return initial_state.to(compute_dtype(q))
    return q.new_zeros(sequences, q.shape[2], parts * q.shape[3], v.shape[3], dtype=compute_dtype(q))


def token_loop(
    token: Callable[..., tuple[Tensor, Tensor]],
    inputs: tuple[Tensor, ...],
    g: Tensor | None,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    parts: int = 1,
) -> tuple[Tensor, Tensor]:
    """The definition of an op: `o, state = token(state, q_t, k_t, v_t, …, g_t)`, one token after the other.

    `inputs` are `q, k, v, …` as `[B, T, H, …]`; a scalar log-decay `g` gets a channel axis. Returns `o` in v's dtype
    and the states `[N, H, parts · K, V]` in the compute dtype.
    """
    q, _, v = inputs[:3]
    dtype = compute_dtype(q)
    bounds = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    states = first_state(q, v, initial_state, q.shape[0] if cu_seqlens is None else len(bounds) - 1, parts)
    inputs = tuple(x.to(dtype) for x in inputs)
    if g is not None:
        g = g.to(dtype).unsqueeze(-1) if g.ndim == 3 else g.to(dtype)
    outputs, finals = [], []
    for row, (start, stop) in enumerate(pairwise(bounds)):
        state = states if cu_seqlens is None else states[row : row + 1]
        for t in range(start, stop):
            o, state = token(state, *(x[:, t] for x in inputs), None if g is None else g[:, t])
            outputs.append(o * scale)
        finals.append(state)
    o = torch.stack(outputs, 1).to(v.dtype) if outputs else torch.zeros_like(v)
    return o, torch.cat(finals) if finals else states
