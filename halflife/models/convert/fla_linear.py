"""Conversion of fla's GLA and Gated DeltaNet."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from halflife.layers.parts import FEATURE_MAPS
from halflife.models.config import ModelConfig
from halflife.models.convert.source import (
    SOURCES,
    Config,
    Converted,
    Tensors,
    Translation,
    divide,
    on_meta,
    repeat_heads,
    settings,
)

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

# (fla's name, halflife's name). A pair is used if the halflife model has such a parameter.
MODEL = (("model.embeddings.weight", "embedding.weight"), ("model.norm.weight", "norm.weight"))
BLOCK = (
    ("attn_norm.weight", "mixer_norm.weight"),
    ("attn.g_proj.weight", "mixer.gate.proj.weight"),
    ("attn.o_proj.weight", "mixer.out_proj.weight"),
    ("mlp_norm.weight", "mlp_norm.weight"),
    ("mlp.gate_proj.weight", "mlp.gate.weight"),
    ("mlp.up_proj.weight", "mlp.up.weight"),
    ("mlp.down_proj.weight", "mlp.down.weight"),
)
GATED_DELTANET_BLOCK = (
    ("attn.a_proj.weight", "mixer.decay_proj.up.weight"),
    ("attn.b_proj.weight", "mixer.beta_proj.weight"),
    ("attn.A_log", "mixer.decay.A_log"),
    ("attn.dt_bias", "mixer.decay.dt_bias"),
)


@SOURCES.add("gla")
def from_fla_gla(config: Config, tensors: Tensors) -> Converted:
    """Convert fla's `GLAForCausalLM` to a halflife configuration and state dict.

    Where heads share keys and values, each head gets a copy of the keys, values and decays.

    Raises:
        ValueError: halflife cannot represent a setting, or the tensors do not fit.
    """
    s = settings(config, GLA, GLA_FIXED, NULLABLE)
    shared = s.num_kv_heads or s.num_heads
    key, value = (divide(int(s.hidden_size * x), s.num_heads, "a head's size") for x in (s.expand_k, s.expand_v))
    model = _model("gla", s, {
        "num_heads": s.num_heads, "head_dim": key, "value_dim": value,
        "conv_size": s.conv_size if s.use_short_conv else 0, "gate": "swish" if s.use_output_gate else "none",
        **({"feature_map": {"swish": "silu"}.get(name, name)} if (name := config.get("feature_map")) else {}),
        **({"decay_options": {"tau": float(tau)}} if (tau := s.gate_logit_normalizer) != 16 else {}),
        **({"decay_rank": s.gate_low_rank_dim} if s.gate_low_rank_dim != 16 else {}),
    })  # fmt: skip
    moved = Translation(on_meta(model), tensors)
    norm = "g_norm_swish_gate" if s.fuse_norm and s.use_output_gate else "g_norm"
    for i in range(s.num_hidden_layers):
        _block(moved, i, BLOCK, norm, s.use_output_gate)
        _queries_keys_values(moved, i, s, s.num_heads, ((s.num_heads, key), (shared, key), (shared, value)))
        theirs, ours = f"model.layers.{i}.attn.gk_proj", f"blocks.{i}.mixer.decay_proj"
        moved.rename(f"{theirs}.0.weight", f"{ours}.down.weight")
        for part, width in (("weight", (s.gate_low_rank_dim,)), ("bias", ())):
            rows = moved.take(f"{theirs}.1.{part}", shared * key, *width)
            moved.put(f"{ours}.up.{part}", _repeat_heads(rows, shared, s.num_heads))
    return model, _finish(moved)


@SOURCES.add("gated_deltanet")
def from_fla_gated_deltanet(config: Config, tensors: Tensors) -> Converted:
    """Convert fla's `GatedDeltaNetForCausalLM` to a halflife configuration and state dict.

    Where value heads share a query and a key, each value head gets a copy of both.

    Raises:
        ValueError: halflife cannot represent a setting, or the tensors do not fit.
    """
    s = settings(config, GATED_DELTANET, GATED_DELTANET_FIXED, NULLABLE)
    heads, key = s.num_v_heads or s.num_heads, s.head_dim
    value = int(key * s.expand_v)
    model = _model("gated_deltanet", s, {
        "num_heads": heads, "head_dim": key, "value_dim": value, "conv_size": s.conv_size,
        "gate": "swish" if s.use_gate else "none", "allow_neg_eigval": s.allow_neg_eigval,
    })  # fmt: skip
    moved = Translation(on_meta(model), tensors)
    for i in range(s.num_hidden_layers):
        _block(moved, i, BLOCK + GATED_DELTANET_BLOCK, "o_norm", s.use_gate)
        _queries_keys_values(moved, i, s, heads, ((s.num_heads, key), (s.num_heads, key), (heads, value)))
    return model, _finish(moved)


def _model(mixer: str, s: SimpleNamespace, options: dict[str, Any]) -> ModelConfig:
    width = s.intermediate_size or -(-int(s.hidden_size * (s.hidden_ratio or 4) * 2 / 3) // 256) * 256
    return ModelConfig(
        name=mixer, vocab_size=s.vocab_size, hidden_size=s.hidden_size, num_layers=s.num_hidden_layers, mixer=mixer,
        mixer_options={**options, "norm_eps": s.norm_eps}, intermediate_size=width,
        tie_embeddings=s.tie_word_embeddings, norm_eps=s.norm_eps, initializer_range=s.initializer_range,
    )  # fmt: skip


def _block(moved: Translation, i: int, names: tuple[tuple[str, str], ...], norm: str, gated: bool) -> None:
    for theirs, ours in names:
        if f"blocks.{i}.{ours}" in moved.shapes:
            moved.rename(f"model.layers.{i}.{theirs}", f"blocks.{i}.{ours}")
    ours = "mixer.gate.norm.weight" if gated else "mixer.gate.weight"
    moved.rename(f"model.layers.{i}.attn.{norm}.weight", f"blocks.{i}.{ours}")


def _queries_keys_values(
    moved: Translation, i: int, s: SimpleNamespace, heads: int, sizes: tuple[tuple[int, int], ...]
) -> None:
    """Join the three projections, and their convolutions; `sizes` has the heads and the head size of q, k and v."""
    rows, taps = [], []
    for name, (given, size) in zip("qkv", sizes, strict=True):
        theirs = f"model.layers.{i}.attn.{name}"
        rows.append(_repeat_heads(moved.take(f"{theirs}_proj.weight", given * size, s.hidden_size), given, heads))
        if f"blocks.{i}.mixer.conv.weight" in moved.shapes:
            kernel = moved.take(f"{theirs}_conv1d.weight", given * size, 1, s.conv_size)
            taps.append(_repeat_heads(kernel, given, heads))
    moved.put(f"blocks.{i}.mixer.qkv_proj.weight", torch.cat(rows))
    if taps:
        moved.put(f"blocks.{i}.mixer.conv.weight", torch.cat(taps))


def _repeat_heads(x: Tensor, given: int, heads: int) -> Tensor:
    """Repeat each of the `given` heads, which are groups of rows of `x`, so that there are `heads`."""
    return repeat_heads(x.unflatten(0, (given, -1)), divide(heads, given, "heads that share a key or a value"))


def _finish(moved: Translation) -> dict[str, Tensor]:
    for theirs, ours in MODEL:
        moved.rename(theirs, ours)
    moved.head("lm_head.weight", "model.embeddings.weight")
    return moved.finish()
