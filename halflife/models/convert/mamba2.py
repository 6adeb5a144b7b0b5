"""Conversion of transformers' Mamba-2, in both directions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from halflife.decay.mamba2 import Mamba2Decay
from halflife.layers.parts import GatedRMSNorm
from halflife.models.config import ModelConfig
from halflife.models.convert.mixers import step_limits
from halflife.models.convert.source import SOURCES, Config, Converted, Tensors, Translation, divide, on_meta, settings
from halflife.models.lm import Block, LanguageModel

DEFAULTS = {
    "vocab_size": 32768, "hidden_size": 4096, "num_hidden_layers": 64, "num_heads": 128, "head_dim": 64, "expand": 2,
    "state_size": 128, "n_groups": 8, "conv_kernel": 4, "layer_norm_epsilon": 1e-5, "initializer_range": 0.1,
    "tie_word_embeddings": False,
}  # fmt: skip

# Allowed values of settings. `norm_before_gate` is absent because transformers ignores it and Mamba-Codestral sets it.
FIXED = {
    "use_bias": (False,), "use_conv_bias": (True,), "rms_norm": (True,), "hidden_act": ("silu", "swish"),
}  # fmt: skip

MODEL = (("backbone.embeddings.weight", "embedding.weight"), ("backbone.norm_f.weight", "norm.weight"))
BLOCK = (
    ("norm.weight", "mixer_norm.weight"),
    ("mixer.in_proj.weight", "mixer.in_proj.weight"),
    ("mixer.conv1d.weight", "mixer.conv.weight"),  # theirs is [channels, 1, taps], ours [channels, taps]
    ("mixer.conv1d.bias", "mixer.conv.bias"),
    ("mixer.A_log", "mixer.decay.A_log"),
    ("mixer.dt_bias", "mixer.decay.dt_bias"),
    ("mixer.D", "mixer.skip.D"),
    ("mixer.norm.weight", "mixer.norm.weight"),
    ("mixer.out_proj.weight", "mixer.out_proj.weight"),
)


def _names(num_layers: int) -> Iterator[tuple[str, str]]:
    """Yield (transformers' name, halflife's name) of every parameter except the head."""
    yield from MODEL
    for i in range(num_layers):
        yield from ((f"backbone.layers.{i}.{theirs}", f"blocks.{i}.{ours}") for theirs, ours in BLOCK)


@SOURCES.add("mamba2")
def from_transformers_mamba2(config: Config, tensors: Tensors) -> Converted:
    """A `Mamba2ForCausalLM` of transformers as a halflife configuration and state dict.

    Raises:
        ValueError: halflife cannot represent a setting, or the tensors do not fit.
    """
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
    model = ModelConfig(
        name="mamba2", vocab_size=s.vocab_size, hidden_size=s.hidden_size, num_layers=s.num_hidden_layers,
        mixer="mamba2", mixer_options=options, mlp="none", tie_embeddings=s.tie_word_embeddings,
        norm_eps=s.layer_norm_epsilon, initializer_range=s.initializer_range,
    )  # fmt: skip
    moved = Translation(on_meta(model), tensors)
    for theirs, ours in _names(s.num_hidden_layers):
        channels, *taps = moved.shapes[ours]
        moved.rename(theirs, ours, *((channels, 1, *taps) if ours.endswith("conv.weight") else ()))
    moved.head("lm_head.weight", "backbone.embeddings.weight")
    return model, moved.finish()


def to_transformers_mamba2(model: LanguageModel) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The `config.json` and tensors of a `Mamba2ForCausalLM` that computes what `model` does.

    Raises:
        ValueError: a model that transformers' Mamba-2 cannot be; the message says why.
    """
    config, block = model.config, model.blocks[0]
    assert isinstance(block, Block)
    mixer: Any = block.mixer
    if config.mixer != "mamba2":
        raise ValueError(f"transformers has models for mixer 'mamba2' only; this one has {config.mixer!r}")
    for name, wanted in (("mlp", "none"), ("norm", "rms"), ("position", "none"), ("embedding_norm", False)):
        if (value := getattr(config, name)) != wanted:
            raise ValueError(f"transformers' Mamba-2 has {name} {wanted!r}; this model has {value!r}")
    if type(mixer.decay) is not Mamba2Decay:
        raise ValueError(f"transformers' Mamba-2 has Mamba-2's own decay; this model has {mixer.decay}")
    if type(mixer.norm) is not GatedRMSNorm:
        raise ValueError(f"transformers' Mamba-2 has a norm after its gate; this model has {type(mixer.norm).__name__}")
    if mixer.norm.groups != mixer.num_groups:
        raise ValueError(
            "transformers' Mamba-2 has a norm for each group; this model has one for each head (norm_per_head)"
        )
    if mixer.norm.eps != config.norm_eps:
        raise ValueError(f"transformers' Mamba-2 has one eps; this model has {config.norm_eps} and {mixer.norm.eps}")
    state, new = model.state_dict(), {}
    for theirs, ours in _names(config.num_layers):
        new[theirs] = state[ours].unsqueeze(1) if ours.endswith("conv.weight") else state[ours]
    if model.head is not None:
        new["lm_head.weight"] = state["head.weight"]
    return _config(config, mixer, str(model.embedding.weight.dtype).removeprefix("torch.")), new


def _config(config: ModelConfig, mixer: Any, dtype: str) -> dict[str, Any]:
    return {
        "architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "dtype": dtype,
        "vocab_size": config.vocab_size, "hidden_size": config.hidden_size, "num_hidden_layers": config.num_layers,
        "num_heads": mixer.num_heads, "head_dim": mixer.head_dim, "state_size": mixer.state_size,
        "expand": divide(mixer.num_heads * mixer.head_dim, config.hidden_size, "transformers' expand"),
        "n_groups": mixer.num_groups, "conv_kernel": mixer.conv.size, "layer_norm_epsilon": config.norm_eps,
        "initializer_range": config.initializer_range, "tie_word_embeddings": config.tie_embeddings,
        "time_step_limit": [mixer.decay.min_step, math.inf if mixer.decay.max_step is None else mixer.decay.max_step],
        "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
