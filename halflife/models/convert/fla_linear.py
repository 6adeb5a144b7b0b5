"""Conversion of fla's GLA and Gated DeltaNet."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from halflife.layers.parts import FEATURE_MAPS
from halflife.models.config import ModelConfig
from halflife.models.convert.rules import Rule, convert_from, copy, heads, join_convolutions
from halflife.models.convert.source import SOURCES, Config, Converted, Tensors, Translation, divide, on_meta, settings

DEFAULTS = {
    "vocab_size": 32000, "hidden_size": 2048, "hidden_ratio": 4.0, "intermediate_size": None, "norm_eps": 1e-6,
    "tie_word_embeddings": False, "initializer_range": 0.02, "conv_size": 4,
}  # fmt: skip
GLA = {
    **DEFAULTS, "num_hidden_layers": 24, "num_heads": 4, "num_kv_heads": None, "expand_k": 0.5, "expand_v": 1.0,
    "use_short_conv": False, "use_output_gate": True, "fuse_norm": True, "gate_logit_normalizer": 16,
    "gate_low_rank_dim": 16,
}  # fmt: skip
GATED_DELTANET = {
    **DEFAULTS, "num_hidden_layers": 21, "num_heads": 6, "num_v_heads": None, "head_dim": 256, "expand_v": 2.0,
    "use_gate": True, "allow_neg_eigval": False,
}  # fmt: skip
NULLABLE = ("hidden_ratio",)

# Allowed values of settings. `attn` would put softmax attention into some layers.
FIXED = {"attn": (None,), "hidden_act": ("swish", "silu")}
GLA_FIXED = {
    **FIXED, "feature_map": (None, "swish", *FEATURE_MAPS), "clamp_min": (None,), "elementwise_affine": (True,),
    "use_gk": (True,), "use_gv": (False,),
}  # fmt: skip
GATED_DELTANET_FIXED = {**FIXED, "use_short_conv": (True,)}

SHARED = "heads that share a key or a value"


@SOURCES.add("gla")
def from_fla_gla(config: Config, tensors: Tensors) -> Converted:
    """Convert fla's `GLAForCausalLM` to a halflife configuration and state dict.

    Where heads share keys and values, each head gets a copy of the keys, values and decays.

    Raises:
        ValueError: halflife cannot represent a setting, or the tensors do not fit.
    """
    s, model = gla(config)
    return convert(model, list(gla_rules(s, model)), tensors)


def gla(config: Config) -> tuple[SimpleNamespace, ModelConfig]:
    """Return the settings of fla's GLA, and our configuration."""
    s = settings(config, GLA, GLA_FIXED, NULLABLE)
    key, value = (divide(int(s.hidden_size * x), s.num_heads, "a head's size") for x in (s.expand_k, s.expand_v))
    return s, model_config("gla", s, {
        "num_heads": s.num_heads, "head_dim": key, "value_dim": value,
        "conv_size": s.conv_size if s.use_short_conv else 0, "gate": "swish" if s.use_output_gate else "none",
        **({"feature_map": {"swish": "silu"}.get(name, name)} if (name := config.get("feature_map")) else {}),
        **({"decay_options": {"tau": float(tau)}} if (tau := s.gate_logit_normalizer) != 16 else {}),
        **({"decay_rank": s.gate_low_rank_dim} if s.gate_low_rank_dim != 16 else {}),
    })  # fmt: skip


def gla_rules(s: SimpleNamespace, model: ModelConfig) -> Iterator[Rule]:
    """Yield the rules of all tensors but the head's."""
    shared, rank, key = s.num_kv_heads or s.num_heads, s.gate_low_rank_dim, model.mixer_options["head_dim"]
    norm = "g_norm_swish_gate" if s.fuse_norm and s.use_output_gate else "g_norm"
    decays = heads(0, shared, key, divide(s.num_heads, shared, SHARED))
    mixer = [
        *_mixer_rules(model, (s.num_heads, shared, shared), norm),
        copy("decay_proj.down.weight", "gk_proj.0.weight", rank, s.hidden_size),
        Rule("decay_proj.up.weight", (("gk_proj.1.weight", (shared * key, rank)),), decays),
        Rule("decay_proj.up.bias", (("gk_proj.1.bias", (shared * key,)),), decays),
    ]
    yield from model_rules(model, mixer)


@SOURCES.add("gated_deltanet")
def from_fla_gated_deltanet(config: Config, tensors: Tensors) -> Converted:
    """Convert fla's `GatedDeltaNetForCausalLM` to a halflife configuration and state dict.

    Where value heads share a query and a key, each value head gets a copy of both.

    Raises:
        ValueError: halflife cannot represent a setting, or the tensors do not fit.
    """
    s, model = gated_deltanet(config)
    return convert(model, list(gated_deltanet_rules(s, model)), tensors)


