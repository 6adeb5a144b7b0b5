"""Conversion of transformers' Mamba-2, in both directions, and of fla's, which has the same kind and tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

from halflife.models.config import ModelConfig
from halflife.models.convert.rules import Rule, copy, divide
from halflife.models.convert.source import SOURCES, Config, Source, configured, plain, settings
from halflife.models.lm import LanguageModel

DEFAULTS = {
    "vocab_size": 32768, "hidden_size": 4096, "num_hidden_layers": 64, "num_heads": 128, "head_dim": 64, "expand": 2,
    "state_size": 128, "n_groups": 8, "conv_kernel": 4, "layer_norm_epsilon": 1e-5, "initializer_range": 0.1,
    "tie_word_embeddings": False,
}  # fmt: skip

# transformers' names of settings, by fla's.
FLA_NAMES = {"norm_eps": "layer_norm_epsilon", "dt_limit": "time_step_limit", "rmsnorm": "rms_norm"}
# Allowed values of settings. `norm_before_gate` is absent because transformers ignores it and Mamba-Codestral sets it.
# So did fla while it had transformers' name `rms_norm`.
FIXED = {
    "use_bias": (False,), "use_conv_bias": (True,), "rms_norm": (True,), "hidden_act": ("silu", "swish"),
}  # fmt: skip


def mamba2_rules(options: dict[str, Any]) -> Iterator[Rule]:
    """Yield the rules of one mixer with these options. It need not have a norm."""
    channels = options["num_heads"] * options["head_dim"] + 2 * options["num_groups"] * options["state_size"]
    for name in ("in_proj.weight", "norm.weight", "out_proj.weight"):
        yield copy(name, name)
    yield copy("conv.weight", "conv1d.weight", channels, 1, options["conv_size"])
    yield copy("conv.bias", "conv1d.bias")
    yield copy("decay.A_log", "A_log")
    yield copy("decay.dt_bias", "dt_bias")
    yield copy("skip.D", "D")


def backbone_rules(model: ModelConfig, mixer: Iterable[Rule]) -> Iterator[Rule]:
    """Yield the rules of a model without MLPs, in the names of mamba-ssm, from those of its mixer."""
    mixer = list(mixer)
    yield copy("embedding.weight", "backbone.embeddings.weight")
    yield copy("norm.weight", "backbone.norm_f.weight")
    yield copy("head.weight", "lm_head.weight")
    for i in range(model.num_layers):
        yield copy(f"blocks.{i}.mixer_norm.weight", f"backbone.layers.{i}.norm.weight")
        yield from (rule.under(f"blocks.{i}.mixer.", f"backbone.layers.{i}.mixer.") for rule in mixer)


def _rules(s: SimpleNamespace, model: ModelConfig) -> Iterator[Rule]:
    return backbone_rules(model, mamba2_rules(model.mixer_options))


def _parse(config: Config) -> tuple[SimpleNamespace, ModelConfig]:
    before = "rmsnorm" in config and config.get("norm_before_gate", False)
    config = {FLA_NAMES.get(name, name): value for name, value in config.items()}
    s = settings(config, DEFAULTS, FIXED)
    if s.expand * s.hidden_size != s.num_heads * s.head_dim:
        raise ValueError(
            f"expand · hidden_size must be num_heads · head_dim; got {s.expand} · {s.hidden_size} and {s.num_heads} · "
            f"{s.head_dim}"
        )
    options = {
        "num_heads": s.num_heads, "head_dim": s.head_dim, "state_size": s.state_size, "num_groups": s.n_groups,
        "conv_size": s.conv_kernel, "norm_eps": s.layer_norm_epsilon,
    }  # fmt: skip
    options |= {"decay_options": limits} if (limits := step_limits(config.get("time_step_limit"))) else {}
    options |= {"output_norm": "before_gate"} if before else {}
    return s, configured(s, "mamba2", options, s.layer_norm_epsilon, mlp="none")


def _describe(model: LanguageModel, mixers: list[Any]) -> dict[str, Any]:
    mixer = mixers[0]
    largest = getattr(mixer.decay, "max_step", None)
    return {
        "architectures": ["Mamba2ForCausalLM"], "num_heads": mixer.num_heads, "head_dim": mixer.head_dim,
        "state_size": mixer.state_size, "n_groups": mixer.num_groups, "conv_kernel": mixer.conv.size,
        "expand": divide(mixer.num_heads * mixer.head_dim, model.config.hidden_size, "transformers' expand"),
        "layer_norm_epsilon": model.config.norm_eps,
        "time_step_limit": [getattr(mixer.decay, "min_step", 0.0), math.inf if largest is None else largest],
        "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip


def step_limits(limits: Any) -> dict[str, float]:
    """Return the options of our decay for the limits `(least, largest)` of Mamba-2's step size; None is no limit."""
    low, high = (plain(x) for x in limits or (0.0, None))
    found = {"min_step": float(low or 0.0)} if low else {}
    return found | ({"max_step": float(high)} if high is not None and high != math.inf else {})


SOURCES.add("mamba2")(Source("transformers' Mamba-2", "transformers", _parse, _rules, _describe))
