"""Presets by name: `base[+modifier…]`, for example `mamba2+post` or `simple+vector+rope`; modifiers: `modifiers.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from halflife import layers
from halflife.models.config import ModelConfig
from halflife.models.presets.modifiers import MODIFIERS, Options, Sizes, check_modifiers, heads, hybrid
from halflife.registry import Registry

# A base gives fields of `ModelConfig`.
PRESETS: Registry[Callable[[Sizes], Options]] = Registry("preset")


def preset(
    name: str,
    *,
    hidden_size: int = 256,
    num_layers: int = 4,
    vocab_size: int = 256,
    num_heads: int | None = None,
    train_length: int = 2048,
    mixer_options: Options | None = None,
    **config: Any,
) -> ModelConfig:
    """The configuration called `name`.

    Args:
        name: a base and modifiers, joined by "+" (`PRESETS.names()`, `MODIFIERS.names()`).
        hidden_size, num_layers, vocab_size: sizes.
        num_heads: heads of every mixer, a hybrid's other one included; None means the architecture's own choice.
        train_length: tokens of a training sequence, which PoST spreads its spectrum over.
        mixer_options: options of the mixer that override the preset's.
        **config: other fields of `ModelConfig` (`mlp`, `tie_embeddings`, …).

    Raises:
        ValueError: an unknown name, or a combination that has no meaning; the message says why.
    """
    base, *modifiers = name.split("+")
    check_modifiers(name, modifiers)
    sizes = Sizes(hidden_size, num_layers, num_heads, train_length)
    model = PRESETS[base](sizes)
    for modifier in modifiers:
        model = MODIFIERS[modifier](base, model, sizes)
    options = {**model["mixer_options"], **(mixer_options or {})}
    fields = {**model, "mixer_options": options, **config}
    resolved = ModelConfig(name=name, vocab_size=vocab_size, hidden_size=hidden_size, num_layers=num_layers, **fields)
    try:
        with torch.device("meta"):
            for layer in {0, *resolved.hybrid.get("layers", ())}:
                mixer, own = resolved.mixer_of(layer)
                layers.build(mixer, hidden_size=hidden_size, layer_idx=layer, num_layers=num_layers, **own)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name!r} has no meaning: {error}") from error
    return resolved


# ------------------------------------------------------------------------------------------------ bases


def _base(mixer: str, num_heads: int, fields: Options | None = None, **options: Any) -> Options:
    return {"mixer": mixer, "mixer_options": {"num_heads": num_heads, **options}, **(fields or {})}


@PRESETS.add("mamba2")
def mamba2(sizes: Sizes) -> Options:
    """Mamba-2: scalar data-dependent decay, shared B and C, short convolution."""
    return _base("mamba2", sizes.num_heads or heads(2 * sizes.hidden_size))


@PRESETS.add("mamba3")
def mamba3(sizes: Sizes) -> Options:
    """Mamba-3 (SISO): trapezoidal steps, rotation by a data-dependent angle, no convolution."""
    return _base("mamba3", sizes.num_heads or heads(2 * sizes.hidden_size))


@PRESETS.add("rwkv7")
def rwkv7(sizes: Sizes) -> Options:
    """RWKV-7: vector decay and a rank-one correction of the state (DPLR), token shift, value residual."""
    fields = {"mlp": "rwkv7", "norm": "layer", "embedding_norm": True, "tie_embeddings": False}
    return _base("rwkv7", sizes.num_heads or heads(sizes.hidden_size), fields)


@PRESETS.add("gated_deltanet")
def gated_deltanet(sizes: Sizes) -> Options:
    """Gated DeltaNet: the delta rule under Mamba-2's decay."""
    return _base("gated_deltanet", sizes.num_heads or heads(sizes.hidden_size))


@PRESETS.add("deltanet")
def deltanet(sizes: Sizes) -> Options:
    """DeltaNet: the delta rule without decay."""
    return _base("deltanet", sizes.num_heads or heads(sizes.hidden_size))


@PRESETS.add("gla")
def gla(sizes: Sizes) -> Options:
    """Gated Linear Attention: vector decay σ(f)^(1/16)."""
    return _base("gla", sizes.num_heads or 4)


@PRESETS.add("retnet")
def retnet(sizes: Sizes) -> Options:
    """RetNet: fixed decays a head, RoPE."""
    return _base("retnet", sizes.num_heads or heads(sizes.hidden_size, 128))


@PRESETS.add("hgrn2")
def hgrn2(sizes: Sizes) -> Options:
    """HGRN2's decay in the design-space block: a lower bound that grows with depth, k = 1 − λ."""
    return _design_space(sizes, "hgrn2", share_keys=True)


@PRESETS.add("lightnet")
def lightnet(sizes: Sizes) -> Options:
    """LightNet's decay in the design-space block: a running softmax over the past, k = 1 − λ."""
    return _design_space(sizes, "lightnet", share_keys=True)


@PRESETS.add("tnl")
def tnl(sizes: Sizes) -> Options:
    """TransNormerLLM's fixed decays in the design-space block, slower in deeper layers."""
    return _design_space(sizes, "tnl", granularity="scalar")


@PRESETS.add("tnl_l")
def tnl_l(sizes: Sizes) -> Options:
    """TransNormerLLM's decays, learnable."""
    return _design_space(sizes, "tnl_l", granularity="scalar")


@PRESETS.add("simple")
def simple(sizes: Sizes) -> Options:
    """Simple Decay in the design-space block: σ(f + logit 0.99)."""
    return _design_space(sizes, "simple")


@PRESETS.add("llama")
def llama(sizes: Sizes) -> Options:
    """Softmax attention with RoPE: the baseline whose memory grows with the context."""
    return _base("attention", sizes.num_heads or heads(sizes.hidden_size))


@PRESETS.add("echo")
def echo(sizes: Sizes) -> Options:
    """Echo: Mamba-2 with a few layers of spectral Koopman attention, and Koopman MLPs (Echo, §3.4).

    Counted from 0, the 180M model has SKA at {8, 16} of 24 layers and the 50M one at {3, 7, 11, 15} of 16: its last
    layer, against the paper's "first and last layers are always Mamba-2", which holds at every other size (of two
    layers, the second is SKA). d_state is 64 as in the 50M model; for the other one the paper gives none.
    """
    model = _base("mamba2", sizes.num_heads or heads(2 * sizes.hidden_size), state_size=64)
    return {**model, "mlp": "koopman", "hybrid": hybrid(sizes, "ska")}


def _design_space(sizes: Sizes, decay: str, granularity: str = "vector", share_keys: bool = False) -> Options:
    options = {"decay": decay, "granularity": granularity, "share_keys": share_keys}
    return _base("linear", sizes.num_heads or heads(sizes.hidden_size), **options)
