"""Presets: the bases by name, and `preset`, which applies modifiers to a base (`mamba2+post`, `simple+vector+rope`)."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from halflife import layers
from halflife.models.config import ModelConfig
from halflife.models.presets.hybrids import hybrid_layers, ska_paper
from halflife.models.presets.modifiers import MODIFIERS, Options, check_modifiers
from halflife.models.presets.sizes import PresetSizes
from halflife.registry import Registry, unknown

# A base takes the sizes and returns fields of `ModelConfig`.
PRESETS: Registry[Callable[[PresetSizes], Options]] = Registry("preset")

# Fields of `ModelConfig` that `preset` takes as they are.
CONFIG_FIELDS = [field.name for field in dataclasses.fields(ModelConfig) if field.name != "name"]


def _base(mixer: str, num_heads: int, fields: Options | None = None, **options: Any) -> Options:
    return {"mixer": mixer, "mixer_options": {"num_heads": num_heads, **options}, **(fields or {})}


def _design_space(sizes: PresetSizes, decay: str, granularity: str = "vector", share_keys: bool = False) -> Options:
    options = {"decay": decay, "granularity": granularity, "share_keys": share_keys}
    return _base("linear", sizes.heads(), **options)


@PRESETS.add("mamba2")
def mamba2(sizes: PresetSizes) -> Options:
    """Mamba-2: scalar data-dependent decay, B and C shared by the heads, short convolution."""
    return _base("mamba2", sizes.heads(expand=2))


@PRESETS.add("mamba3")
def mamba3(sizes: PresetSizes) -> Options:
    """Mamba-3 (SISO): trapezoidal steps, rotation by a data-dependent angle, no convolution."""
    return _base("mamba3", sizes.heads(expand=2))


@PRESETS.add("mamba3_echo")
def mamba3_echo(sizes: PresetSizes) -> Options:
    """Mamba-3 as the baseline of Echo's tables: a convolution on the values, keys and angles a head (Appendix G)."""
    return {**_base("mamba3_echo", sizes.heads(expand=2)), "tie_embeddings": False}


@PRESETS.add("rwkv7")
def rwkv7(sizes: PresetSizes) -> Options:
    """RWKV-7: vector decay and a rank-one correction of the state (DPLR), token shift, value residual."""
    fields = {"mlp": "rwkv7", "norm": "layer", "embedding_norm": True, "tie_embeddings": False}
    return _base("rwkv7", sizes.heads(), fields)


@PRESETS.add("gated_deltanet")
def gated_deltanet(sizes: PresetSizes) -> Options:
    """Gated DeltaNet: the delta rule under Mamba-2's decay."""
    return _base("gated_deltanet", sizes.heads())


@PRESETS.add("deltanet")
def deltanet(sizes: PresetSizes) -> Options:
    """DeltaNet: the delta rule without decay."""
    return _base("deltanet", sizes.heads())


@PRESETS.add("gla")
def gla(sizes: PresetSizes) -> Options:
    """Gated Linear Attention: vector decay σ(f)^(1/16)."""
    return _base("gla", sizes.num_heads or 4)


@PRESETS.add("retnet")
def retnet(sizes: PresetSizes) -> Options:
    """RetNet: one fixed decay a head, RoPE."""
    return _base("retnet", sizes.heads(head_dim=128))


@PRESETS.add("hgrn2")
def hgrn2(sizes: PresetSizes) -> Options:
    """HGRN2's decay in the design-space block: its lower bound grows with depth, and k = 1 − λ."""
    return _design_space(sizes, "hgrn2", share_keys=True)


@PRESETS.add("lightnet")
def lightnet(sizes: PresetSizes) -> Options:
    """LightNet's decay in the design-space block: a running softmax over the past, and k = 1 − λ."""
    return _design_space(sizes, "lightnet", share_keys=True)


@PRESETS.add("tnl")
def tnl(sizes: PresetSizes) -> Options:
    """TransNormerLLM's fixed decays in the design-space block, slower in deeper layers."""
    return _design_space(sizes, "tnl", granularity="scalar")


@PRESETS.add("tnl_released")
def tnl_released(sizes: PresetSizes) -> Options:
    """TransNormerLLM's fixed decays as released: half-lives of 1.4 to 177 tokens in the first layer."""
    return _design_space(sizes, "tnl_released", granularity="scalar")


@PRESETS.add("tnl_l")
def tnl_l(sizes: PresetSizes) -> Options:
    """TransNormerLLM's decays in the design-space block, made learnable."""
    return _design_space(sizes, "tnl_l", granularity="scalar")


@PRESETS.add("simple")
def simple(sizes: PresetSizes) -> Options:
    """Simple Decay in the design-space block: σ(f + logit 0.99)."""
    return _design_space(sizes, "simple")


