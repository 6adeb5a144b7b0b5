"""Conversion of fla's KDA and Mamba-3."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import torch
from torch import Tensor

from halflife.models.config import ModelConfig
from halflife.models.convert.fla_linear import DEFAULTS, convert, model_config, model_rules, qkv_rows
from halflife.models.convert.rules import Rule, convert_from, copy
from halflife.models.convert.source import (
    SOURCES,
    Config,
    Converted,
    Tensors,
    Translation,
    divide,
    known_keys,
    on_meta,
    settings,
)

KDA = {
    **DEFAULTS, "num_hidden_layers": 24, "num_heads": 16, "num_v_heads": None, "head_dim": 128, "expand_v": 1.0,
    "allow_neg_eigval": False,
}  # fmt: skip
KDA_FIXED = {
    "attn": (None,), "hidden_act": ("swish", "silu"), "use_short_conv": (True,), "safe_gate": (False,),
    "lower_bound": (None,), "attnres_block_size": (None,),
}  # fmt: skip
MAMBA3 = {
    "vocab_size": 32000, "hidden_size": 2048, "num_hidden_layers": 48, "head_dim": 64, "state_size": 128, "expand": 2,
    "n_groups": 1, "norm_eps": 1e-5, "rope_fraction": 0.5, "A_floor": 1e-4, "is_outproj_norm": False, "is_mimo": False,
    "mimo_rank": 4, "tie_word_embeddings": False, "initializer_range": 0.02,
}  # fmt: skip
MAMBA3_FIXED = {"use_bias": (False,), "hidden_act": ("silu", "swish")}
# Settings of fla that change speed, the loss, or initial values.
SPEED = {
    "attn_mode", "fuse_norm", "fuse_swiglu", "fuse_cross_entropy", "fuse_linear_cross_entropy", "use_l2warp",
    "chunk_size", "residual_in_fp32", "dt_min", "dt_max", "dt_init_floor", "rescale_prenorm_residual", "num_heads",
}  # fmt: skip


@SOURCES.add("kda")
def from_fla_kda(config: Config, tensors: Tensors) -> Converted:
    """Convert fla's `KDAForCausalLM` to a halflife configuration and state dict.

    Where value heads share a query and a key, each value head gets a copy of both.

    Raises:
        ValueError: halflife cannot represent a setting, or the tensors do not fit.
    """
    s, model = kda(config)
    return convert(model, list(kda_rules(s, model)), tensors)


def kda(config: Config) -> tuple[SimpleNamespace, ModelConfig]:
    """Return the settings of fla's KDA, and our configuration."""
    known_keys(config, {*KDA, *KDA_FIXED, *SPEED})
    s = settings(config, KDA, KDA_FIXED, ("hidden_ratio",))
    return s, model_config("kda", s, {
        "num_heads": s.num_v_heads or s.num_heads, "head_dim": s.head_dim, "value_dim": int(s.head_dim * s.expand_v),
        "conv_size": s.conv_size, "allow_neg_eigval": s.allow_neg_eigval,
    })  # fmt: skip


def kda_rules(s: SimpleNamespace, model: ModelConfig) -> Iterator[Rule]:
    """Yield the rules of all tensors but the head's."""
    hidden, number, value = s.hidden_size, model.mixer_options["num_heads"], model.mixer_options["value_dim"]
    keys, values, decays = s.num_heads * s.head_dim, number * value, number * s.head_dim
    index = qkv_rows(number, (s.num_heads, s.num_heads, number), (s.head_dim, s.head_dim, value))
    qkv = tuple((f"{n}_proj.weight", (rows, hidden)) for n, rows in zip("qkv", (keys, keys, values), strict=True))
    yield from model_rules(model, [
        Rule("qkv_proj.weight", qkv, index),
        Rule("conv.weight", (("conv1d.weight", (2 * keys + values, 1, s.conv_size)),), index),
        copy("decay_proj.down.weight", "f_proj.0.weight", value, hidden),
        copy("decay_proj.up.weight", "f_proj.1.weight", decays, value),
        copy("decay.A_log", "A_log", number),
        copy("decay.dt_bias", "dt_bias", decays),
        copy("beta_proj.weight", "b_proj.weight", number, hidden),
        copy("gate.down.weight", "g_proj.0.weight", value, hidden),
        copy("gate.up.weight", "g_proj.1.weight", values, value),
        copy("gate.up.bias", "g_proj.1.bias", values),
        copy("gate.norm.weight", "o_norm.weight", value),
        copy("out_proj.weight", "o_proj.weight", hidden, values),
    ])  # fmt: skip


