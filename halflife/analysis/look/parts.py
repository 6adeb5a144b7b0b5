"""The readings of layers whose memory is more than one call of an op on a state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halflife.analysis.look.readings import Reading, faded, faded_channels
from halflife.precision import compute_dtype


class KoopmanReading(Reading):
    """The reading of spectral Koopman attention, whose operators depend on keys alone and not on values.

    Args:
        readout: the layer's `Readout`.
        given: its queries, keys and values, `[1, T, H, …]`.
        options: its other arguments.
    """

    kind = "koopman_attention"

    def __init__(self, readout: Any, given: Sequence[Tensor], options: dict[str, Any], chosen: Any = None) -> None:
        self.readout, self.given, self.options = readout, given, options
        self.tokens, all_heads = given[2].shape[1:3]
        self.chosen = list(range(all_heads)) if chosen is None else list(chosen)
        self.heads = len(self.chosen)
        self.sizes = given[2][0].norm(dim=-1).T[self.chosen]
        rank, width = given[1].shape[-1], given[2].shape[-1]
        self.stored = 4 * rank * (2 * rank + width), 0  # G, M and C

    def of(self, heads: Sequence[int]) -> KoopmanReading:
        return KoopmanReading(self.readout, self.given, self.options, [self.chosen[h] for h in heads])

    def respond(self, columns: slice) -> Tensor:
        q, k, v = self.given
        ones = torch.eye(self.tokens, dtype=compute_dtype(v), device=v.device)[:, columns]
        values = ones[None, :, None].expand(1, -1, v.shape[2], -1).contiguous()
        y = self.readout.forward(q, k, values, **{**self.options, "initial_state": None}).y
        return y[0].transpose(0, 1)[self.chosen]

    def left(self, columns: Tensor, cursors: Tensor) -> Tensor:
        g, k = self.options.get("g"), self.given[1]
        if g is None or g.ndim == 3:
            return faded(None if g is None else g[:, :, self.chosen], self.heads, columns, cursors)
        # The sum of values fades on its side of the values at the slowest decay, and on the keys' side at their own.
        g = ((g + g.amax(-1, keepdim=True)) / 2)[:, :, self.chosen]
        return faded_channels(g, k[:, :, self.chosen], columns, cursors)


class TrapezoidReading(Reading):
    """The reading of Mamba-3, where a token writes at the end of its step and at the beginning of the next one.

    What is left of a write is what its decays leave.

    Args:
        integrate: the layer's function of (memory, x, q, k_before, v, g, v_before, …).
        given: these arguments.
        options: its other arguments.
    """

    kind = "trapezoid"

    def __init__(self, integrate: Any, given: Sequence[Any], options: dict[str, Any], chosen: Any = None) -> None:
        self.integrate, self.given, self.options = integrate, given, options
        self.tokens, all_heads = given[4].shape[1:3]
        self.chosen = list(range(all_heads)) if chosen is None else list(chosen)
        self.heads = len(self.chosen)
        self.sizes = given[4][0].norm(dim=-1).T[self.chosen]
        self.stored = 4 * given[3].shape[-1] * given[4].shape[-1], 0

    def of(self, heads: Sequence[int]) -> TrapezoidReading:
        return TrapezoidReading(self.integrate, self.given, self.options, [self.chosen[h] for h in heads])

    def respond(self, columns: slice) -> Tensor:
        v = self.given[4]
        ones = torch.eye(self.tokens, dtype=compute_dtype(v), device=v.device)[:, columns]
        values = ones[None, :, None].expand(1, -1, v.shape[2], -1).contiguous()
        before = F.pad(values[:, :-1], (0, 0, 0, 0, 1, 0))
        options = {**self.options, "skip": None, "z": None}
        y, _ = self.integrate(*self.given[:4], values, self.given[5], before, *self.given[7:], **options)
        return y[0].unflatten(-1, values.shape[2:]).transpose(0, 1)[self.chosen]

    def left(self, columns: Tensor, cursors: Tensor) -> Tensor:
        return faded(self.given[5][:, :, self.chosen], self.heads, columns, cursors)