@PRESETS.add("llama")
def llama(sizes: PresetSizes) -> Options:
    """Softmax attention with RoPE: the baseline whose memory grows with the context."""
    return _base("attention", sizes.heads())


@PRESETS.add("echo")
def echo(sizes: PresetSizes) -> Options:
    """Our Echo: Mamba-2 with a few layers of our spectral Koopman attention, and Koopman MLPs.

    The layers and sizes are the paper's (§3.4), and so are the sums and the ridge regression of SKA. SKA differs in its
    power K = 1 for the paper's 2, in a learned mixture with the ridge regression, in queries that start as keys, and in
    a causal norm. One power maps a key to the key that followed it. `echo_paper` is the paper's form.

    Counted from 0, the SKA layers are {8, 16} of 24 in the 180M model and {3, 7, 11, 15} of 16 in the 50M model. The
    last layer of the 50M model contradicts the paper's "first and last layers are always Mamba-2". That rule holds here
    at every other size, except that the second of two layers is SKA. d_state is 64, the paper's value for the 50M
    model; the paper gives none for the 180M model.
    """
    model = _base("mamba2", sizes.heads(expand=2), state_size=64)
    return {**model, "mlp": "koopman", "hybrid": hybrid_layers(sizes, "ska")}


@PRESETS.add("echo_paper")
def echo_paper(sizes: PresetSizes) -> Options:
    """Echo as its paper prints it: SKA of `ska_paper`, and Koopman MLPs with moduli clamped at 1."""
    model = ska_paper("echo_paper", _base("mamba2", sizes.heads(expand=2), state_size=64), sizes)
    return {**model, "mlp": "koopman_paper"}


def merge(old: Mapping[str, Any], new: Mapping[str, Any]) -> Options:
    """Return `old` with the values of `new`. Where both hold a mapping, the two are merged in the same way."""
    changed = {
        name: merge(old[name], value) if isinstance(value, Mapping) and isinstance(old.get(name), Mapping) else value
        for name, value in new.items()
    }
    return {**old, **changed}


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
    """Return the configuration called `name`.

    Args:
        name: a base and its modifiers, joined by "+" (see `PRESETS.names()` and `MODIFIERS.names()`). A modifier of a
            hybrid takes a ratio: after `attention:3`, a layer of attention follows every three layers of the base.
        hidden_size: width of the model.
        num_layers: number of blocks.
        vocab_size: number of token ids.
        num_heads: heads of every mixer, also of a hybrid's second mixer; None means that the architecture chooses.
        train_length: tokens of a training sequence; PoST spreads its spectrum over this length.
        mixer_options: options of the mixer, which override those of the preset. Options in a mapping, such as those of
            `post`, override one by one: `{"post": {"train_length": 128}}` changes one option of PoST.
        **config: other fields of `ModelConfig` (`mlp`, `tie_embeddings`, …). The options of `hybrid` override one by
            one, unless it names another mixer.

    Raises:
        ValueError: a name is unknown, or the combination has no meaning; the message says why.
    """
    if foreign := config.keys() - CONFIG_FIELDS:
        known = [*inspect.signature(preset).parameters][1:-1] + CONFIG_FIELDS
        raise unknown("option of a preset", min(foreign), list(dict.fromkeys(known)))
    base, *modifiers = name.split("+")
    check_modifiers(name, modifiers)
    given = {"hidden_size": hidden_size, "num_layers": num_layers, "vocab_size": vocab_size, "num_heads": num_heads}
    for field, size in given.items():
        if size is not None and size < 1:
            raise ValueError(f"{field} must be at least 1; got {size}")
    sizes = PresetSizes(hidden_size, num_layers, num_heads, train_length)
    model = PRESETS[base](sizes)
    for modifier in modifiers:
        model = MODIFIERS[modifier](base, model, sizes)
    fields = merge(model, {"mixer_options": mixer_options or {}, **config})
    # Options of another decay or mixer than the preset's do not add to those of the preset's.
    options, hybrid = model["mixer_options"], model.get("hybrid", {})
    if fields["mixer_options"].get("decay") != options.get("decay") and "decay_options" in options:
        fields["mixer_options"]["decay_options"] = dict((mixer_options or {}).get("decay_options") or {})
    if hybrid and (config.get("hybrid") == {} or fields["hybrid"].get("mixer") != hybrid["mixer"]):
        fields["hybrid"] = config["hybrid"]
    resolved = ModelConfig(name=name, vocab_size=vocab_size, hidden_size=hidden_size, num_layers=num_layers, **fields)
    try:
        with torch.device("meta"):
            for layer in {0, *resolved.other_layers}:
                for mixer, own in filter(None, (resolved.mixer_of(layer), resolved.beside_of(layer))):
                    layers.build(mixer, hidden_size=hidden_size, layer_idx=layer, num_layers=num_layers, **own)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"{name!r} has no meaning: {error}") from error
    return resolved
