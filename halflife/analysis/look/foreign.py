"""The readings of models of transformers: each mixer is converted, and reads what the model gives to the original."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn

from halflife import layers
from halflife.analysis.foreign.load import load_foreign
from halflife.analysis.foreign.model import ForeignMixer, ForeignModel
from halflife.analysis.look.observe import Place, Take, reading_of
from halflife.analysis.look.readings import AttentionReading
from halflife.analysis.readable import Readable
from halflife.files import CONFIG_JSON, read_json_object
from halflife.models.convert import MIXERS, take_mixer
from halflife.models.load import check_finite, convertible, load_any

FUNCTION = "sdpa"  # the name of the function in transformers, which its models take by default
AGREEMENT = 0.02  # of outputs, relative to the largest; rounding of bfloat16 stays below


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
    from transformers.core_model_loading import revert_weight_conversion

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
    # transformers changes names of weights when it loads some models, and these are the names in files
    tensors = revert_weight_conversion(model.model, model.model.state_dict())
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


def _keep(
    windows: list[tuple[Tensor, Tensor]], module: nn.Module, given: tuple[Any, ...], options: dict[str, Any],
    output: Any,
) -> None:  # fmt: skip
    """Add what a mixer reads and returns, `[1, T, D]` each."""
    x = given[0] if given else options["hidden_states"]
    windows.append((x, output if isinstance(output, Tensor) else output[0]))


class Window(NamedTuple):
    """One call: queries `[1, H, W, K]`, keys and values `[1, G, S, …]`, outputs `[1, W, H, V]`, scale and window."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    scale: float
    sliding: int | None


@contextmanager
def attentions(model: ForeignModel) -> Iterator[dict[int, list[Window]]]:
    """Give the calls of softmax attention by layer, which are complete when the context ends."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    known = getattr(ALL_ATTENTION_FUNCTIONS, "_global_mapping", {})
    found: dict[int, list[Window]] = {}
    attend = known.get(FUNCTION)

    def record(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
        assert attend is not None
        result = attend(module, q, k, v, mask, **options)
        scale = options.get("scaling") or q.shape[-1] ** -0.5
        sliding = getattr(module, "sliding_window", None)
        found.setdefault(int(module.layer_idx), []).append(Window(q, k, v, result[0], scale, sliding))
        return result

    if attend is None:
        yield found
        return
    with patch.dict(known, {FUNCTION: record}):
        yield found


def attention_reading(windows: list[Window], tokens: int) -> AttentionReading | str:
    """The reading of a layer from its calls, or the reason why it is not shown."""
    if not windows:
        return f"its softmax attention is shared with other layers, or does not run by {FUNCTION}"
    q, o = torch.cat([part.q for part in windows], 2).float(), torch.cat([part.o for part in windows], 1).float()
    *_, last = windows
    if last.k.shape[2] != tokens or q.shape[2] != tokens:
        return "its cache does not keep all tokens"
    heads, groups, window = q.shape[1], last.k.shape[1], last.sliding
    mixer = SimpleNamespace(num_heads=heads, num_kv_heads=groups, window=window)
    cache = {name: x.transpose(1, 2) for name, x in (("keys", last.k), ("values", last.v))}
    visible = None
    if window is not None:
        age = torch.arange(tokens).unsqueeze(-1) - torch.arange(tokens)
        visible = ((age >= 0) & (age < window)).to(q.device)
    q = q.transpose(1, 2) * (last.scale * q.shape[-1] ** 0.5)
    reading = AttentionReading(mixer, (q, cache, None, visible), tokens)
    for head in (0, heads - 1):
        read = reading.of([head]).weights()[0] @ last.v[0, head * groups // heads].float()
        if (read - o[0, :, head]).abs().max() > AGREEMENT * o.abs().max():
            return "its softmax attention has more than queries, keys and a window"
    return reading
