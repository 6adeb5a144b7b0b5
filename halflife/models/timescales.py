"""The decays of a model, layer by layer, and the time-scale of each of their channels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from halflife.decay import Decay
from halflife.layers.longhorn import Longhorn


@runtime_checkable
class HasBlocks(Protocol):
    """A model whose `blocks` have a mixer each: ours, or one of transformers as the analyses read it."""

    blocks: Any


def layer_decays(model: HasBlocks) -> list[tuple[int, Any]]:
    """Return (layer, decay) for every layer whose mixer has a decay."""
    decays = ((i, getattr(block.mixer, "decay", None)) for i, block in enumerate(model.blocks))
    return [(i, decay) for i, decay in decays if decay is not None]


def granularity(model: HasBlocks) -> str:
    """Say what a channel of this model's decays is: "heads", "key channels", both, or "none" without a decay."""
    names = {decay.granularity for _, decay in layer_decays(model)}
    called = [name for granularity, name in (("scalar", "heads"), ("vector", "key channels")) if granularity in names]
    return " and ".join(called) or "none"


@dataclass(frozen=True)
class LayerTimescales:
    """The base time-scales of a layer.

    Attributes:
        layer: the index of the layer, from 0.
        timescales: position (as a string, as in JSON) → the time-scale of each channel in tokens, `[H · K]`.
    """

    layer: int
    timescales: dict[str, list[float]]


@torch.no_grad()
def timescales(model: HasBlocks, positions: Iterable[int]) -> list[LayerTimescales]:
    """Return each layer's base time-scales: the tokens in which a channel decays by 1/e if the layer's input is 0.

    The activation of the decay is then 0, or the bias of the decay's projection if it has one (GLA, and the zigzag of
    RWKV-7 under PoST), and Longhorn's keys are those of its convolution's bias.

    Args:
        model: any language model, also one of transformers.
        positions: token positions, from 1. Only position-adaptive decays differ between positions.

    Returns:
        One entry for each layer with a decay.
    """
    positions, shared = list(positions), {}
    return [
        LayerTimescales(layer, {str(t): _at_zero_input(model.blocks[layer].mixer, decay, t, shared) for t in positions})
        for layer, decay in layer_decays(model)
    ]


def _at_zero_input(mixer: Any, decay: Any, position: int, shared: dict[str, torch.Tensor]) -> list[float]:
    if isinstance(mixer, Longhorn):
        return (1 / mixer.at_rest().abs()).flatten().tolist()
    if not isinstance(decay, Decay) or decay.stateful:
        return decay.timescales(position).flatten().tolist()
    bias = getattr(getattr(getattr(mixer, "decay_proj", None), "up", None), "bias", None)
    f = decay._rest() if bias is None else bias.view(1, 1, *decay.shape)
    more = {"shared": shared} if decay.reads_shared else {}
    return (1 / decay(f, position=f.new_tensor([position], dtype=torch.float32), **more).abs()).flatten().tolist()
