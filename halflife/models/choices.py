"""The parts of a model that its configuration names: norms, MLPs, and the Toeplitz layer after the embedding."""

from __future__ import annotations

from typing import Any

from torch import nn

from halflife import layers
from halflife.layers import KoopmanMLP, RWKV7ChannelMix, SwiGLU
from halflife.layers.parts import PlusOneRMSNorm, RMSNorm
from halflife.layers.token_shift import LayerNorm
from halflife.models.config import ModelConfig


def norm_of(config: ModelConfig) -> nn.Module:
    norms = {"rms": RMSNorm, "rms_plus_one": PlusOneRMSNorm, "layer": LayerNorm}
    return norms[config.norm](config.hidden_size, eps=config.norm_eps)


def tpe_of(config: ModelConfig) -> Any:
    if config.position == "none":
        return None
    return layers.build(
        config.position, hidden_size=config.hidden_size, num_heads=config.mixer_options.get("num_heads", 1)
    )


def mlp_of(config: ModelConfig, layer_idx: int) -> nn.Module | None:
    if config.mlp == "none":
        return None
    if config.mlp == "swiglu":
        return SwiGLU(config.hidden_size, config.intermediate_size)
    if config.mlp.startswith("koopman"):
        kind = config.mlp.split("_")
        return KoopmanMLP(
            config.hidden_size, config.intermediate_size, gated="gated" in kind, clamped=kind[-1] == "paper"
        )
    return RWKV7ChannelMix(
        config.hidden_size, config.intermediate_size, layer_idx=layer_idx, num_layers=config.num_layers
    )
