"""Conversion of transformers' hybrids of Gated DeltaNet and attention, Qwen3.5 and OLMo Hybrid, in both directions.

Where value heads share a query and a key, each value head of ours gets a copy of both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from halflife.layers.attention import Attention
from halflife.layers.design.rows import GatedDeltaNet
from halflife.models.config import ModelConfig
from halflife.models.convert.rules import Rule, Tensors, copy, divide, join_convolutions, qkv_rules, split_convolutions
from halflife.models.convert.source import SOURCES, Config, Source, configured, known_keys, settings
from halflife.models.lm import LanguageModel

Parsed = tuple[SimpleNamespace, ModelConfig]

DEFAULTS = {
    "vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32,
    "num_attention_heads": 16, "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "initializer_range": 0.02, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32,
}  # fmt: skip
QWEN3_5 = {**DEFAULTS, "head_dim": 256}
OLMO = {
    **DEFAULTS, "vocab_size": 100352, "hidden_size": 3840, "intermediate_size": 11008, "num_attention_heads": 30,
    "num_key_value_heads": None, "linear_key_head_dim": None, "linear_value_head_dim": None,
    "linear_num_key_heads": None, "linear_num_value_heads": None, "linear_allow_neg_eigval": True, "head_dim": None,
}  # fmt: skip
FIXED = {"hidden_act": ("silu", "swish"), "attention_bias": (False,), "attention_dropout": (0.0, 0)}
# Settings of the initial values alone, and those that `_layer_types` and `_attention` read.
IGNORED = {
    "layer_types", "rope_parameters", "full_attention_interval", "linear_a_log_min", "linear_a_log_max",
    "linear_dt_min", "linear_dt_max", "linear_dt_init_floor", "partial_rotary_factor", "mamba_ssm_dtype",
    "attn_output_gate", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "pretraining_tp",
}  # fmt: skip
KINDS = ("linear_attention", "full_attention")
ROPE_THETA = 10_000.0  # where a config.json has none; null means no positions
# (name in checkpoints, name in the model).
OLMO_NAMES = (("attention_layer_norm", "input_layernorm"), ("feedforward_layer_norm", "post_attention_layernorm"))
UNUSED = ("mtp.", "model.visual.")  # of Qwen3.5's other tasks: prediction of several tokens, and images


def _qwen3_5(config: Config) -> Parsed:
    known_keys(config, {*QWEN3_5, *FIXED, *IGNORED})
    s = settings(config, QWEN3_5, {**FIXED, "attn_output_gate": (True,)})
    rope = {"partial_rotary_factor": config.get("partial_rotary_factor", 0.25), **(config.get("rope_parameters") or {})}
    attention = _attention(config, s, rope_fraction=rope["partial_rotary_factor"], qk_norm="head_plus_one", gate=True)
    return s, _model("qwen3_5", config, s, {"options": attention}, norm="rms_plus_one", norm_eps=s.rms_norm_eps)


def _qwen3_5_with_images(config: Config) -> Parsed:
    return _qwen3_5({"tie_word_embeddings": config.get("tie_word_embeddings", False), **config.get("text_config", {})})


def _text_model(tensors: Tensors) -> dict[str, Tensor]:
    renamed = {name.replace("model.language_model.", "model."): x for name, x in tensors.items()}
    return {name: x for name, x in renamed.items() if not name.startswith(UNUSED)}


def _olmo_hybrid(config: Config) -> Parsed:
    known_keys(config, {*OLMO, *FIXED, *IGNORED})
    s = settings(config, OLMO, FIXED)
    s.num_key_value_heads = s.num_key_value_heads or s.num_attention_heads
    for name in ("linear_num_key_heads", "linear_num_value_heads"):
        setattr(s, name, getattr(s, name) or s.num_attention_heads)
    s.linear_key_head_dim = s.linear_key_head_dim or int(0.75 * s.hidden_size / s.linear_num_key_heads)
    s.linear_value_head_dim = s.linear_value_head_dim or 2 * s.linear_key_head_dim
    s.head_dim = s.head_dim or divide(s.hidden_size, s.num_attention_heads, "hidden_size / num_attention_heads")
    kind = {"options": _attention(config, s, qk_norm="all"), "norm_place": "after"}
    return s, _model("olmo_hybrid", config, s, kind, norm_eps=1e-5, allow_neg_eigval=s.linear_allow_neg_eigval)


def _renamed(tensors: Tensors, back: bool = False) -> dict[str, Tensor]:
    """The tensors of an OLMo Hybrid with the names in its model, or with those in its checkpoints."""
    for published, own in OLMO_NAMES:
        old, new = (own, published) if back else (published, own)
        tensors = {name.replace(old, new): x for name, x in tensors.items()}
    return dict(tensors)


def _layer_types(config: Config, s: SimpleNamespace) -> list[str]:
    every = config.get("full_attention_interval", 4)
    types = config.get("layer_types") or [KINDS[(i + 1) % every == 0] for i in range(s.num_hidden_layers)]
    if unknown := [kind for kind in types if kind not in KINDS]:
        raise ValueError(f"layer_types has {unknown[0]} in config.json, which cannot be represented")
    if len(types) != s.num_hidden_layers:
        raise ValueError(f"layer_types in config.json has {len(types)} layers, not {s.num_hidden_layers}")
    return list(types)


def _attention(config: Config, s: SimpleNamespace, **options: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", **(config.get("rope_parameters") or {})}
    known = {"rope_type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}
    if rope["rope_type"] != "default" or set(rope) - known:
        raise ValueError(f"rope_parameters = {rope} in config.json cannot be represented; only the default type can")
    options |= {"num_heads": s.num_attention_heads, "num_kv_heads": s.num_key_value_heads, "head_dim": s.head_dim}
    theta = rope.get("rope_theta", ROPE_THETA)
    if theta is None:
        return {**options, "position": "none", "norm_eps": s.rms_norm_eps}
    return {**options, "rope_base": theta, "norm_eps": s.rms_norm_eps}


def _model(
    name: str, config: Config, s: SimpleNamespace, kind: dict[str, Any], norm: str = "rms", **options: Any
) -> ModelConfig:
    full = [i for i, layer in enumerate(_layer_types(config, s)) if layer == "full_attention"]
    options, hybrid = {**gated_deltanet_options(s), **options}, {"mixer": "attention", "layers": full, **kind}
    return configured(
        s, "gated_deltanet", options, s.rms_norm_eps, name=name, hybrid=hybrid if full else {}, norm=norm,
        intermediate_size=s.intermediate_size,
    )  # fmt: skip


def gated_deltanet_options(s: SimpleNamespace) -> dict[str, Any]:
    """Return the options of the layer for the settings of a Gated DeltaNet of transformers."""
    keys, values = s.linear_num_key_heads, s.linear_num_value_heads
    divide(values, keys, "linear_num_value_heads / linear_num_key_heads")
    return {
        "num_heads": values, "head_dim": s.linear_key_head_dim, "value_dim": s.linear_value_head_dim,
        "conv_size": s.linear_conv_kernel_dim, **({} if keys == values else {"num_key_heads": keys}),
    }  # fmt: skip


def gated_deltanet_rules(s: SimpleNamespace, joined: str, names: tuple[str, ...]) -> Iterator[Rule]:
    """Yield the rules of a Gated DeltaNet of transformers. The names are those of z, β, a, the norm and the output."""
    keys, values = s.linear_num_key_heads, s.linear_num_value_heads
    sizes = (s.linear_key_head_dim, s.linear_key_head_dim, s.linear_value_head_dim)
    given = keys, keys, values
    yield from qkv_rules(s.hidden_size, given, sizes, s.linear_conv_kernel_dim, joined, given)
    ours = ("gate.proj", "beta_proj", "decay_proj.up", "gate.norm", "out_proj")
    yield from (copy(f"{a}.weight", f"{b}.weight") for a, b in zip(ours, names, strict=True))
    yield copy("decay.A_log", "A_log")
    yield copy("decay.dt_bias", "dt_bias")


QWEN3_5_NAMES = "in_proj_qkv.weight", ("in_proj_z", "in_proj_b", "in_proj_a", "norm", "out_proj")
OLMO_MIXER_NAMES = "", ("g_proj", "b_proj", "a_proj", "o_norm", "o_proj")


def _rules(s: SimpleNamespace, model: ModelConfig) -> Iterator[Rule]:
    qwen = model.norm == "rms_plus_one"
    yield copy("embedding.weight", "model.embed_tokens.weight")
    yield copy("norm.weight", "model.norm.weight")
    yield copy("head.weight", "lm_head.weight")
    for i in range(s.num_hidden_layers):
        full, theirs, ours = i in model.other_layers, f"model.layers.{i}.", f"blocks.{i}."
        norms = ("input_layernorm", "post_attention_layernorm")
        if model.norms_after(i):
            norms = ("post_attention_layernorm", "post_feedforward_layernorm")
        for name, place in zip(norms, ("mixer", "mlp"), strict=True):
            yield copy(f"{ours}{place}_norm.weight", f"{theirs}{name}.weight")
        for part in ("gate", "up", "down"):
            yield copy(f"{ours}mlp.{part}.weight", f"{theirs}mlp.{part}_proj.weight")
        linear = gated_deltanet_rules(s, *(QWEN3_5_NAMES if qwen else OLMO_MIXER_NAMES))
        for rule in _attention_rules(s, gate=qwen) if full else linear:
            yield rule.under(f"{ours}mixer.", theirs + ("self_attn." if full else "linear_attn."))


def _attention_rules(s: SimpleNamespace, gate: bool) -> Iterator[Rule]:
    """Yield the rules of attention. With a gate, each head's rows in `q_proj` are its query and its gate."""
    size, hidden, given = s.head_dim, s.hidden_size, s.num_attention_heads
    keys, total = s.num_key_value_heads * size, given * size * (2 if gate else 1)
    rows = torch.arange(total).view(given, -1, size)
    index = [rows[:, 0].flatten(), torch.arange(total, total + 2 * keys), *(rows[:, i].flatten() for i in [1] * gate)]
    theirs = (("q_proj.weight", (total, hidden)), ("k_proj.weight", (keys, hidden)), ("v_proj.weight", (keys, hidden)))
    yield Rule("qkv_proj.weight", theirs, torch.cat(index))
    yield copy("out_proj.weight", "o_proj.weight")
    yield from (copy(f"{name}.weight", f"{name}.weight") for name in ("q_norm", "k_norm"))