def gated_deltanet(config: Config) -> tuple[SimpleNamespace, ModelConfig]:
    """Return the settings of fla's Gated DeltaNet, and our configuration."""
    s = settings(config, GATED_DELTANET, GATED_DELTANET_FIXED, NULLABLE)
    return s, model_config("gated_deltanet", s, {
        "num_heads": s.num_v_heads or s.num_heads, "head_dim": s.head_dim, "value_dim": int(s.head_dim * s.expand_v),
        "conv_size": s.conv_size, "gate": "swish" if s.use_gate else "none", "allow_neg_eigval": s.allow_neg_eigval,
    })  # fmt: skip


def gated_deltanet_rules(s: SimpleNamespace, model: ModelConfig) -> Iterator[Rule]:
    """Yield the rules of all tensors but the head's."""
    number = model.mixer_options["num_heads"]
    mixer = [
        *_mixer_rules(model, (s.num_heads, s.num_heads, number), "o_norm"),
        copy("decay_proj.up.weight", "a_proj.weight", number, s.hidden_size),
        copy("beta_proj.weight", "b_proj.weight", number, s.hidden_size),
        copy("decay.A_log", "A_log", number),
        copy("decay.dt_bias", "dt_bias", number),
    ]
    yield from model_rules(model, mixer)


def model_config(mixer: str, s: SimpleNamespace, options: dict[str, Any]) -> ModelConfig:
    """Return our configuration of a model of fla with SwiGLU, from its settings and the options of its mixer."""
    width = s.intermediate_size or -(-int(s.hidden_size * (s.hidden_ratio or 4) * 2 / 3) // 256) * 256
    return ModelConfig(
        name=mixer, vocab_size=s.vocab_size, hidden_size=s.hidden_size, num_layers=s.num_hidden_layers, mixer=mixer,
        mixer_options={**options, "norm_eps": s.norm_eps}, intermediate_size=width,
        tie_embeddings=s.tie_word_embeddings, norm_eps=s.norm_eps, initializer_range=s.initializer_range,
    )  # fmt: skip


def convert(model: ModelConfig, rules: list[Rule], tensors: Tensors) -> Converted:
    """Convert the tensors of a model of fla by the rules."""
    joined = any(rule.ours.endswith("conv.weight") for rule in rules)
    moved = Translation(on_meta(model), join_convolutions(tensors) if joined else tensors)
    convert_from(moved, rules)
    moved.head("lm_head.weight", "model.embeddings.weight")
    return model, moved.finish()


def qkv_rows(number: int, given: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
    """Return the rows of queries, keys and values, of which there are `given` heads, for a number of heads."""
    firsts = [sum(count * size for count, size in list(zip(given, sizes, strict=True))[:i]) for i in range(len(given))]
    parts = zip(firsts, given, sizes, strict=True)
    return torch.cat([heads(first, count, size, divide(number, count, SHARED)) for first, count, size in parts])


def _mixer_rules(model: ModelConfig, given: tuple[int, int, int], norm: str) -> Iterator[Rule]:
    """Yield the rules that both mixers have. `given` are the heads of q, k and v in fla."""
    o, hidden = model.mixer_options, model.hidden_size
    number, value = o["num_heads"], o["value_dim"]
    sizes = (o["head_dim"], o["head_dim"], value)
    index, rows = qkv_rows(number, given, sizes), [n * size for n, size in zip(given, sizes, strict=True)]
    qkv = tuple((f"{name}_proj.weight", (count, hidden)) for name, count in zip("qkv", rows, strict=True))
    yield Rule("qkv_proj.weight", qkv, index)
    if o["conv_size"]:
        yield Rule("conv.weight", (("conv1d.weight", (sum(rows), 1, o["conv_size"])),), index)
    if o["gate"] == "swish":
        yield copy("gate.proj.weight", "g_proj.weight", number * value, hidden)
    yield copy("gate.norm.weight" if o["gate"] == "swish" else "gate.weight", f"{norm}.weight", value)
    yield copy("out_proj.weight", "o_proj.weight", hidden, number * value)


def model_rules(model: ModelConfig, mixer: list[Rule]) -> Iterator[Rule]:
    """Yield the rules of a model of fla with SwiGLU, from those of its mixer."""
    hidden, width = model.hidden_size, model.intermediate_size or 0
    yield copy("embedding.weight", "model.embeddings.weight", model.vocab_size, hidden)
    yield copy("norm.weight", "model.norm.weight", hidden)
    for i in range(model.num_layers):
        ours, theirs = f"blocks.{i}.", f"model.layers.{i}."
        yield from (rule.under(f"{ours}mixer.", f"{theirs}attn.") for rule in mixer)
        for place, name in (("mixer", "attn"), ("mlp", "mlp")):
            yield copy(f"{ours}{place}_norm.weight", f"{theirs}{name}_norm.weight", hidden)
        for part, shape in (("gate", (width, hidden)), ("up", (width, hidden)), ("down", (hidden, width))):
            yield copy(f"{ours}mlp.{part}.weight", f"{theirs}mlp.{part}_proj.weight", *shape)
