"""The decay spectrum of a model: how long each channel remembers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from halflife.decay import Decay
from halflife.models import LanguageModel


def layer_decays(model: LanguageModel) -> list[tuple[int, Decay]]:
    """(layer, decay) of every layer whose mixer has a decay."""
    found = ((i, getattr(block.mixer, "decay", None)) for i, block in enumerate(model.blocks))
    return [(i, decay) for i, decay in found if decay is not None]


def granularity(model: LanguageModel) -> str:
    """What a channel of this model's decay is: "heads", "key channels", or "none"."""
    found = {decay.granularity for _, decay in layer_decays(model)}
    return {"scalar": "heads", "vector": "key channels"}[found.pop()] if found else "none"


@torch.no_grad()
def timescales(model: LanguageModel, positions: Iterable[int]) -> list[dict[str, Any]]:
    """Each layer's base time-scales: tokens after which a channel has decayed by 1/e, at zero activation.

    Args:
        model: any language model.
        positions: token positions, from 1; only position-adaptive decays differ between them.

    Returns:
        One dict a layer with a decay: `{"layer": index, "timescales": {position: [channels]}}`.
    """
    positions = list(positions)
    return [
        {"layer": layer, "timescales": {str(t): decay.timescales(t).flatten().tolist() for t in positions}}
        for layer, decay in layer_decays(model)
    ]


def coherence(log_rates: Tensor) -> Tensor:
    """Spectral coherence of channels: `sech(|p_i − p_j| / 2)`, 1 on the diagonal: `[N]` → `[N, N]`.

    The cosine between two decaying exponentials on [0, ∞) with rates e^{p_i}, e^{p_j} (PoST, Def. 2.3, which takes
    rates, not log-rates). With all gaps at least δ it is at most sech(δ/2) off the diagonal (Prop. 4.5).
    """
    return 1 / torch.cosh((log_rates.unsqueeze(-1) - log_rates).abs() / 2)
