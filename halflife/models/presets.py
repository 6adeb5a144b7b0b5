"""Presets by name: `base[+modifier…]`, for example `mamba2+post` or `simple+vector+rope`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from halflife import layers
from halflife.models.config import ModelConfig
from halflife.registry import Registry

Options = dict[str, Any]


class Sizes(NamedTuple):
    """What a modifier may need to know."""

    hidden_size: int
    num_layers: int
    train_length: int


# A base gives fields of `ModelConfig`; a modifier changes the mixer's options, or a field.
PRESETS: Registry[Callable[[int, int | None], Options]] = Registry("preset")
MODIFIERS: Registry[Callable[[str, Options, Sizes], Options]] = Registry("modifier")

EXCLUSIVE = (
    {"post", "post_norm"}, {"scalar", "vector"}, {"rope", "lrpe"}, {"rope", "tpe"}, {"lrpe", "tpe"}, {"delta", "dplr"},
)  # fmt: skip

# Layers that are the design-space block with settings of their own.
DESIGN_SPACE = ("linear", "gla", "retnet", "gated_deltanet", "deltanet")


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
    model = PRESETS[base](hidden_size, num_heads)
    for i, modifier in enumerate(modifiers):
        if modifier in modifiers[:i]:
            raise ValueError(f"modifier {modifier!r} is given twice in {name!r}")
        for clash in EXCLUSIVE:
            if clash <= set(modifiers):
                raise ValueError(f"{' and '.join(sorted(clash))} exclude each other in {name!r}")
        model = MODIFIERS[modifier](base, model, Sizes(hidden_size, num_layers, train_length))
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


def _heads(hidden_size: int, head_dim: int = 64) -> int:
    return max(1, hidden_size // head_dim)


@PRESETS.add("mamba2")
def mamba2(hidden_size: int, num_heads: int | None) -> Options:
    """Mamba-2: scalar data-dependent decay, shared B and C, short convolution."""
    return _base("mamba2", num_heads or _heads(2 * hidden_size))


@PRESETS.add("mamba3")
def mamba3(hidden_size: int, num_heads: int | None) -> Options:
    """Mamba-3 (SISO): trapezoidal steps, rotation by a data-dependent angle, no convolution."""
    return _base("mamba3", num_heads or _heads(2 * hidden_size))


@PRESETS.add("rwkv7")
def rwkv7(hidden_size: int, num_heads: int | None) -> Options:
    """RWKV-7: vector decay and a rank-one correction of the state (DPLR), token shift, value residual."""
    fields = {"mlp": "rwkv7", "norm": "layer", "embedding_norm": True, "tie_embeddings": False}
    return _base("rwkv7", num_heads or _heads(hidden_size), fields)


@PRESETS.add("gated_deltanet")
def gated_deltanet(hidden_size: int, num_heads: int | None) -> Options:
    """Gated DeltaNet: the delta rule under Mamba-2's decay."""
    return _base("gated_deltanet", num_heads or _heads(hidden_size))


@PRESETS.add("deltanet")
def deltanet(hidden_size: int, num_heads: int | None) -> Options:
    """DeltaNet: the delta rule without decay."""
    return _base("deltanet", num_heads or _heads(hidden_size))


@PRESETS.add("gla")
def gla(hidden_size: int, num_heads: int | None) -> Options:
    """Gated Linear Attention: vector decay σ(f)^(1/16)."""
    return _base("gla", num_heads or 4)


@PRESETS.add("retnet")
def retnet(hidden_size: int, num_heads: int | None) -> Options:
    """RetNet: fixed decays a head, RoPE."""
    return _base("retnet", num_heads or _heads(hidden_size, 128))


@PRESETS.add("hgrn2")
def hgrn2(hidden_size: int, num_heads: int | None) -> Options:
    """HGRN2's decay in the design-space block: a lower bound that grows with depth, k = 1 − λ."""
    return _design_space(hidden_size, num_heads, "hgrn2", share_keys=True)


@PRESETS.add("lightnet")
def lightnet(hidden_size: int, num_heads: int | None) -> Options:
    """LightNet's decay in the design-space block: a running softmax over the past, k = 1 − λ."""
    return _design_space(hidden_size, num_heads, "lightnet", share_keys=True)


@PRESETS.add("tnl")
def tnl(hidden_size: int, num_heads: int | None) -> Options:
    """TransNormerLLM's fixed decays in the design-space block, slower in deeper layers."""
    return _design_space(hidden_size, num_heads, "tnl", granularity="scalar")


@PRESETS.add("tnl_l")
def tnl_l(hidden_size: int, num_heads: int | None) -> Options:
    """TransNormerLLM's decays, learnable."""
    return _design_space(hidden_size, num_heads, "tnl_l", granularity="scalar")


@PRESETS.add("simple")
def simple(hidden_size: int, num_heads: int | None) -> Options:
    """Simple Decay in the design-space block: σ(f + logit 0.99)."""
    return _design_space(hidden_size, num_heads, "simple")


@PRESETS.add("llama")
def llama(hidden_size: int, num_heads: int | None) -> Options:
    """Softmax attention with RoPE: the baseline whose memory grows with the context."""
    return _base("attention", num_heads or _heads(hidden_size))


def _design_space(
    hidden_size: int, num_heads: int | None, decay: str, granularity: str = "vector", share_keys: bool = False
) -> Options:
    options = {"decay": decay, "granularity": granularity, "share_keys": share_keys}
    return _base("linear", num_heads or _heads(hidden_size), **options)


