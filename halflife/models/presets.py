"""Presets by name: `base[+modifier…]`, for example `mamba2+post` or `simple+vector+rope`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from halflife import layers
from halflife.models.config import ModelConfig
from halflife.registry import Registry

Options = dict[str, Any]

PRESETS: Registry[Callable[[int, int | None], tuple[str, Options]]] = Registry("preset")
MODIFIERS: Registry[Callable[[str, str, Options, int], Options]] = Registry("modifier")


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
        num_heads: heads a layer; None means the architecture's own choice.
        train_length: tokens of a training sequence, which PoST spreads its spectrum over.
        mixer_options: options of the mixer that override the preset's.
        **config: other fields of `ModelConfig` (`mlp`, `tie_embeddings`, …).

    Raises:
        ValueError: an unknown name, or a combination that has no meaning; the message says why.
    """
    base, *modifiers = name.split("+")
    mixer, options = PRESETS[base](hidden_size, num_heads)
    for i, modifier in enumerate(modifiers):
        if modifier in modifiers[:i]:
            raise ValueError(f"modifier {modifier!r} is given twice in {name!r}")
        for clash in ({"post", "post_norm"}, {"scalar", "vector"}):
            if clash <= set(modifiers):
                raise ValueError(f"{' and '.join(sorted(clash))} exclude each other in {name!r}")
        options = MODIFIERS[modifier](base, mixer, options, train_length)
    options = {**options, **(mixer_options or {})}
    model = ModelConfig(
        name=name, vocab_size=vocab_size, hidden_size=hidden_size, num_layers=num_layers,
        mixer=mixer, mixer_options=options, **config,
    )  # fmt: skip
    try:
        with torch.device("meta"):
            layers.build(mixer, hidden_size=hidden_size, layer_idx=0, num_layers=num_layers, **options)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name!r} has no meaning: {error}") from error
    return model


# ------------------------------------------------------------------------------------------------ bases


