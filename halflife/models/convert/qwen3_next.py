"""The Gated DeltaNet mixer of transformers' Qwen3-Next. The rest of that model, attention and experts, is not ours."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halflife import layers
from halflife.models.convert.source import SOURCES, Config, Converted, Tensors, Translation, divide, settings, spread

DEFAULTS = {
    "hidden_size": 2048, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6,
}  # fmt: skip
FIXED = {"hidden_act": ("silu", "swish")}
MIXER = ".linear_attn."


@SOURCES.add("qwen3_next")
def from_qwen3_next(config: Config, tensors: Tensors) -> Converted:
    """Refuses: the whole model has layers that halflife has not.

    Raises:
        ValueError: always; it says what can be done instead.
    """
    raise ValueError(
        "a whole Qwen3-Next has gated attention and experts, which halflife has not; --layer N takes one Gated "
        f"DeltaNet mixer, N one of {', '.join(map(str, mixers(tensors)))}"
    )


def mixers(tensors: Tensors) -> dict[int, str]:
    """The layers that are Gated DeltaNets, and the prefix of each one's tensors."""
    prefixes = {name.split(MIXER)[0] for name in tensors if MIXER in name}
    return {int(prefix.rsplit(".", 1)[1]): prefix + MIXER for prefix in sorted(prefixes)}


def qwen3_next_mixer(config: Config, tensors: Tensors, layer: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """One Gated DeltaNet of a Qwen3-Next: `layers.build("gated_deltanet", **options)` and its state dict.

    Every value head gets a query and a key of its own: halflife has no groups of value heads.

    Args:
        config: Qwen3-Next's `config.json`.
        tensors: all of the model's, or those of this layer.
        layer: which, from 0.

    Raises:
        ValueError: a layer of another kind, a setting that halflife cannot represent, or tensors that do not fit.
    """
    s, found = settings(config, DEFAULTS, FIXED), mixers(tensors)
    if layer not in found:
        raise ValueError(f"layer {layer} is no Gated DeltaNet; those are {', '.join(map(str, sorted(found)))}")
    keys, values = s.linear_num_key_heads, s.linear_num_value_heads
    key, value, hidden = s.linear_key_head_dim, s.linear_value_head_dim, s.hidden_size
    group = divide(values, keys, "linear_num_value_heads / linear_num_key_heads")
    options = {
        "hidden_size": hidden, "num_heads": values, "head_dim": key, "value_dim": value,
        "conv_size": s.linear_conv_kernel_dim, "norm_eps": s.rms_norm_eps,
    }  # fmt: skip
    with torch.device("meta"):
        built = layers.build("gated_deltanet", **options)
    own = {name: tensors[name] for name in tensors if name.startswith(found[layer])}
    moved = Translation(built, own, found[layer])
    # Rows of one key head after the other: its query, its key, and the values and gates of its group.
    qkvz = moved.take("in_proj_qkvz.weight", 2 * keys * key + 2 * values * value, hidden).unflatten(0, (keys, -1))
    q, k, v, z = qkvz.split([key, key, group * value, group * value], 1)
    ba = moved.take("in_proj_ba.weight", 2 * values, hidden).unflatten(0, (keys, -1))
    beta, decay = ba.split([group, group], 1)
    widths = [keys * key, keys * key, values * value]
    taps = moved.take("conv1d.weight", sum(widths), 1, s.linear_conv_kernel_dim).squeeze(1)
    q_taps, k_taps, v_taps = (part.unflatten(0, (keys, -1)) for part in taps.split(widths))
    moved.put("qkv_proj.weight", torch.cat([spread(q, group), spread(k, group), v.flatten(0, 1)]))
    moved.put("conv.weight", torch.cat([spread(q_taps, group), spread(k_taps, group), v_taps.flatten(0, 1)]))
    moved.put("gate.proj.weight", z.flatten(0, 1))
    moved.put("beta_proj.weight", beta.flatten(0, 1))
    moved.put("decay_proj.up.weight", decay.flatten(0, 1))
    moved.rename("A_log", "decay.A_log")
    moved.rename("dt_bias", "decay.dt_bias")
    moved.rename("norm.weight", "gate.norm.weight")
    moved.rename("out_proj.weight", "out_proj.weight")
    return options, moved.finish()
