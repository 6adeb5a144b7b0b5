"""What a trained model's decay spectrum is worth: what it can remember, for how long, and which channels do nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from halflife.analysis.decays import decay_values
from halflife.analysis.spectrum import effective_modes, layer_decays, timescales
from halflife.decay import PoST
from halflife.models import LanguageModel
from halflife.theory import approximation

MULTIPLES = (1, 4, 16)  # of the training length T, at which a spectrum is looked at
EDGE = 1e-5  # by which float32 may move a time-scale that stands on a limit


def model_spectrum(
    model: LanguageModel, ids: Tensor | None = None, positions: Sequence[int] | None = None
) -> dict[str, Any]:
    """The base spectrum of every layer with a decay and, given a text, what the layer makes of it.

    A *spectrum* is a dict of a place: "timescales", tokens in which each channel decays by 1/e, flat; "modes", how many
    distinct ones these come to (`effective_modes`), of all channels; and the shares of channels that are wasted there:
    "too_slow", time-scales beyond the position t (at t they have forgotten nothing: they sum all that they were given;
    PoST, Prop. 4.9, whose N log t / log T counts the others), and "too_fast", below 1 token.

    Args:
        model: any language model.
        ids: a text `[B, T]`, see `decay_values`; None shows base spectra alone.
        positions: of base spectra, from 1; None means `standard_positions` of the training length that PoST knows, or
            of the text's length.

    Returns:
        "positions", and "layers", a dict a layer: "layer" (from 0), "num_heads", and "spectra", position → spectrum.
        With a text also what `decay_values` gives, and the spectra "text" and, under GateRank, "slow text", those of
        the channels' mean rates there, t the text's length. With PoST also "taper", see `taper_report`. "layers" is
        empty for a model without a decay.

    Raises:
        ValueError: see `decay_values`.
    """
    if positions is None:
        positions = standard_positions(post_length(model) or (None if ids is None else ids.shape[1]))
    rows = {row["layer"]: row for row in ([] if ids is None else decay_values(model, ids))}
    layers = []
    for base, (layer, decay) in zip(timescales(model, positions), layer_decays(model), strict=True):
        spectra = {at: spectrum_at(torch.tensor(scales), int(at)) for at, scales in base["timescales"].items()}
        if ids is not None:
            row = rows[layer]
            for name, state in {"text": row, "slow text": row.get("slow")}.items():
                if state is not None:
                    spectra[name] = spectrum_at(1 / torch.tensor(state["rates"], dtype=torch.float64), ids.shape[1])
        taper = {"taper": taper_report(decay)} if isinstance(decay, PoST) else {}
        layers.append(
            {"layer": layer, "num_heads": decay.num_heads, **rows.get(layer, {}), **taper, "spectra": spectra}
        )
    return {"positions": list(positions), "layers": layers}


def standard_positions(length: int | None) -> tuple[int, ...]:
    """1, T, 4T and 16T; 1 alone where T is unknown."""
    return (1,) if length is None else (1, *(times * length for times in MULTIPLES))


def training_position(shown: dict[str, Any]) -> int:
    """The second of the positions that `model_spectrum` gives, T by default; the first if it is alone."""
    return shown["positions"][:2][-1]


def post_length(model: LanguageModel) -> int | None:
    """The training length that the model's PoST was given, if it has one."""
    return next((decay.train_length for _, decay in layer_decays(model) if isinstance(decay, PoST)), None)


def spectrum_at(scales: Tensor, position: int) -> dict[str, Any]:
    """The spectrum of time-scales `[N]` (tokens) at a position; see `model_spectrum`."""
    return {
        "timescales": scales.tolist(), "modes": effective_modes(scales),
        "too_slow": (scales > position * (1 + EDGE)).double().mean().item(),
        "too_fast": (scales < 1 - EDGE).double().mean().item(),
    }  # fmt: skip


@torch.no_grad()
def taper_report(decay: PoST) -> dict[str, Any]:
    """What a PoST has made of its taper.

    Returns:
        "learned" and "ideal", α_k and (N−k)/(N−1) `[N]`; "deviation", the largest difference d; "slack" and
        "sharp_slack", the least ε for which `spectra.taper_bound`, the paper's and the sharp one, allows all
        differences: how uneven the information of octaves would have to be for such a taper to be the best,
        `d / (2q + d)` and `d / (2q (1−q) + d (1 − 2 min(q, 1−q)))` with q = (N−k)/(N−1).
    """
    learned = decay.taper().double().cpu()
    q = approximation.taper(len(learned))
    d = (learned - q).abs()
    slacks = (d / (2 * q + d), d / (2 * q * (1 - q) + d * (1 - 2 * torch.minimum(q, 1 - q))))
    paper, sharp = (torch.where(d > 0, slack, 0).amax().item() for slack in slacks)
    return {
        "learned": learned.tolist(), "ideal": q.tolist(), "deviation": d.amax().item(),
        "slack": paper, "sharp_slack": sharp,
    }  # fmt: skip
