"""Conversion of one mixer out of a model of transformers whose other layers halflife lacks.

| mixer | models |
|---|---|
| Gated DeltaNet | qwen3_next, qwen3_5_text, qwen3_5_moe_text, olmo_hybrid |
| Kimi Delta Attention | kimi_linear |
| Mamba-2 | falcon_h1, bamba, granitemoehybrid, nemotron_h, zamba2 |
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from halflife import layers
from halflife.models.convert import qwen3_next
from halflife.models.convert.rules import Rule, convert_from, copy, heads, join_convolutions
from halflife.models.convert.source import Config, Tensors, Translation, divide, plain, settings
from halflife.registry import Registry

# A layer's name and options, and its state dict.
Mixer = tuple[str, dict[str, Any], dict[str, Tensor]]

MIXERS: Registry[Callable[[Config, Tensors, int], Mixer]] = Registry("model with mixers")

GATED_DELTANET = {**qwen3_next.DEFAULTS, "hidden_size": 4096}
SILU = qwen3_next.FIXED
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


def take_mixer(kind: str, config: Config, tensors: Tensors, layer: int) -> Mixer:
    """Convert the mixer of one layer, counted from 0.

    Raises:
        ValueError: there is no converter for the kind of model, the layer has no decay, halflife cannot represent a
            setting, or the tensors do not fit.
    """
    if kind not in MIXERS:
        raise ValueError(f"--layer takes one mixer of {', '.join(MIXERS)}; a {kind} is converted as a whole")
    return MIXERS[kind](config, tensors, layer)


def _build(tensors: Tensors, layer: int, name: str, options: dict[str, Any]) -> Translation:
    prefixes = mixers(tensors)
    if layer not in prefixes:
        choices = ", ".join(map(str, sorted(prefixes)))
        raise ValueError(f"layer {layer} has no mixer with a decay; the layers with one are {choices}")
    with torch.device("meta"):
        built = layers.build(name, **options)
    of_layer = {name: tensors[name] for name in tensors if name.startswith(prefixes[layer])}
    return Translation(built, join_convolutions(of_layer), prefixes[layer])


@MIXERS.add("qwen3_next")
def _qwen3_next(config: Config, tensors: Tensors, layer: int) -> Mixer:
    return ("gated_deltanet", *qwen3_next.qwen3_next_mixer(config, tensors, layer))


@MIXERS.add("qwen3_5_text")
@MIXERS.add("qwen3_5_moe_text")
def _qwen3_5(config: Config, tensors: Tensors, layer: int) -> Mixer:
    s = settings(config, GATED_DELTANET, SILU)
    return _gated_deltanet(s, tensors, layer, list(qwen3_5_rules(s)), norm_eps=s.rms_norm_eps)


@MIXERS.add("olmo_hybrid")
def _olmo_hybrid(config: Config, tensors: Tensors, layer: int) -> Mixer:
    s = settings(config, {**GATED_DELTANET, "linear_allow_neg_eigval": True}, SILU)
    return _gated_deltanet(s, tensors, layer, list(olmo_rules(s)), allow_neg_eigval=s.linear_allow_neg_eigval)


def _gated_deltanet(s: SimpleNamespace, tensors: Tensors, layer: int, rules: list[Rule], **more: Any) -> Mixer:
    options = {
        "hidden_size": s.hidden_size, "num_heads": s.linear_num_value_heads, "head_dim": s.linear_key_head_dim,
        "value_dim": s.linear_value_head_dim, "conv_size": s.linear_conv_kernel_dim, **more,
    }  # fmt: skip
    moved = _build(tensors, layer, "gated_deltanet", options)
    convert_from(moved, rules)
    return "gated_deltanet", options, moved.finish()


def qwen3_5_rules(s: SimpleNamespace) -> Iterator[Rule]:
    """Yield the rules of Qwen3.5's Gated DeltaNet."""
    index, total = _shared_rows(s), widths(s)
    yield Rule("qkv_proj.weight", (("in_proj_qkv.weight", (sum(total), s.hidden_size)),), index)
    yield from _gated_deltanet_rules(s, index, ("in_proj_z", "in_proj_b", "in_proj_a", "norm", "out_proj"))


