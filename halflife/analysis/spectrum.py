"""The decay spectrum of a model: the time-scale of every channel."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halflife.analysis.foreign.mixer_decay import MixerDecay
from halflife.analysis.readable import Readable
from halflife.analysis.records import Record
from halflife.decay import Decay
from halflife.theory.spectra import coherence


def layer_decays(model: Readable) -> list[tuple[int, Decay | MixerDecay]]:
    """Return (layer, decay) for every layer whose mixer has a decay."""
    decays = ((i, getattr(block.mixer, "decay", None)) for i, block in enumerate(model.blocks))
    return [(i, decay) for i, decay in decays if decay is not None]


def granularity(model: Readable) -> str:
    """Say what a channel of this model's decays is: "heads", "key channels", both, or "none" without a decay."""
    names = {decay.granularity for _, decay in layer_decays(model)}
    called = [name for granularity, name in (("scalar", "heads"), ("vector", "key channels")) if granularity in names]
    return " and ".join(called) or "none"


@dataclass(frozen=True)
class LayerTimescales(Record):
    """The base time-scales of a layer.

    Attributes:
        layer: the index of the layer, from 0.
        timescales: position (as a string, as in JSON) → the time-scale of each channel in tokens, `[H · K]`.
    """

    layer: int
    timescales: dict[str, list[float]]


@torch.no_grad()
def timescales(model: Readable, positions: Iterable[int]) -> list[LayerTimescales]:
    """Return each layer's base time-scales: the tokens in which a channel decays by 1/e if the layer's input is 0.

    The activation of the decay is then 0, or the bias of the decay's projection if it has one (GLA).

    Args:
        model: any language model, also one of transformers.
        positions: token positions, from 1. Only position-adaptive decays differ between positions.

    Returns:
        One entry for each layer with a decay.
    """
    positions = list(positions)
    return [
        LayerTimescales(layer, {str(t): _at_zero_input(model.blocks[layer].mixer, decay, t) for t in positions})
        for layer, decay in layer_decays(model)
    ]


def _at_zero_input(mixer: Any, decay: Decay | MixerDecay, position: int) -> list[float]:
    projection = getattr(mixer, "decay_proj", None)
    if projection is None or projection.up.bias is None or isinstance(decay, MixerDecay) or decay.stateful:
        return decay.timescales(position).flatten().tolist()
    bias = projection.up.bias.view(1, 1, *decay.shape)
    return (-1 / decay(bias, position=bias.new_tensor([position], dtype=torch.float32))).flatten().tolist()


def effective_modes(timescales: Tensor) -> float:
    """The effective number of distinct exponentials, `(tr C)² / tr C² = N² / Σ_ij μ_ij²`, with C their `coherence`.

    This is the participation ratio of the eigenvalues of C. It is N if no two channels resemble each other, 1 if all
    channels are equal, and between 1 and N otherwise, because 0 < μ_ij ≤ 1 = μ_ii.

    Args:
        timescales: `[N]`, in tokens.
    """
    log_rates = -torch.as_tensor(timescales, dtype=torch.float64).clamp(1e-30, 1e30).log()
    return (len(log_rates) ** 2 / coherence(log_rates).square().sum()).item()
