"""PoST that starts from the decay rates of a trained model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from halflife.decay import PoST
from halflife.models import LanguageModel
from halflife.models.timescales import HasBlocks, layer_decays, timescales


@dataclass(frozen=True)
class PostFit:
    """The fit error between the spectra of PoST in a model and the rates of a source.

    Attributes:
        layers: the source's layer of each layer with PoST.
        channels: the numbers of channels, the source's and those with PoST, in the first layer.
        error: the largest difference between a decay λ = e^{−rate} of the source and the decay at the same quantile of
            the layer with PoST.
    """

    layers: tuple[int, ...]
    channels: tuple[int, int]
    error: float


def resting_rates(model: HasBlocks, folder: Path) -> list[Tensor]:
    """Return the rates −log λ of a model's layers at zero input, in rising order and before any stretch: `[channels]`.

    Args:
        model: a model of ours, or one of transformers that is read in place (`analysis.survey.load_readable`).
        folder: its folder, for messages.

    Raises:
        ValueError: no layer has a decay, or a layer has a rate that is not positive and finite.
    """
    rates = _rates(model)
    if not rates:
        raise ValueError(f"no layer of the model in {folder} has a decay, whose rates --post-fit could read")
    for (layer, _), rate in zip(layer_decays(model), rates, strict=True):
        if not (rate.isfinite().all() and (rate > 0).all()):
            raise ValueError(
                f"layer {layer} of the model in {folder} has decay rates from {rate.min():g} to {rate.max():g}; "
                "--post-fit needs positive and finite ones"
            )
    return rates


@torch.no_grad()
def _rates(model: HasBlocks) -> list[Tensor]:
    at_rest = timescales(model, [1])
    return [
        (
            decay.base_log_rate().exp() if isinstance(decay, PoST) else 1 / torch.tensor(found.timescales["1"])
        ).double().flatten().sort().values
        for (_, decay), found in zip(layer_decays(model), at_rest, strict=True)
    ]  # fmt: skip


@torch.no_grad()
def fit_post(model: LanguageModel, rates: Sequence[Tensor]) -> PostFit:
    """Set the spectrum of every PoST layer of a model to the rates of a source, as `PoST.from_rates`.

    The layers of the source are spread evenly over those with PoST. If the numbers of channels differ, the log-rates
    are interpolated between the quantiles. Rates above the limit of a bounded decay become its `fastest_rate`.

    Args:
        model: a model with PoST.
        rates: positive rates in rising order, `[channels]`, for each layer of the source with a decay.

    Raises:
        ValueError: no layer of the model has PoST.
    """
    targets = [decay for decay in _post_layers(model) if decay.channels > 1 or len(rates[0]) == 1]
    if not targets:
        raise ValueError(f"--post-fit needs layers with PoST and several channels, and {model.config.name} has none")
    spread = torch.linspace(0, len(rates) - 1, len(targets)).round().int().tolist()
    errors = []
    for post, source in zip(targets, spread, strict=True):
        start = quantiles(rates[source].log(), post.channels).exp()
        post.set_rates(start.clamp(max=post.decay.fastest_rate) if post.decay.bounded else start)
        reached = post.base_log_rate().double().flatten().sort().values
        reached = quantiles(reached, len(rates[source])).exp()
        errors.append(((-reached).exp() - (-rates[source]).exp()).abs().max().item())
    return PostFit(tuple(spread), (len(rates[spread[0]]), targets[0].channels), max(errors))


def plan_fit(model: LanguageModel, rates: Sequence[Tensor]) -> PostFit:
    """Return what `fit_post` will give for a model on the meta device; its decays get memory, its matrices none."""
    for post in _post_layers(model):
        post.to_empty(device="cpu")
        post.reset_parameters()
    return fit_post(model, rates)


def _post_layers(model: nn.Module) -> list[PoST]:
    return [module for module in model.modules() if isinstance(module, PoST)]


def quantiles(x: Tensor, count: int) -> Tensor:
    """Interpolate sorted values `[M]` at `count` evenly spaced quantiles, from the least to the greatest."""
    if count == len(x):
        return x
    at = torch.linspace(0, len(x) - 1, count, dtype=x.dtype)
    low = at.floor().long().clamp(max=max(len(x) - 2, 0))
    high = (low + 1).clamp(max=len(x) - 1)
    return torch.lerp(x[low], x[high], at - low)
