"""The horizon of a state: the lag at which what a token wrote has faded to 1/e, along a text."""

from __future__ import annotations

import math

import torch
from torch import Tensor

MAX_STARTS = 256  # tokens of a sequence whose fading is followed
LAGS_PER_OCTAVE = 8


def horizon_lags(length: int) -> Tensor:
    """Lags from 1 to half of the length, eight in each octave, `[L]`."""
    longest = length // 2
    octaves = math.log2(longest) if longest > 1 else 0
    steps = torch.arange(0, LAGS_PER_OCTAVE * octaves + 1) / LAGS_PER_OCTAVE
    return torch.cat([(2**steps).round().clamp(max=longest), torch.tensor([float(longest)])]).unique().long()


def next_reset(resets: Tensor) -> Tensor:
    """The first reset strictly after each token, or T if there is none: booleans `[T, H]` → indices `[T, H]`."""
    length = len(resets)
    at = torch.where(resets, torch.arange(length).unsqueeze(-1), length)
    return torch.cat([at[1:], torch.full_like(at[:1], length)]).flip(0).cummin(0).values.flip(0)


def write_tokens(length: int, lags: Tensor) -> Tensor:
    """The tokens of a sequence whose fading is followed, `[S]`.

    All have the longest lag ahead of them, so that the mean is over the same tokens at each lag.
    """
    starts = torch.arange(length - int(lags[-1]))
    return starts[:: math.ceil(len(starts) / MAX_STARTS)].contiguous()


class RetainedEnergy:
    """Sum up the squared fraction of a token's write that is left at each lag, from a sequence that comes in pieces.

    The lags `[L]` are ascending. `total` is the mean over tokens and channels, `[L, H]`, once all `length` tokens came.
    """

    def __init__(self, length: int, lags: Tensor) -> None:
        self.lags, self.starts = lags, write_tokens(length, lags)
        self.sums_at_starts: Tensor | None = None
        self.total: Tensor | float = 0.0

    def add(self, sums: Tensor, first: int) -> None:
        """Add the next piece, which `first` tokens precede.

        Its inclusive sums of log-decays from the start of the sequence are `sums`, `[W, H, K]`.
        """
        if self.sums_at_starts is None:
            self.sums_at_starts = sums.new_zeros(len(self.starts), *sums.shape[1:])
        begins = self._inside(self.starts, first, len(sums))
        self.sums_at_starts[begins] = sums[self.starts[begins] - first]
        energies = []
        for lag in self.lags.tolist():
            ends = self._inside(self.starts + lag, first, len(sums))
            left = sums[self.starts[ends] + lag - first] - self.sums_at_starts[ends]
            energies.append((2 * left).exp().mean(2).sum(0))
        self.total = self.total + torch.stack(energies) / len(self.starts)

    @staticmethod
    def _inside(tokens: Tensor, first: int, count: int) -> slice:
        """The part of ascending tokens that lies in a piece."""
        low, high = torch.searchsorted(tokens, torch.tensor([first, first + count])).tolist()
        return slice(low, high)


def retained_energy(fast: Tensor, lags: Tensor, slow: Tensor, reset: Tensor, entry: int = 0) -> Tensor:
    """The energy of `RetainedEnergy` under GateRank, of both states together, `[L, H]`, at ascending `lags [L]`.

    `fast` and `slow` are inclusive sums of the log-decays of each state along one sequence, and `reset` is each token's
    next reset, T for none: `[T, H, K]` each. A write is in the fast state after `entry` tokens, 1 in Mamba-3.
    """
    starts = write_tokens(len(fast), lags)
    energies = []
    for lag in lags.tolist():
        # The fast decay acts up to the reset, the slow decay acts all along, see `ops.gate_rank.masks`.
        ends = starts + lag
        until = torch.minimum(reset[starts + entry], ends.view(-1, 1, 1))
        left = slow[ends] - slow[starts + entry] + fast.gather(0, until) - fast[starts]
        energies.append((2 * left).exp().mean((0, 2)))
    return torch.stack(energies)


def horizon(lags: Tensor, energy: Tensor) -> float:
    """The lag at which `energy [L]` falls to e^{−2}, with its logarithm interpolated linearly between lags.

    At lag 0 the energy is 1. The horizon is infinite if the energy never falls so far, and NaN where the energy is NaN.
    """
    if energy.isnan().any():
        return math.nan
    x, logs = [0, *lags.tolist()], [0.0, *(energy.log() / 2).tolist()]
    last = next((i for i, level in enumerate(logs) if level <= -1), None)
    if last is None:
        return math.inf
    share = (-1 - logs[last - 1]) / (logs[last] - logs[last - 1])
    return x[last - 1] + share * (x[last] - x[last - 1])
