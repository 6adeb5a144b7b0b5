"""Conversion of one mixer out of a model of transformers whose other layers halflife lacks.

| mixer | models |
|---|---|
| Gated DeltaNet | qwen3_next, qwen3_5_text, qwen3_5_moe_text, olmo_hybrid |
| Kimi Delta Attention | kimi_linear |
| Mamba-2 | falcon_h1, bamba, granitemoehybrid, nemotron_h, zamba2 |
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from halflife import layers
from halflife.models.convert import hybrids
from halflife.models.convert.mamba2 import mamba2_rules, step_limits
from halflife.models.convert.rules import Rule, Tensors, convert_from, copy, divide, join_convolutions, qkv_rules
from halflife.models.convert.source import Config, settings
from halflife.registry import Registry

# A layer's name and options, and the rules of its tensors.
Parsed = tuple[str, dict[str, Any], Iterable[Rule]]
# A layer's name and options, and its state dict.
Converted = tuple[str, dict[str, Any], dict[str, Tensor]]

MIXERS: Registry[Callable[[Config], Parsed]] = Registry("model with mixers")

GATED_DELTANET = {
    "hidden_size": 4096, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6,
}  # fmt: skip
SILU = {"hidden_act": ("silu", "swish")}
# The names of Mamba-2's sizes in Bamba; other libraries' models have other names.
BAMBA = {
    "hidden_size": "hidden_size", "num_heads": "mamba_n_heads", "head_dim": "mamba_d_head",
    "state_size": "mamba_d_state", "num_groups": "mamba_n_groups", "conv_size": "mamba_d_conv",
    "norm_eps": "rms_norm_eps",
}  # fmt: skip
NEMOTRON = {
    **BAMBA, "num_heads": "mamba_num_heads", "head_dim": "mamba_head_dim", "state_size": "ssm_state_size",
    "num_groups": "n_groups", "conv_size": "conv_kernel", "norm_eps": "layer_norm_epsilon",
}  # fmt: skip
ZAMBA = {
    **BAMBA, "num_heads": "n_mamba_heads", "head_dim": "mamba_headdim", "num_groups": "mamba_ngroups",
    "norm_eps": "zamba_eps",
}  # fmt: skip
NO_BIAS = {"mamba_proj_bias": (False,), "mamba_conv_bias": (True,), **SILU}


def mixers(tensors: Tensors) -> dict[int, str]:
    """Return the layers with a decay, with the prefix of the tensor names of each one's mixer."""
    found = (re.match(r"(.*\.layers\.(\d+)\..*?)A_log$", name) for name in sorted(tensors))
    return {int(match[2]): match[1] for match in found if match}


def take_mixer(kind: str, config: Config, tensors: Tensors, layer: int) -> Converted:
    """Convert the mixer of one layer, counted from 0.

    Raises:
        ValueError: there is no converter for the kind of model, the layer has no decay, halflife cannot represent a
            setting, or the tensors do not fit.
    """
    if kind not in MIXERS:
        raise ValueError(f"mixers are taken of {', '.join(MIXERS)}; got a {kind}")
    prefixes = mixers(tensors)
    if layer not in prefixes:
        choices = ", ".join(map(str, sorted(prefixes)))
        raise ValueError(f"layer {layer} has no mixer with a decay; the layers with one are {choices}")
    name, options, rules = MIXERS[kind](config)
    with torch.device("meta"):
        built = layers.build(name, **options)
    of_layer = join_convolutions({name: tensors[name] for name in tensors if name.startswith(prefixes[layer])})
    new = convert_from(built, rules, of_layer, prefixes[layer])
    if kind == "falcon_h1":
        new["in_proj.weight"] = _multiplied(config, options, new["in_proj.weight"])
    return name, options, new


@MIXERS.add("qwen3_next")
def _qwen3_next(config: Config) -> Parsed:
    s = settings(config, {**GATED_DELTANET, "hidden_size": 2048}, SILU)
    return _gated_deltanet(s, _qwen3_next_rules(s), norm_eps=s.rms_norm_eps)


@MIXERS.add("qwen3_5_text")
@MIXERS.add("qwen3_5_moe_text")
def _qwen3_5(config: Config) -> Parsed:
    s = settings(config, GATED_DELTANET, SILU)
    return _gated_deltanet(s, hybrids.gated_deltanet_rules(s, *hybrids.QWEN3_5_NAMES), norm_eps=s.rms_norm_eps)


@MIXERS.add("olmo_hybrid")
def _olmo_hybrid(config: Config) -> Parsed:
    s = settings(config, {**GATED_DELTANET, "linear_allow_neg_eigval": True}, SILU)
    rules = hybrids.gated_deltanet_rules(s, *hybrids.OLMO_MIXER_NAMES)
    return _gated_deltanet(s, rules, allow_neg_eigval=s.linear_allow_neg_eigval)


def _gated_deltanet(s: SimpleNamespace, rules: Iterable[Rule], **more: Any) -> Parsed:
    return "gated_deltanet", {"hidden_size": s.hidden_size, **hybrids.gated_deltanet_options(s), **more}, rules


