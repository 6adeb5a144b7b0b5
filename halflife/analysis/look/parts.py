"""The readings of layers whose memory is more than one call of an op on a state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halflife.analysis.look.readings import Reading, faded, faded_by_two, faded_channels
from halflife.layers.memory.gate_rank import GateRank
from halflife.precision import compute_dtype


class PartReading(Reading):
    """The reading of a layer by one of its functions, which is called with `given` and `options`, for all heads.

    Of the heads, `chosen` are those that the reading has; None means all.
    """

    values: int  # the place of the values `[1, T, H, V]` in `given`

    def __init__(self, function: Any, given: Sequence[Any], options: dict[str, Any], chosen: Any = None) -> None:
        self.function, self.given, self.options = function, given, options
        v = given[self.values]
        self.tokens, all_heads = v.shape[1:3]
        self.chosen = list(range(all_heads)) if chosen is None else list(chosen)
        self.heads = len(self.chosen)
        self.sizes = v[0].norm(dim=-1).T[self.chosen]

    def of(self, heads: Sequence[int]) -> Reading:
        return type(self)(self.function, self.given, self.options, [self.chosen[h] for h in heads])

    def identity(self, columns: slice) -> Tensor:
        """Values `[1, T, H, n]`, which are columns of the identity in each head."""
        v = self.given[self.values]
        ones = torch.eye(self.tokens, dtype=compute_dtype(v), device=v.device)[:, columns]
        return ones[None, :, None].expand(1, -1, v.shape[2], -1).contiguous()


class KoopmanReading(PartReading):
    """The reading of spectral Koopman attention, whose operators depend on keys alone and not on values.

    The function is the layer's `Readout`, of queries, keys and values `[1, T, H, …]`.
    """

    kind, values = "koopman_attention", 2

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        rank, width = self.given[1].shape[-1], self.given[2].shape[-1]
        self.stored = 4 * rank * (2 * rank + width), 0  # G, M and C

    def respond(self, columns: slice) -> Tensor:
        q, k, _ = self.given
        y = self.function.forward(q, k, self.identity(columns), **{**self.options, "initial_state": None}).y
        return y[0].transpose(0, 1)[self.chosen]

    def left(self, columns: Tensor, cursors: Tensor) -> Tensor:
        g, k = self.options.get("g"), self.given[1]
        if g is None or g.ndim == 3:
            return faded(None if g is None else g[:, :, self.chosen], self.heads, columns, cursors)
        # The sum of values fades on its side of the values at the slowest decay, and on the keys' side at their own.
        g = ((g + g.amax(-1, keepdim=True)) / 2)[:, :, self.chosen]
        return faded_channels(g, k[:, :, self.chosen], columns, cursors)


class TrapezoidReading(PartReading):
    """The reading of Mamba-3, where a token writes at the end of its step and at the beginning of the next one.

    What is left of a write is what its decays leave. The function of the layer is that of (memory, x, q, k_before, v,
    g, v_before, …, packing).
    """

    kind, values = "trapezoid", 4

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        memory, x, *_, packing = self.given
        states, self.g_slow = 1, None
        if isinstance(memory, GateRank):
            states, self.g_slow = 2, memory.slow_gate(memory.proj(x), None, packing)[0][:, :, self.chosen]
            self.resets = self.g_slow[0].T != 0
        self.stored = 4 * states * self.given[3].shape[-1] * self.given[4].shape[-1], 0

    def respond(self, columns: slice) -> Tensor:
        values = self.identity(columns)
        before = F.pad(values[:, :-1], (0, 0, 0, 0, 1, 0))
        options = {**self.options, "skip": None, "z": None}
        y, _ = self.function(*self.given[:4], values, self.given[5], before, *self.given[7:], **options)
        return y[0].unflatten(-1, values.shape[2:]).transpose(0, 1)[self.chosen]

    def left(self, columns: Tensor, cursors: Tensor) -> Tensor:
        g = self.given[5][:, :, self.chosen]
        if self.g_slow is not None:
            return faded_by_two(self.g_slow, g, columns, cursors, entry=1)
        return faded(g, self.heads, columns, cursors)