def olmo_rules(s: SimpleNamespace) -> Iterator[Rule]:
    """Yield the rules of OLMo Hybrid's Gated DeltaNet."""
    index, total = _shared_rows(s), widths(s)
    names = ("q_proj.weight", "k_proj.weight", "v_proj.weight")
    theirs = tuple((name, (rows, s.hidden_size)) for name, rows in zip(names, total, strict=True))
    yield Rule("qkv_proj.weight", theirs, index)
    yield from _gated_deltanet_rules(s, index, ("g_proj", "b_proj", "a_proj", "o_norm", "o_proj"))


def _gated_deltanet_rules(s: SimpleNamespace, index: Tensor, names: tuple[str, ...]) -> Iterator[Rule]:
    gate, beta, decay, norm, out = names
    values, size, hidden = s.linear_num_value_heads, s.linear_value_head_dim, s.hidden_size
    yield Rule("conv.weight", (("conv1d.weight", (sum(widths(s)), 1, s.linear_conv_kernel_dim)),), index)
    yield copy("gate.proj.weight", f"{gate}.weight", values * size, hidden)
    yield copy("beta_proj.weight", f"{beta}.weight", values, hidden)
    yield copy("decay_proj.up.weight", f"{decay}.weight", values, hidden)
    yield copy("decay.A_log", "A_log", values)
    yield copy("decay.dt_bias", "dt_bias", values)
    yield copy("gate.norm.weight", f"{norm}.weight", size)
    yield copy("out_proj.weight", f"{out}.weight", hidden, values * size)


def widths(s: SimpleNamespace) -> list[int]:
    keys = s.linear_num_key_heads * s.linear_key_head_dim
    return [keys, keys, s.linear_num_value_heads * s.linear_value_head_dim]


def _shared_rows(s: SimpleNamespace) -> Tensor:
    """The rows of queries, keys and values, where groups of value heads share a query and a key."""
    times = divide(s.linear_num_value_heads, s.linear_num_key_heads, "linear_num_value_heads / linear_num_key_heads")
    keys, _, values = widths(s)
    shared = [heads(i * keys, s.linear_num_key_heads, s.linear_key_head_dim, times) for i in range(2)]
    return torch.cat([*shared, torch.arange(values) + 2 * keys])


@MIXERS.add("kimi_linear")
def _kimi_linear(config: Config, tensors: Tensors, layer: int) -> Mixer:
    own = config.get("linear_attn_config") or {}
    names = {"linear_head_dim": "head_dim", "linear_num_heads": "num_heads"}
    names |= {"linear_conv_kernel_dim": "short_conv_kernel_size"}
    given = {ours: own[theirs] for ours, theirs in names.items() if theirs in own}
    defaults = {"hidden_size": 2304, "linear_head_dim": 128, "linear_num_heads": 32, "linear_conv_kernel_dim": 4}
    s = settings({**config, **given}, {**defaults, "rms_norm_eps": 1e-5}, SILU)
    size, number, hidden = s.linear_head_dim, s.linear_num_heads, s.hidden_size
    inner = number * size
    options = {
        "hidden_size": hidden, "num_heads": number, "head_dim": size, "value_dim": size,
        "conv_size": s.linear_conv_kernel_dim, "norm_eps": s.rms_norm_eps,
    }  # fmt: skip
    moved = _build(tensors, layer, "kda", options)
    qkv = tuple((f"{name}_proj.weight", (inner, hidden)) for name in "qkv")
    convert_from(moved, [
        Rule("qkv_proj.weight", qkv, torch.arange(3 * inner)),
        copy("conv.weight", "conv1d.weight", 3 * inner, 1, s.linear_conv_kernel_dim),
        copy("decay_proj.down.weight", "f_a_proj.weight", size, hidden),
        copy("decay_proj.up.weight", "f_b_proj.weight", inner, size),
        copy("decay.A_log", "A_log", 1, 1, number, 1),
        copy("decay.dt_bias", "dt_bias", inner),
        copy("beta_proj.weight", "b_proj.weight", number, hidden),
        copy("gate.down.weight", "g_a_proj.weight", size, hidden),
        copy("gate.up.weight", "g_b_proj.weight", inner, size),
        copy("gate.norm.weight", "o_norm.weight", size),
        copy("out_proj.weight", "o_proj.weight", hidden, inner),
    ])  # fmt: skip
    moved.put("gate.up.bias", torch.zeros(inner, dtype=moved.new["gate.up.weight"].dtype))
    return "kda", options, moved.finish()


