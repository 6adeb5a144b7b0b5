"""The decay spectrum of a trained model: its distinct time-scales, its wasted channels, and PoST's learned taper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from halflife.analysis.decays import LayerDecays, measure_decays
from halflife.analysis.readable import Progress, Readable, ignore
from halflife.analysis.records import Record
from halflife.decay import PoST
from halflife.decay.minimax import taper
from halflife.models.timescales import layer_decays, timescales

LENGTH_MULTIPLES = (1, 4, 16)  # of the training length T, the positions of base spectra besides 1
LIMIT_ERROR = 1e-5  # relative float32 error of a time-scale that equals a limit


@dataclass(frozen=True)
class Spectrum(Record):
    """The time-scales of a layer's channels at a position, or on a text."""

    timescales: list[float]  # the tokens in which each channel decays by 1/e, `[N]`
    modes: float  # the effective number of distinct time-scales, from 1 to N (`effective_modes`)
    # the fraction of channels with a time-scale beyond the position t. These channels have forgotten nothing at t, they
    # sum up all their inputs. PoST, Prop. 4.9, counts the others as N log t / log T.
    too_slow: float
    too_fast: float  # the fraction of channels with a time-scale below 1 token


@dataclass(frozen=True)
class Taper(Record):
    """PoST's taper after training."""

    learned: list[float]  # α_k, `[N]`
    ideal: list[float]  # (N−k)/(N−1), `[N]`
    deviation: float  # the largest difference d of the two
    # the least ε for which the paper's `spectra.taper_bound` allows all differences, `d / (2q + d)` with q =
    # (N−k)/(N−1). It says how uneven the information of octaves would have to be for this taper to be best.
    slack: float
    sharp_slack: float  # the same for the sharp bound, `d / (2q (1−q) + d (1 − 2 min(q, 1−q)))`


@dataclass(frozen=True, kw_only=True)
class LayerSpectrum(Record):
    """The spectra of a layer. In `to_dict` the fields of `decays` stand beside the others."""

    layer: int  # the index of the layer, from 0
    num_heads: int  # H
    decays: LayerDecays | None = None  # what `measure_decays` gives for this layer. None without a text.
    taper: Taper | None = None  # PoST's taper. None without PoST, or if its time-scales are not stretched.
    # position (as a string) → the base spectrum there. With a text also "text" and, under GateRank, "slow text": the
    # spectrum of the channels' mean rates on the text, at the text's length.
    spectra: dict[str, Spectrum] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        data = super().to_dict()
        head = {name: data.pop(name) for name in ("layer", "num_heads")}
        return head | data.pop("decays", {}) | data


@dataclass(frozen=True)
class ModelSpectrum(Record):
    """The spectra of all layers with a decay."""

    positions: list[int]  # the positions of the base spectra
    layers: list[LayerSpectrum]  # one entry for each layer with a decay. It is empty for a model without a decay.


def model_spectrum(
    model: Readable, ids: Tensor | None = None, positions: Sequence[int] | None = None, progress: Progress = ignore
) -> ModelSpectrum:
    """Return the base spectrum of every layer with a decay and, given a text, the spectrum on the text.

    Args:
        model: any language model, also one of transformers.
        ids: a text `[B, T]`, see `measure_decays`. None gives base spectra alone.
        positions: positions of base spectra, from 1. None means `standard_positions` of the training length that PoST
            knows, or of the text's length.
        progress: see `measure_decays`.
    """
    if positions is None:
        positions = standard_positions(post_length(model) or (None if ids is None else ids.shape[1]))
    on_text = {row.layer: row for row in ([] if ids is None else measure_decays(model, ids, progress))}
    layers = []
    for base, (layer, decay) in zip(timescales(model, positions), layer_decays(model), strict=True):
        spectra = {at: spectrum_at(torch.tensor(scales), int(at)) for at, scales in base.timescales.items()}
        if ids is not None:
            states = {"text": on_text[layer], "slow text": on_text[layer].slow}
            for name, state in ((name, state) for name, state in states.items() if state is not None):
                spectra[name] = spectrum_at(1 / torch.tensor(state.rates, dtype=torch.float64), ids.shape[1])
        taper = taper_report(decay) if isinstance(decay, PoST) and decay.stretch else None
        layers.append(LayerSpectrum(
            layer=layer, num_heads=decay.num_heads, decays=on_text.get(layer), taper=taper, spectra=spectra
        ))  # fmt: skip
    return ModelSpectrum(list(positions), layers)


def standard_positions(length: int | None) -> tuple[int, ...]:
    """Return the positions 1, T, 4T and 16T, or 1 alone if the length T is unknown."""
    return (1,) if length is None else (1, *(times * length for times in LENGTH_MULTIPLES))


def training_position(positions: Sequence[int]) -> int:
    """Return T of `standard_positions`, the second position, or the first position if it is alone."""
    return positions[:2][-1]


def post_length(model: Readable) -> int | None:
    """Return the training length that the model's PoST was given, or None without PoST."""
    return next((decay.train_length for _, decay in layer_decays(model) if isinstance(decay, PoST)), None)


def coherence(log_rates: Tensor) -> Tensor:
    """Return the spectral coherence of channels, `sech(|p_i − p_j| / 2)`, 1 on the diagonal: `[N]` → `[N, N]`.

    This is the cosine between two decaying exponentials on [0, ∞) with rates e^{p_i} and e^{p_j}. PoST, Def. 2.3, has
    rates in place of log-rates. If all gaps are at least δ, it is at most sech(δ/2) off the diagonal (Prop. 4.5).
    """
    return 1 / torch.cosh((log_rates.unsqueeze(-1) - log_rates).abs() / 2)


def effective_modes(timescales: Tensor) -> float:
    """The effective number of distinct exponentials, `(tr C)² / tr C² = N² / Σ_ij μ_ij²`, with C their `coherence`.

    This is the participation ratio of the eigenvalues of C. It is N if no two channels resemble each other, 1 if all
    channels are equal, and between 1 and N otherwise, because 0 < μ_ij ≤ 1 = μ_ii.

    Args:
        timescales: `[N]`, in tokens.
    """
    log_rates = -torch.as_tensor(timescales, dtype=torch.float64).clamp(1e-30, 1e30).log()
    return (len(log_rates) ** 2 / coherence(log_rates).square().sum()).item()


def spectrum_at(scales: Tensor, position: int) -> Spectrum:
    """Return the spectrum of time-scales `[N]` (tokens) at a position."""
    return Spectrum(
        timescales=scales.tolist(), modes=effective_modes(scales),
        too_slow=(scales > position * (1 + LIMIT_ERROR)).double().mean().item(),
        too_fast=(scales < 1 - LIMIT_ERROR).double().mean().item(),
    )  # fmt: skip


@torch.no_grad()
def taper_report(decay: PoST) -> Taper:
    """Compare the learned taper of a PoST decay with the ideal one."""
    learned = decay.taper().double().cpu()
    q = taper(len(learned))
    d = (learned - q).abs()
    slacks = (d / (2 * q + d), d / (2 * q * (1 - q) + d * (1 - 2 * torch.minimum(q, 1 - q))))
    paper, sharp = (torch.where(d > 0, slack, 0).amax().item() for slack in slacks)
    return Taper(learned.tolist(), q.tolist(), d.amax().item(), slack=paper, sharp_slack=sharp)
