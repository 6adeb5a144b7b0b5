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


def retained_energy(sums: Tensor, lags: Tensor, slow: Tensor | None = None, reset: Tensor | None = None) -> Tensor:
    """Mean over tokens and channels of the squared fraction of a token's write that is left at each lag, `[L, H]`.

    Only tokens that have the longest lag ahead of them count, so that the mean is over the same tokens at each lag.

    Args:
        sums: inclusive sums of log-decays along one sequence, `[T, H, K]`.
        lags: `[L]`, ascending.
        slow: under GateRank, the sums of the slow state, `[T, H, K]`. `sums` are then those of the fast state.
        reset: under GateRank, each token's next reset, `[T, H, K]`, T for none.
    """
    starts = torch.arange(len(sums) - int(lags[-1]))
    starts = starts[:: math.ceil(len(starts) / MAX_STARTS)]
    energies = []
    for lag in lags.tolist():
        ends = starts + lag
        if slow is None or reset is None:
            left = sums[ends] - sums[starts]
        else:  # The fast decay acts up to the reset, the slow decay acts all along, see `ops.gate_rank.masks`.
            until = torch.minimum(reset[starts], ends.view(-1, 1, 1))
            left = slow[ends] - slow[starts] + sums.gather(0, until) - sums[starts]
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