@MIXERS.add("bamba")
@MIXERS.add("granitemoehybrid")
def _bamba(config: Config, tensors: Tensors, layer: int) -> Mixer:
    return _mamba2(config, tensors, layer, BAMBA, NO_BIAS, config.get("time_step_limit"))


@MIXERS.add("nemotron_h")
def _nemotron_h(config: Config, tensors: Tensors, layer: int) -> Mixer:
    fixed = {"use_bias": (False,), "use_conv_bias": (True,), "mamba_hidden_act": ("silu", "swish")}
    return _mamba2(config, tensors, layer, NEMOTRON, fixed, (config.get("time_step_min", 0.001), None))


@MIXERS.add("zamba2")
def _zamba2(config: Config, tensors: Tensors, layer: int) -> Mixer:
    fixed = {"add_bias_linear": (False,), "use_conv_bias": (True,)}
    own = {**config, "zamba_eps": 1e-5}
    if "mamba_headdim" not in config and {"hidden_size", "n_mamba_heads"} <= config.keys():
        inner = config.get("mamba_expand", 2) * config["hidden_size"]
        own["mamba_headdim"] = divide(inner, config["n_mamba_heads"], "mamba_expand · hidden_size / n_mamba_heads")
    return _mamba2(own, tensors, layer, ZAMBA, fixed, (config.get("time_step_min", 0.001), None))


@MIXERS.add("falcon_h1")
def _falcon_h1(config: Config, tensors: Tensors, layer: int) -> Mixer:
    """The mixer's multipliers become factors on the rows of `in_proj`. `ssm_out_multiplier` is a part of the block."""
    normed, before = config.get("mamba_rms_norm", False), config.get("mamba_norm_before_gate", True)
    norm = ("before_gate" if before else "after_gate") if normed else "none"
    fixed = {**NO_BIAS, "projectors_bias": (False,)}
    name, options, new = _mamba2(config, tensors, layer, BAMBA, fixed, config.get("time_step_limit"), output_norm=norm)
    inner = options["num_heads"] * options["head_dim"]
    shared = options["num_groups"] * options["state_size"]
    widths = (inner, inner, shared, shared, options["num_heads"])
    factors = config.get("ssm_multipliers") or [1.0] * 5
    rows = torch.cat([torch.full((width, 1), factor) for width, factor in zip(widths, factors, strict=True)])
    weight = new["in_proj.weight"]
    new["in_proj.weight"] = (weight * (config.get("ssm_in_multiplier") or 1.0) * rows).to(weight.dtype)
    return name, options, new


def _mamba2(
    config: Config, tensors: Tensors, layer: int, names: dict[str, str], fixed: dict[str, tuple[Any, ...]],
    limits: Any, **options: Any,
) -> Mixer:  # fmt: skip
    """Convert a Mamba-2 mixer whose sizes have these names in config.json."""
    if missing := [theirs for theirs in names.values() if theirs not in config]:
        raise ValueError(f"config.json has no {missing[0]}")
    defaults = {theirs: 1.0 if theirs.endswith(("eps", "epsilon")) else 1 for theirs in names.values()}
    sizes = settings(config, defaults, fixed)
    options |= {ours: getattr(sizes, theirs) for ours, theirs in names.items()}
    options |= {"decay_options": found} if (found := step_limits(limits)) else {}
    moved = _build(tensors, layer, "mamba2", options)
    for ours, shape in moved.shapes.items():
        theirs = {"conv.weight": "conv1d.weight", "conv.bias": "conv1d.bias", "skip.D": "D"}.get(ours, ours)
        own = (shape[0], 1, shape[1]) if ours == "conv.weight" else ()
        moved.rename(theirs.removeprefix("decay."), ours, *own)
    return "mamba2", options, moved.finish()


def step_limits(limits: Any) -> dict[str, float]:
    """Return the options of our decay for the limits `(least, largest)` of Mamba-2's step size; None is no limit."""
    low, high = (plain(x) for x in limits or (0.0, None))
    found = {"min_step": float(low or 0.0)} if low else {}
    return found | ({"max_step": float(high)} if high is not None and high != math.inf else {})
