"""The decay values that a model uses on a text, layer by layer (Decay, §5.1, Figures 1 to 9)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halflife.analysis.spectrum import layer_decays
from halflife.decay import Decay
from halflife.models import LanguageModel

QUANTILES = {"q05": 0.05, "q25": 0.25, "median": 0.5, "q75": 0.75, "q95": 0.95}
MAX_VALUES = 1 << 22  # of a layer that quantiles are taken of; beyond, every n-th token counts


@contextmanager
def recording(model: LanguageModel, take: Callable[[int, Tensor], object]) -> Iterator[None]:
    """While it is open, `take(layer, g)` gets the log-decays that each layer uses, `[B, T, H]` or `[B, T, H, K]`."""
    with ExitStack() as stack:
        for layer, decay in layer_decays(model):
            stack.enter_context(_tapped(decay, partial(take, layer)))
        yield


@contextmanager
def _tapped(decay: Decay, take: Callable[[Tensor], object]) -> Iterator[None]:
    """One decay with `take` behind it; a stateful one is read at its `scan`, which does not pass through `forward`."""

    def after_forward(module: Decay, inputs: Any, g: Tensor) -> None:
        take(g)

    if not decay.stateful:
        with decay.register_forward_hook(after_forward):
            yield
        return
    scan = decay.scan

    def tapped_scan(*args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        g, state = scan(*args, **options)
        take(g)
        return g, state

    decay.scan = tapped_scan  # hides the method of the class
    try:
        yield
    finally:
        del decay.scan


@torch.no_grad()
def decay_values(model: LanguageModel, ids: Tensor) -> list[dict[str, Any]]:
    """Statistics of the decays λ = e^g that every layer uses on a text, over tokens, heads and channels.

    Quantiles are values that occur, the lower of two equally near ones, as `torch.median` gives. Above `MAX_VALUES`
    values a layer they, and the mean, are of every n-th token, evenly spread over the positions.

    Args:
        model: any language model.
        ids: sequences `[B, T]`, T ≥ 2, each read from its start.

    Returns:
        One dict a layer with a decay: "layer" (from 0); "median", "mean", "q05", "q25", "q75", "q95" of λ;
        "half_life", tokens after which half of a memory is left at the median λ; "slowest_half_life", that of the
        channel that keeps longest, from the mean of its log-decays over time, which rare resets shorten too (a
        sequence's first token has nothing to forget and is left out); "heads", the median λ of each head, and
        "head_half_lives".

    Raises:
        ValueError: ids that are no sequences of two tokens or more.
    """
    if ids.ndim != 2 or ids.shape[0] < 1 or ids.shape[1] < 2:
        raise ValueError(f"ids must be [B, T] with B ≥ 1 and T ≥ 2; got {tuple(ids.shape)}")
    tallies = {layer: _Tally(ids.shape, math.prod(decay.shape)) for layer, decay in layer_decays(model)}
    with recording(model, lambda layer, g: tallies[layer].take(g)):
        for sequence in ids.to(model.embedding.weight.device).split(1):
            model.hidden(sequence)
    return [{"layer": layer, **tally.summary()} for layer, tally in tallies.items()]


class _Tally:
    """What one layer's log-decays come to, taken a sequence at a time."""

    def __init__(self, shape: tuple[int, ...], channels: int) -> None:
        sequences, length = shape
        self.stride = max(1, math.ceil(sequences * length * channels / MAX_VALUES))
        while math.gcd(self.stride, length) > 1:  # otherwise some positions would never count
            self.stride += 1
        self.kept: list[Tensor] = []
        self.total: Tensor | float = 0.0
        self.seen = self.summed = 0

    def take(self, g: Tensor) -> None:
        """Counts one sequence, `[1, T, H]` or `[1, T, H, K]`."""
        g = g[0].detach().cpu().double()
        self.kept.append(g[-self.seen % self.stride :: self.stride].clone())
        self.total = self.total + g[1:].sum(0)
        self.seen += len(g)
        self.summed += len(g) - 1

    def summary(self) -> dict[str, Any]:
        g = torch.cat(self.kept)
        levels = np.quantile(g.flatten().numpy(), list(QUANTILES.values()), method="lower")
        heads = np.quantile(g.transpose(0, 1).flatten(1).numpy(), 0.5, axis=1, method="lower")
        decays = dict(zip(QUANTILES, np.exp(levels).tolist(), strict=True))
        slowest = torch.as_tensor(self.total / self.summed).exp().max().item()
        medians = np.exp(heads).tolist()
        return {
            "mean": g.exp().mean().item(), **decays,
            "half_life": half_life(decays["median"]), "slowest_half_life": half_life(slowest),
            "heads": medians, "head_half_lives": [half_life(median) for median in medians],
        }  # fmt: skip


def half_life(decay: float) -> float:
    """Tokens after which half of a memory is left, log ½ / log λ: 0 for λ = 0, infinite for λ = 1."""
    if decay <= 0:
        return 0.0
    return math.inf if decay >= 1 else math.log(0.5) / math.log(decay)
