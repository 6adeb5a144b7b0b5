"""The readings of models of transformers: each mixer is converted, and reads what the model gives to the original."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halflife import layers
from halflife.analysis.foreign.load import load_foreign
from halflife.analysis.foreign.model import ForeignMixer, ForeignModel
from halflife.analysis.look.foreign_attention import AGREEMENT, attention_reading, attentions
from halflife.analysis.look.observe import Place, Take, reading_of
from halflife.analysis.readable import Readable
from halflife.files import CONFIG_JSON, read_json_object
from halflife.models.convert import MIXERS, take_mixer
from halflife.models.load import check_finite, convertible, load_any


def load_for_lens(folder: Path, device: torch.device | str = "cpu") -> Readable:
    """Load a model: ours, one that is converted as a whole, or one of transformers whose mixers are converted.

    The errors are those of `load_any`, `check_finite` and `load_foreign`.
    """
    kind = str(read_json_object(folder / CONFIG_JSON, optional=True).get("model_type"))
    if has_readings(kind) and not convertible(kind):
        return load_foreign(folder, device)
    model = load_any(folder, device)
    check_finite(model, folder)
    return model


def has_readings(model_type: str) -> bool:
    """Whether a lens reads models of another library of this type."""
    return convertible(model_type) or model_type in MIXERS


@torch.no_grad()
def observe_foreign(model: ForeignModel, ids: Tensor, take: Take) -> dict[Place, str]:
    """`observe` for a model of transformers, whose type must be in `MIXERS`. A converted mixer whose outputs differ
    from those of the original is not shown.
    """
    config = model.model.config.get_text_config()
    if config.model_type not in MIXERS:
        choices = ", ".join(MIXERS)
        raise ValueError(f"the mixers of a {config.model_type} are not converted; a lens converts those of {choices}")
    refused: dict[Place, str] = {}
    seen: dict[int, list[tuple[Tensor, Tensor]]] = {}
    with ExitStack() as hooks:
        softmax = hooks.enter_context(attentions(model))
        for layer, block in enumerate(model.blocks):
            if block.mixer.decay is None:
                if not _has_attention(block.mixer):
                    refused[Place(layer)] = " + ".join(block.mixer.kinds) or "it has no mixer"
                continue
            hook = partial(_keep, seen.setdefault(layer, []))
            hooks.enter_context(block.mixer.decay.mixer.register_forward_hook(hook, with_kwargs=True))
        model.hidden(ids.view(1, -1).to(model.embedding.weight.device))
    tensors = _as_saved(model)
    for layer, windows in seen.items():
        x, y = (torch.cat(parts, 1).float() for parts in zip(*windows, strict=True))
        try:
            name, options, weights = take_mixer(config.model_type, config.to_dict(), tensors, layer)
        except ValueError as error:
            refused[Place(layer)] = f"its mixer is not converted ({error})"
            continue
        mixer = layers.build(name, **options).to(x.device).eval()
        mixer.load_state_dict({key: value.float() for key, value in weights.items()})
        output, found = reading_of(mixer, x)
        if (output - y).abs().max() > AGREEMENT * y.abs().max() or isinstance(found, str):
            refused[Place(layer)] = found if isinstance(found, str) else "its converted mixer gives other outputs"
        else:
            take(Place(layer), found)
        windows.clear()
    for layer, block in enumerate(model.blocks):
        if not _has_attention(block.mixer):
            continue
        place = Place(layer, "" if block.mixer.decay is None else "attention")
        found = attention_reading(softmax.pop(layer, []), ids.numel())
        if isinstance(found, str):
            refused[place] = found
        else:
            take(place, found)
    return refused


def _has_attention(mixer: ForeignMixer) -> bool:
    return any(kind in ("softmax attention", "sliding-window attention") for kind in mixer.kinds)


def _as_saved(model: ForeignModel) -> dict[str, Tensor]:
    """The weights by the names that they have in files, which transformers changes when it loads some models."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model.model, model.model.state_dict())


def _keep(
    windows: list[tuple[Tensor, Tensor]], module: nn.Module, given: tuple[Any, ...], options: dict[str, Any],
    output: Any,
) -> None:  # fmt: skip
    """Add what a mixer reads and returns, `[1, T, D]` each."""
    x = given[0] if given else options["hidden_states"]
    windows.append((x, output if isinstance(output, Tensor) else output[0]))