@PRESETS.add("mamba2")
def mamba2(hidden_size: int, num_heads: int | None) -> tuple[str, Options]:
    """Mamba-2: scalar data-dependent decay, shared B and C, short convolution."""
    return "mamba2", {"num_heads": num_heads or max(1, 2 * hidden_size // 64)}


@PRESETS.add("gated_deltanet")
def gated_deltanet(hidden_size: int, num_heads: int | None) -> tuple[str, Options]:
    """Gated DeltaNet: the delta rule under Mamba-2's decay."""
    return "gated_deltanet", {"num_heads": num_heads or _heads(hidden_size)}


@PRESETS.add("deltanet")
def deltanet(hidden_size: int, num_heads: int | None) -> tuple[str, Options]:
    """DeltaNet: the delta rule without decay."""
    return "deltanet", {"num_heads": num_heads or _heads(hidden_size)}


@PRESETS.add("gla")
def gla(hidden_size: int, num_heads: int | None) -> tuple[str, Options]:
    """Gated Linear Attention: vector decay σ(f)^(1/16)."""
    return "gla", {"num_heads": num_heads or 4}


@PRESETS.add("retnet")
def retnet(hidden_size: int, num_heads: int | None) -> tuple[str, Options]:
    """RetNet: fixed decays a head, RoPE."""
    return "retnet", {"num_heads": num_heads or _heads(hidden_size, 128)}


@PRESETS.add("hgrn2")
def hgrn2(hidden_size: int, num_heads: int | None) -> tuple[str, Options]:
    """HGRN2's decay in the design-space block: a lower bound that grows with depth, k = 1 − λ."""
    return _design_space(hidden_size, num_heads, "hgrn2", share_keys=True)


@PRESETS.add("lightnet")
def lightnet(hidden_size: int, num_heads: int | None) -> tuple[str, Options]:
    """LightNet's decay in the design-space block: a running softmax over the past, k = 1 − λ."""
    return _design_space(hidden_size, num_heads, "lightnet", share_keys=True)


@PRESETS.add("tnl")
def tnl(hidden_size: int, num_heads: int | None) -> tuple[str, Options]:
    """TransNormerLLM's fixed decays in the design-space block, slower in deeper layers."""
    return _design_space(hidden_size, num_heads, "tnl", granularity="scalar")


@PRESETS.add("tnl_l")
def tnl_l(hidden_size: int, num_heads: int | None) -> tuple[str, Options]:
    """TransNormerLLM's decays, learnable."""
    return _design_space(hidden_size, num_heads, "tnl_l", granularity="scalar")


@PRESETS.add("simple")
def simple(hidden_size: int, num_heads: int | None) -> tuple[str, Options]:
    """Simple Decay in the design-space block: σ(f + logit 0.99)."""
    return _design_space(hidden_size, num_heads, "simple")


@PRESETS.add("llama")
def llama(hidden_size: int, num_heads: int | None) -> tuple[str, Options]:
    """Softmax attention with RoPE: the baseline whose memory grows with the context."""
    return "attention", {"num_heads": num_heads or _heads(hidden_size)}


def _design_space(
    hidden_size: int, num_heads: int | None, decay: str, granularity: str = "vector", share_keys: bool = False
) -> tuple[str, Options]:
    options = {"decay": decay, "granularity": granularity, "share_keys": share_keys}
    return "linear", {"num_heads": num_heads or _heads(hidden_size), **options}


def _heads(hidden_size: int, head_dim: int = 64) -> int:
    return max(1, hidden_size // head_dim)


# -------------------------------------------------------------------------------------------- modifiers


@MODIFIERS.add("post")
def post(base: str, mixer: str, options: Options, train_length: int) -> Options:
    """PoST as in its paper: an ordered, geometric spectrum that stretches with the position (t_ref = 1)."""
    return _post(base, mixer, options, train_length, 1)


@MODIFIERS.add("post_norm")
def post_norm(base: str, mixer: str, options: Options, train_length: int) -> Options:
    """PoST as in its theorem: time-scales t^α, equal to the static spectrum at the training length."""
    return _post(base, mixer, options, train_length, train_length)


def _post(base: str, mixer: str, options: Options, train_length: int, reference_length: int) -> Options:
    if mixer == "attention" or base == "deltanet":
        raise ValueError(f"post orders decay rates, and {base} has no decay")
    if base == "gla":
        # PoST's GLA is its RetNet: rates a head, independent of the input (PoST, App. E).
        options = {**options, "decay": "retnet", "granularity": "scalar"}
    return {**options, "post": {"train_length": train_length, "reference_length": reference_length}}


@MODIFIERS.add("vector")
def vector(base: str, mixer: str, options: Options, train_length: int) -> Options:
    """One decay a key channel."""
    return _granularity(base, mixer, options, "vector")


@MODIFIERS.add("scalar")
def scalar(base: str, mixer: str, options: Options, train_length: int) -> Options:
    """One decay a head."""
    return _granularity(base, mixer, options, "scalar")


def _granularity(base: str, mixer: str, options: Options, granularity: str) -> Options:
    if mixer == "attention" or base == "deltanet":
        raise ValueError(f"{base} has no decay that could be {granularity}")
    if mixer == "mamba2":
        if granularity == "scalar":
            return options
        raise ValueError("Mamba-2's layer has one step a head, for the decay and for the input: it cannot be vector")
    return {**options, "granularity": granularity, **({"share_keys": False} if granularity == "scalar" else {})}


@MODIFIERS.add("share")
def share(base: str, mixer: str, options: Options, train_length: int) -> Options:
    """No key of its own: k = 1 − λ."""
    if mixer in ("attention", "mamba2") or base == "deltanet":
        raise ValueError(f"k = 1 − λ needs a vector decay, which {base} has not")
    return {**options, "share_keys": True}


@MODIFIERS.add("rope")
def rope(base: str, mixer: str, options: Options, train_length: int) -> Options:
    """Rotary position embedding on queries and keys (pairs of channels then decay alike)."""
    if mixer == "attention":
        raise ValueError(f"{base} has RoPE already")
    if mixer == "mamba2":
        raise ValueError("Mamba-2's B and C carry no rotary positions; Mamba-3's do")
    return {**options, "position": "rope"}
