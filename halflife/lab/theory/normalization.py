"""The relative energy of channels at different positions, and what a norm over the channels does to it (PoST, B.1).

Rates `[N]` ascend, as in `halflife.lab.theory.approximation`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from halflife.decay.minimax import geometric_rates, taper
from halflife.lab.theory.spectra import energy_as_run, energy_frozen

FORMS = ("static", "theorem", "algorithm")  # no stretching, t_ref = T, and t_ref = 1


def relative_energies(channels: int, length: int, multiples: Sequence[int] = (2, 4, 8, 16)) -> dict[str, Any]:
    """Compare energy ratios beyond the training length T with Proposition B.2.

    The proposition says that the ratio E_i/E_j grows by `(t₂/t₁)^{α_i − α_j}` for large t, and by t₂/t₁ for the slowest
    against the fastest channel. In the theorem's form it holds from t₁ = T on, and for the algorithm (t_ref = 1) it
    holds for the extreme pair. The algorithm's middle channels are slower than T tokens, so that they still fill, and
    their ratio grows faster. Without stretching the ratio is almost constant. A norm over all channels therefore
    shrinks the fast channels by about √(t₂/t₁), although their content is the same. Rates are geometric on [1/T, 1].

    Here t₁ is T, and `multiples` are t₂/T.

    Returns:
        "channels", "length", "multiples"; for each form of `FORMS` a dict with one number for each multiple:
        "frozen" and "as run", the growth of the ratio of the slowest to the fastest channel with the gates of t₂ and
        with those of each position; "middle", the growth "as run" of the ratio of the middle to the fastest channel;
        "claimed middle"; "share", the slowest channel's share of all energy "as run"; and "shrunk", the factor by
        which a norm over all channels shrinks the fastest one between T and t₂. "share at T" is a number.
    """
    rates, alphas, middle = geometric_rates(channels, length), taper(channels), (channels - 1) // 2
    positions = [length, *(m * length for m in multiples)]
    settings = {
        "static": (rates, torch.zeros_like(alphas)), "theorem": (rates * length**alphas, alphas),
        "algorithm": (rates, alphas),
    }  # fmt: skip
    result: dict[str, Any] = {"channels": channels, "length": length, "multiples": list(multiples)}
    for form, (scaled, tapers) in settings.items():
        run = energy_as_run(scaled, tapers, positions)
        frozen = energy_frozen(scaled, tapers, torch.tensor(positions, dtype=torch.float64))
        total = run.sum(0)
        result[form] = {
            "frozen": _growth(frozen[0] / frozen[-1]), "as run": _growth(run[0] / run[-1]),
            "middle": _growth(run[middle] / run[-1]), "claimed middle": [m ** tapers[middle].item() for m in multiples],
            "share": (run[0] / total)[1:].tolist(), "share at T": (run[0] / total)[0].item(),
            "shrunk": ((run[-1] / run[-1, 0]) * total[0] / total).sqrt()[1:].tolist(),
        }  # fmt: skip
    return result


def _growth(ratio: Tensor) -> list[float]:
    """Return the ratios at all positions but the first, relative to the first."""
    return (ratio[1:] / ratio[0]).tolist()