@SOURCES.add("mamba3")
def from_fla_mamba3(config: Config, tensors: Tensors) -> Converted:
    """Convert fla's `Mamba3ForCausalLM`, whose mixers have the names of mamba-ssm's, to a configuration and state dict.

    The authors' kernels rotate the channels (2i, 2i + 1) of SISO, and (i, i + K/2) of MIMO. Ours rotates (i, i + P), so
    the channels of keys and queries are put into this order.

    Raises:
        ValueError: halflife cannot represent a setting, or the tensors do not fit.
    """
    s, model = mamba3(config)
    moved = Translation(on_meta(model), tensors)
    convert_from(moved, mamba3_rules(s, model))
    moved.head("lm_head.weight", "backbone.embeddings.weight")
    return model, moved.finish()


def mamba3(config: Config) -> tuple[SimpleNamespace, ModelConfig]:
    """Return the settings of fla's Mamba-3, and our configuration."""
    known_keys(config, {*MAMBA3, *MAMBA3_FIXED, *SPEED})
    s = settings(config, MAMBA3, MAMBA3_FIXED)
    s.heads = divide(s.expand * s.hidden_size, s.head_dim, "expand · hidden_size / head_dim")
    s.rank = s.mimo_rank if s.is_mimo else 1
    options = {
        "num_heads": s.heads, "head_dim": s.head_dim, "state_size": s.state_size, "num_groups": s.n_groups,
        "rope_fraction": s.rope_fraction, "rank": s.rank, "rate_floor": s.A_floor, "output_norm": s.is_outproj_norm,
        "norm_eps": s.norm_eps,
    }  # fmt: skip
    return s, ModelConfig(
        name="mamba3", vocab_size=s.vocab_size, hidden_size=s.hidden_size, num_layers=s.num_hidden_layers,
        mixer="mamba3", mixer_options=options, mlp="none", tie_embeddings=s.tie_word_embeddings, norm_eps=s.norm_eps,
        initializer_range=s.initializer_range,
    )  # fmt: skip


def mamba3_rules(s: SimpleNamespace, model: ModelConfig) -> Iterator[Rule]:
    """Yield the rules of all tensors but the head's."""
    hidden, inner, size, number, rank = s.hidden_size, s.heads * s.head_dim, s.state_size, s.heads, s.rank
    order, pairs, keys = _rotated_channels(s), int(size * s.rope_fraction) // 2, rank * s.n_groups
    groups = (torch.arange(2 * keys).unsqueeze(1) * size + order).flatten()
    total = 2 * inner + 2 * keys * size + 3 * number + pairs
    rest = torch.arange(2 * inner + len(groups), total)
    in_proj = torch.cat([torch.arange(2 * inner), groups + 2 * inner, rest])
    mixer = [
        Rule("in_proj.weight", (("in_proj.weight", (total, hidden)),), in_proj),
        copy("decay.dt_bias", "dt_bias", number),
        copy("skip.D", "D", number),
        copy("out_proj.weight", "out_proj.weight", hidden, inner),
    ]
    bias = torch.arange(number * rank * size).view(number, rank, size)[..., order].transpose(0, 1).flatten()
    for ours, theirs in (("key", "B"), ("query", "C")):
        mixer.append(Rule(f"{ours}.weight", ((f"{theirs}_norm.weight", (size,)),), order))
        mixer.append(Rule(f"{ours}.bias", ((f"{theirs}_bias", (number, rank, size)),), bias, flat=True))
    if s.is_mimo:
        shape = (number, rank, s.head_dim)
        swapped = torch.arange(inner * rank).view(shape).transpose(0, 1).flatten()
        for ours, theirs in (("values", "mimo_x"), ("gates", "mimo_z"), ("outputs", "mimo_o")):
            mixer.append(Rule(f"mimo.{ours}", ((theirs, shape),), swapped, flat=True))
    if s.is_outproj_norm:
        mixer.append(copy("norm.weight", "norm.weight", inner))
    yield copy("embedding.weight", "backbone.embeddings.weight", s.vocab_size, hidden)
    yield copy("norm.weight", "backbone.norm_f.weight", hidden)
    for i in range(s.num_hidden_layers):
        yield copy(f"blocks.{i}.mixer_norm.weight", f"backbone.layers.{i}.norm.weight", hidden)
        yield from (rule.under(f"blocks.{i}.mixer.", f"backbone.layers.{i}.mixer.") for rule in mixer)


def _rotated_channels(s: SimpleNamespace) -> Tensor:
    """The channel of theirs that each channel of ours is: first the rotated pairs, then the others."""
    pairs, half = int(s.state_size * s.rope_fraction) // 2, s.state_size // 2
    first = torch.arange(pairs) if s.is_mimo else 2 * torch.arange(pairs)
    second = first + (half if s.is_mimo else 1)
    rotated = torch.cat([first, second])
    others = torch.arange(s.state_size)
    return torch.cat([rotated, others[~torch.isin(others, rotated)]])