# -------------------------------------------------------------------------------------------- modifiers


def _with(model: Options, **options: Any) -> Options:
    return {**model, "mixer_options": {**model["mixer_options"], **options}}


def _needs_design_space(base: str, model: Options, why: str) -> None:
    if model["mixer"] not in DESIGN_SPACE:
        raise ValueError(f"{base} {why}; take a preset of the design-space block, such as simple or gla")


def _needs_decay(base: str, model: Options, modifier: str) -> None:
    if model["mixer"] == "attention" or base == "deltanet":
        raise ValueError(f"{modifier} is about a decay, and {base} has none")


@MODIFIERS.add("post")
def post(base: str, model: Options, sizes: Sizes) -> Options:
    """PoST as in its paper: an ordered, geometric spectrum that stretches with the position (t_ref = 1)."""
    return _post(base, model, sizes.train_length, 1)


@MODIFIERS.add("post_norm")
def post_norm(base: str, model: Options, sizes: Sizes) -> Options:
    """PoST as in its theorem: time-scales t^α, equal to the static spectrum at the training length."""
    return _post(base, model, sizes.train_length, sizes.train_length)


def _post(base: str, model: Options, train_length: int, reference_length: int) -> Options:
    _needs_decay(base, model, "post")
    if base == "gla":
        # PoST's GLA is its RetNet: rates a head, independent of the input (PoST, App. E).
        model = _with(model, decay="retnet", granularity="scalar")
    return _with(model, post={"train_length": train_length, "reference_length": reference_length})


@MODIFIERS.add("vector")
def vector(base: str, model: Options, sizes: Sizes) -> Options:
    """One decay a key channel."""
    return _granularity(base, model, "vector")


@MODIFIERS.add("scalar")
def scalar(base: str, model: Options, sizes: Sizes) -> Options:
    """One decay a head."""
    return _granularity(base, model, "scalar")


def _granularity(base: str, model: Options, granularity: str) -> Options:
    _needs_decay(base, model, granularity)
    if {"mamba2": "scalar", "mamba3": "scalar", "rwkv7": "vector"}.get(model["mixer"]) == granularity:
        return model
    if model["mixer"] in ("mamba2", "mamba3"):
        raise ValueError(f"{base} has one step a head, for the decay and for the input: it cannot be vector")
    if model["mixer"] == "rwkv7":
        raise ValueError("RWKV-7's decay is one a key channel: it cannot be scalar")
    return _with(model, granularity=granularity, **({"share_keys": False} if granularity == "scalar" else {}))


@MODIFIERS.add("share")
def share(base: str, model: Options, sizes: Sizes) -> Options:
    """No key of its own: k = 1 − λ."""
    _needs_decay(base, model, "share")
    _needs_design_space(base, model, "has keys of its own and cannot write k = 1 − λ")
    return _with(model, share_keys=True)


@MODIFIERS.add("delta")
def delta(base: str, model: Options, sizes: Sizes) -> Options:
    """The delta rule: what a key holds is replaced, after the decay."""
    _needs_design_space(base, model, "has an update of its own")
    return _with(model, update="delta")


@MODIFIERS.add("dplr")
def dplr(base: str, model: Options, sizes: Sizes) -> Options:
    """DPLR: what a key holds is replaced, beside the decay."""
    _needs_design_space(base, model, "has an update of its own")
    return _with(model, update="dplr")


@MODIFIERS.add("rope")
def rope(base: str, model: Options, sizes: Sizes) -> Options:
    """Rotary position embedding on queries and keys (pairs of channels then decay alike)."""
    return _position(base, model, "rope")


@MODIFIERS.add("lrpe")
def lrpe(base: str, model: Options, sizes: Sizes) -> Options:
    """Linearised relative positions: cosines of the distance, twice the rows of state."""
    return _position(base, model, "lrpe")


def _position(base: str, model: Options, position: str) -> Options:
    if model["mixer"] == "attention":
        raise ValueError(f"{base} has RoPE already")
    _needs_design_space(base, model, "has no keys that could carry positions besides its own")
    return _with(model, position=position)


@MODIFIERS.add("tpe")
def tpe(base: str, model: Options, sizes: Sizes) -> Options:
    """A Toeplitz layer after the embedding, which weighs the past by distance alone."""
    if model["mixer"] in ("attention", "retnet"):
        raise ValueError(f"{base} has RoPE already")
    return {**model, "position": "tpe"}


@MODIFIERS.add("ska")
def ska(base: str, model: Options, sizes: Sizes) -> Options:
    """Spectral Koopman attention in some layers: one in twelve, at least one, evenly spaced."""
    if model["mixer"] == "rwkv7":
        raise ValueError("RWKV-7's layers share the values of the first one: none of them can be another layer")
    count = max(1, sizes.num_layers // 12)
    where = [round((i + 1) * sizes.num_layers / (count + 1)) for i in range(count)]
    options = {"num_heads": _heads(sizes.hidden_size), "rank": 48}
    return {
        **model,
        "hybrid": {"mixer": "ska", "options": options, "layers": [min(i, sizes.num_layers - 1) for i in where]},
    }


@MODIFIERS.add("koopman_mlp")
def koopman_mlp(base: str, model: Options, sizes: Sizes) -> Options:
    """Echo's channel mixer in place of the MLP."""
    if model.get("mlp") == "rwkv7":
        raise ValueError("RWKV-7 has a channel mix of its own")
    return {**model, "mlp": "koopman"}