def _describe(qwen: bool, model: LanguageModel, mixers: list[Any]) -> dict[str, Any]:
    config, full = model.config, set(model.config.other_layers)
    linear = [mixer for i, mixer in enumerate(mixers) if i not in full and isinstance(mixer, GatedDeltaNet)]
    attention = [mixer for i, mixer in enumerate(mixers) if i in full and isinstance(mixer, Attention)]
    if not linear or not attention or len(linear) + len(attention) < config.num_layers:
        raise ValueError(
            "transformers has models for mixer 'mamba2' only, and for hybrids of 'gated_deltanet' and 'attention'; "
            f"this one has {', '.join(sorted({config.mixer_of(i)[0] for i in range(config.num_layers)}))}"
        )
    first, one = linear[0], attention[0]
    rope = {"rope_type": "default", "rope_theta": one.rope_base, "partial_rotary_factor": one.rotated / one.head_dim}
    if not qwen:
        rope.pop("partial_rotary_factor")
        rope = rope if one.position == "rope" else {"rope_type": "default", "rope_theta": None}
    return {
        "architectures": ["Qwen3_5ForCausalLM" if qwen else "OlmoHybridForCausalLM"],
        "num_attention_heads": one.num_heads, "num_key_value_heads": one.num_kv_heads, "head_dim": one.head_dim,
        "rms_norm_eps": config.norm_eps, "rope_parameters": rope,
        "linear_conv_kernel_dim": first.conv.size if first.conv else 0,
        "linear_key_head_dim": first.head_dim, "linear_value_head_dim": first.value_dim,
        "linear_num_key_heads": first.num_key_heads,
        "linear_num_value_heads": first.num_heads, "layer_types": [KINDS[i in full] for i in range(config.num_layers)],
        "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
        **({} if qwen else {"linear_allow_neg_eigval": first.update.allow_neg_eigval}),
    }  # fmt: skip


_OF_TRANSFORMERS: Callable[..., Source] = partial(Source, library="transformers", rules=_rules)
SOURCES.add("qwen3_5_text")(_OF_TRANSFORMERS("Qwen3.5", parse=_qwen3_5, describe=partial(_describe, True)))
SOURCES.add("qwen3_5")(_OF_TRANSFORMERS("Qwen3.5", parse=_qwen3_5_with_images, read=_text_model))
SOURCES.add("olmo_hybrid")(_OF_TRANSFORMERS(
    "OLMo Hybrid", parse=_olmo_hybrid, describe=partial(_describe, False),
    read=lambda tensors: _renamed(join_convolutions(tensors)),
    write=lambda tensors: _renamed(split_convolutions(tensors), back=True),
))  # fmt: skip