def _qwen3_next_rules(s: SimpleNamespace) -> Iterator[Rule]:
    """Yield the rules of Qwen3-Next. Its rows are grouped by key head: q, k, the values and the gates of its group."""
    keys, key, value = s.linear_num_key_heads, s.linear_key_head_dim, s.linear_value_head_dim
    group = divide(s.linear_num_value_heads, keys, "linear_num_value_heads / linear_num_key_heads")
    qkvz, ba = 2 * key + 2 * group * value, 2 * group
    q, k, v, z = torch.arange(keys * qkvz).view(keys, qkvz).split([key, key, group * value, group * value], 1)
    beta, decay = torch.arange(keys * ba).view(keys, ba).split(group, 1)
    from_qkvz = (("in_proj_qkvz.weight", (keys * qkvz, s.hidden_size)),)
    from_ba = (("in_proj_ba.weight", (keys * ba, s.hidden_size)),)
    yield Rule("qkv_proj.weight", from_qkvz, torch.cat([x.flatten() for x in (q, k, v)]))
    yield Rule("gate.proj.weight", from_qkvz, z.flatten())
    yield Rule("beta_proj.weight", from_ba, beta.flatten())
    yield Rule("decay_proj.up.weight", from_ba, decay.flatten())
    given = keys, keys, s.linear_num_value_heads
    *_, conv = qkv_rules(s.hidden_size, given, (key, key, value), s.linear_conv_kernel_dim, ours=given)
    yield conv
    names = {"decay.A_log": "A_log", "decay.dt_bias": "dt_bias", "gate.norm.weight": "norm.weight"}
    yield from (copy(ours, theirs) for ours, theirs in {**names, "out_proj.weight": "out_proj.weight"}.items())


@MIXERS.add("kimi_linear")
def _kimi_linear(config: Config) -> Parsed:
    own = config.get("linear_attn_config") or {}
    names = {"linear_head_dim": "head_dim", "linear_num_heads": "num_heads"}
    names |= {"linear_conv_kernel_dim": "short_conv_kernel_size"}
    given = {ours: own[theirs] for ours, theirs in names.items() if theirs in own}
    defaults = {"hidden_size": 2304, "linear_head_dim": 128, "linear_num_heads": 32, "linear_conv_kernel_dim": 4}
    s = settings({**config, **given}, {**defaults, "rms_norm_eps": 1e-5}, SILU)
    size, number, taps = s.linear_head_dim, s.linear_num_heads, s.linear_conv_kernel_dim
    options = {
        "hidden_size": s.hidden_size, "num_heads": number, "head_dim": size, "value_dim": size, "conv_size": taps,
        "norm_eps": s.rms_norm_eps,
    }  # fmt: skip
    renamed = {
        "decay_proj.down": "f_a_proj", "decay_proj.up": "f_b_proj", "beta_proj": "b_proj", "gate.down": "g_a_proj",
        "gate.up": "g_b_proj", "gate.norm": "o_norm", "out_proj": "o_proj",
    }  # fmt: skip
    return "kda", options, [
        *qkv_rules(s.hidden_size, [number] * 3, [size] * 3, taps),
        *(copy(f"{ours}.weight", f"{theirs}.weight") for ours, theirs in renamed.items()),
        copy("decay.A_log", "A_log", 1, 1, number, 1),
        copy("decay.dt_bias", "dt_bias", number * size),
        Rule("gate.up.bias", ()),
    ]  # fmt: skip


@MIXERS.add("bamba")
@MIXERS.add("granitemoehybrid")
def _bamba(config: Config) -> Parsed:
    return _mamba2(config, BAMBA, NO_BIAS, config.get("time_step_limit"))


@MIXERS.add("nemotron_h")
def _nemotron_h(config: Config) -> Parsed:
    fixed = {"use_bias": (False,), "use_conv_bias": (True,), "mamba_hidden_act": ("silu", "swish")}
    return _mamba2(config, NEMOTRON, fixed, (config.get("time_step_min", 0.001), None))


@MIXERS.add("zamba2")
def _zamba2(config: Config) -> Parsed:
    fixed = {"add_bias_linear": (False,), "use_conv_bias": (True,)}
    own = {**config, "zamba_eps": 1e-5}
    if "mamba_headdim" not in config and {"hidden_size", "n_mamba_heads"} <= config.keys():
        inner = config.get("mamba_expand", 2) * config["hidden_size"]
        own["mamba_headdim"] = divide(inner, config["n_mamba_heads"], "mamba_expand · hidden_size / n_mamba_heads")
    return _mamba2(own, ZAMBA, fixed, (config.get("time_step_min", 0.001), None))


@MIXERS.add("falcon_h1")
def _falcon_h1(config: Config) -> Parsed:
    normed, before = config.get("mamba_rms_norm", False), config.get("mamba_norm_before_gate", True)
    norm = ("before_gate" if before else "after_gate") if normed else "none"
    fixed = {**NO_BIAS, "projectors_bias": (False,)}
    return _mamba2(config, BAMBA, fixed, config.get("time_step_limit"), output_norm=norm)


def _multiplied(config: Config, options: dict[str, Any], weight: Tensor) -> Tensor:
    """Falcon-H1's `in_proj` times the mixer's multipliers. `ssm_out_multiplier` is a part of the block."""
    inner = options["num_heads"] * options["head_dim"]
    shared = options["num_groups"] * options["state_size"]
    widths = (inner, inner, shared, shared, options["num_heads"])
    factors = config.get("ssm_multipliers") or [1.0] * 5
    rows = torch.cat([torch.full((width, 1), factor) for width, factor in zip(widths, factors, strict=True)])
    return (weight * (config.get("ssm_in_multiplier") or 1.0) * rows).to(weight.dtype)


def _mamba2(
    config: Config, names: dict[str, str], fixed: dict[str, tuple[Any, ...]], limits: Any, **options: Any
) -> Parsed:
    if missing := [theirs for theirs in names.values() if theirs not in config]:
        raise ValueError(f"config.json has no {missing[0]}")
    defaults = {theirs: 1.0 if theirs.endswith(("eps", "epsilon")) else 1 for theirs in names.values()}
    sizes = settings(config, defaults, fixed)
    options |= {ours: getattr(sizes, theirs) for ours, theirs in names.items()}
    options |= {"decay_options": found} if (found := step_limits(limits)) else {}
    return "mamba2", options, mamba2_rules(options)
