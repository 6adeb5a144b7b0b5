"""Conversion of one Gated DeltaNet mixer of transformers' Qwen3-Next; its attention and experts are not supported."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halflife import layers
from halflife.models.convert.source import (
    SOURCES,
    Config,
    Converted,
    Tensors,
    Translation,
    divide,
    repeat_heads,
    settings,
)

DEFAULTS = {
    "hidden_size": 2048, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6,
}  # fmt: skip
FIXED = {"hidden_act": ("silu", "swish")}
MIXER = ".linear_attn."


@SOURCES.add("qwen3_next")
def from_qwen3_next(config: Config, tensors: Tensors) -> Converted:
    """Refuse the whole model, because halflife lacks some of its layers.

    Raises:
        ValueError: always; the message names the mixers that can be converted.
    """
    raise ValueError(
        "a whole Qwen3-Next has gated attention and experts, which halflife lacks; --layer N converts one Gated "
        f"DeltaNet mixer, with N one of {', '.join(map(str, mixers(tensors)))}"
    )


def mixers(tensors: Tensors) -> dict[int, str]:
    """Return the indices of the Gated DeltaNet layers, with the prefix of each one's tensor names."""
    prefixes = {name.split(MIXER)[0] for name in tensors if MIXER in name}
    return {int(prefix.rsplit(".", 1)[1]): prefix + MIXER for prefix in sorted(prefixes)}


def qwen3_next_mixer(config: Config, tensors: Tensors, layer: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Convert one Gated DeltaNet of a Qwen3-Next.

    halflife has no groups of value heads, so every value head gets a copy of its group's query and key.

    Args:
        config: content of Qwen3-Next's `config.json`.
        tensors: tensors of the whole model or of this layer.
        layer: index of the layer, from 0.

    Returns:
        The options of `layers.build("gated_deltanet", **options)`, and the layer's state dict.

    Raises:
        ValueError: the layer is of another kind, halflife cannot represent a setting, or the tensors do not fit.
    """
    s, prefixes = settings(config, DEFAULTS, FIXED), mixers(tensors)
    if layer not in prefixes:
        choices = ", ".join(map(str, sorted(prefixes)))
        raise ValueError(f"layer {layer} is no Gated DeltaNet; the Gated DeltaNets are {choices}")
    keys, values = s.linear_num_key_heads, s.linear_num_value_heads
    key, value, hidden = s.linear_key_head_dim, s.linear_value_head_dim, s.hidden_size
    group = divide(values, keys, "linear_num_value_heads / linear_num_key_heads")
    options = {
        "hidden_size": hidden, "num_heads": values, "head_dim": key, "value_dim": value,
        "conv_size": s.linear_conv_kernel_dim, "norm_eps": s.rms_norm_eps,
    }  # fmt: skip
    with torch.device("meta"):
        built = layers.build("gated_deltanet", **options)
    of_layer = {name: tensors[name] for name in tensors if name.startswith(prefixes[layer])}
    moved = Translation(built, of_layer, prefixes[layer])
    # The rows are grouped by key head: its query, its key, the values of its group, and the gates of its group.
    qkvz = moved.take("in_proj_qkvz.weight", 2 * keys * key + 2 * values * value, hidden).unflatten(0, (keys, -1))
    q, k, v, z = qkvz.split([key, key, group * value, group * value], 1)
    ba = moved.take("in_proj_ba.weight", 2 * values, hidden).unflatten(0, (keys, -1))
    beta, decay = ba.split([group, group], 1)
    widths = [keys * key, keys * key, values * value]
    taps = moved.take("conv1d.weight", sum(widths), 1, s.linear_conv_kernel_dim).squeeze(1)
    q_taps, k_taps, v_taps = (part.unflatten(0, (keys, -1)) for part in taps.split(widths))
    for name, *qk, value_rows in (("qkv_proj", q, k, v), ("conv", q_taps, k_taps, v_taps)):
        moved.put(f"{name}.weight", torch.cat([*(repeat_heads(x, group) for x in qk), value_rows.flatten(0, 1)]))
    moved.put("gate.proj.weight", z.flatten(0, 1))
    moved.put("beta_proj.weight", beta.flatten(0, 1))
    moved.put("decay_proj.up.weight", decay.flatten(0, 1))
    moved.rename("A_log", "decay.A_log")
    moved.rename("dt_bias", "decay.dt_bias")
    moved.rename("norm.weight", "gate.norm.weight")
    moved.rename("out_proj.weight", "out_proj.weight")
    return options, moved.finish()
