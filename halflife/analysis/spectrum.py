"""The decay spectrum of a model: how long each channel remembers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from halflife.decay import Decay
from halflife.models import LanguageModel
from halflife.theory.spectra import coherence


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
    """Each layer's base time-scales: tokens after which a channel has decayed by 1/e, when the layer's input is 0.

    That is at zero activation, or at the bias that the decay's projection adds (GLA's).

    Args:
        model: any language model.
        positions: token positions, from 1; only position-adaptive decays differ between them.

    Returns:
        One dict a layer with a decay: `{"layer": index, "timescales": {position: [channels]}}`.
    """
    positions = list(positions)
    return [
        {"layer": layer, "timescales": {str(t): _at_rest(model.blocks[layer].mixer, decay, t) for t in positions}}
        for layer, decay in layer_decays(model)
    ]


def _at_rest(mixer: Any, decay: Decay, position: int) -> list[float]:
    projection = getattr(mixer, "decay_proj", None)
    if projection is None or projection.up.bias is None or decay.stateful:
        return decay.timescales(position).flatten().tolist()
    rest = projection.up.bias.view(1, 1, *decay.shape)
    return (-1 / decay(rest, position=rest.new_tensor([position], dtype=torch.float32))).flatten().tolist()


def effective_modes(timescales: Tensor) -> float:
    """How many distinct exponentials channels come to: `(tr C)² / tr C² = N² / Σ_ij μ_ij²`, C their `coherence`.

    The participation ratio of C's eigenvalues: N for channels that have nothing in common, 1 when all are equal, and
    in between whatever else, because 0 < μ_ij ≤ 1 = μ_ii.

    Args:
        timescales: `[N]`, in tokens.
    """
    log_rates = -torch.as_tensor(timescales, dtype=torch.float64).clamp(1e-30, 1e30).log()
    return (len(log_rates) ** 2 / coherence(log_rates).square().sum()).item()
