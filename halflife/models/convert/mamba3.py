"""Conversion of fla's Mamba-3, whose mixers have the names of mamba-ssm's, in both directions."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from halflife.models.config import ModelConfig
from halflife.models.convert.fla import SPEED
from halflife.models.convert.mamba2 import backbone_rules
from halflife.models.convert.rules import Rule, copy, divide
from halflife.models.convert.source import SOURCES, Config, Source, configured, known_keys, settings
from halflife.models.lm import LanguageModel

DEFAULTS = {
    "vocab_size": 32000, "hidden_size": 2048, "num_hidden_layers": 48, "head_dim": 64, "state_size": 128, "expand": 2,
    "n_groups": 1, "norm_eps": 1e-5, "rope_fraction": 0.5, "A_floor": 1e-4, "is_outproj_norm": False, "is_mimo": False,
    "mimo_rank": 4, "tie_word_embeddings": False, "initializer_range": 0.02,
}  # fmt: skip
FIXED = {"use_bias": (False,), "hidden_act": ("silu", "swish")}


def _parse(config: Config) -> tuple[SimpleNamespace, ModelConfig]:
    known_keys(config, {*DEFAULTS, *FIXED, *SPEED})
    s = settings(config, DEFAULTS, FIXED)
    s.heads = divide(s.expand * s.hidden_size, s.head_dim, "expand · hidden_size / head_dim")
    s.rank = s.mimo_rank if s.is_mimo else 1
    options = {
        "num_heads": s.heads, "head_dim": s.head_dim, "state_size": s.state_size, "num_groups": s.n_groups,
        "rope_fraction": s.rope_fraction, "rank": s.rank, "rate_floor": s.A_floor, "output_norm": s.is_outproj_norm,
        "norm_eps": s.norm_eps,
    }  # fmt: skip
    return s, configured(s, "mamba3", options, s.norm_eps, mlp="none")


def _rules(s: SimpleNamespace, model: ModelConfig) -> Iterator[Rule]:
    return backbone_rules(model, _mixer_rules(s))


def _mixer_rules(s: SimpleNamespace) -> Iterator[Rule]:
    inner, size, number, rank = s.heads * s.head_dim, s.state_size, s.heads, s.rank
    order, pairs, keys = _rotated_channels(s), int(size * s.rope_fraction) // 2, rank * s.n_groups
    groups = (torch.arange(2 * keys).unsqueeze(1) * size + order).flatten()
    total = 2 * inner + 2 * keys * size + 3 * number + pairs
    rest = torch.arange(2 * inner + len(groups), total)
    in_proj = torch.cat([torch.arange(2 * inner), groups + 2 * inner, rest])
    yield Rule("in_proj.weight", (("in_proj.weight", (total, s.hidden_size)),), in_proj)
    yield copy("decay.dt_bias", "dt_bias")
    yield copy("skip.D", "D")
    yield copy("norm.weight", "norm.weight")
    yield copy("out_proj.weight", "out_proj.weight")
    bias = torch.arange(number * rank * size).view(number, rank, size)[..., order].transpose(0, 1).flatten()
    for ours, theirs in (("key", "B"), ("query", "C")):
        yield Rule(f"{ours}.weight", ((f"{theirs}_norm.weight", (size,)),), order)
        yield Rule(f"{ours}.bias", ((f"{theirs}_bias", (number, rank, size)),), bias, flat=True)
    shape = (number, rank, s.head_dim)
    swapped = torch.arange(inner * rank).view(shape).transpose(0, 1).flatten()
    for ours, theirs in (("values", "mimo_x"), ("gates", "mimo_z"), ("outputs", "mimo_o")):
        yield Rule(f"mimo.{ours}", ((theirs, shape),), swapped, flat=True)


def _rotated_channels(s: SimpleNamespace) -> Tensor:
    """The channel of theirs that each channel of ours is: first the rotated pairs, then the others.

    The authors' kernels rotate the channels (2i, 2i + 1) of SISO, and (i, i + K/2) of MIMO. Ours rotates (i, i + P).
    """
    pairs, half = int(s.state_size * s.rope_fraction) // 2, s.state_size // 2
    first = torch.arange(pairs) if s.is_mimo else 2 * torch.arange(pairs)
    rotated = torch.cat([first, first + (half if s.is_mimo else 1)])
    others = torch.arange(s.state_size)
    return torch.cat([rotated, others[~torch.isin(others, rotated)]])


def _describe(model: LanguageModel, mixers: list[Any]) -> dict[str, Any]:
    one = mixers[0]
    inner, size = one.num_heads * one.head_dim, len(one.key.weight)
    if one.rate_floor is None or inner % model.config.hidden_size:
        raise ValueError(
            "fla's mamba3 has rates that depend on the input (rate_floor) and a whole expand; this model has "
            f"rate_floor {one.rate_floor} and expand {inner / model.config.hidden_size:g}"
        )
    rank = 1 if one.mimo is None else one.mimo.mimo_rank
    return {
        "head_dim": one.head_dim, "state_size": size, "expand": inner // model.config.hidden_size,
        "n_groups": one.splits[2] // (rank * size),
        "rope_fraction": model.config.mixer_options.get("rope_fraction", 0.5), "A_floor": one.rate_floor,
        "is_outproj_norm": one.norm is not None, "is_mimo": rank > 1, **({"mimo_rank": rank} if rank > 1 else {}),
        "use_bias": False, "hidden_act": "silu", "norm_eps": model.config.norm_eps,
    }  # fmt: skip


SOURCES.add("mamba3")(Source("fla's mamba3", "fla", _parse, _rules, _describe))
