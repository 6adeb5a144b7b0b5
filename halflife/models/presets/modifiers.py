"""What stands after a preset's first "+": modifiers, which change a base's options or fields."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from halflife.models.presets.sizes import ECHO
from halflife.registry import Registry

Options = dict[str, Any]


class Sizes(NamedTuple):
    """What a base or a modifier may need to know; `num_heads` None leaves the heads to the architecture."""

    hidden_size: int
    num_layers: int
    num_heads: int | None
    train_length: int


# A modifier changes the mixer's options, or a field of `ModelConfig`.
MODIFIERS: Registry[Callable[[str, Options, Sizes], Options]] = Registry("modifier")

EXCLUSIVE = (
    ({"post", "post_norm", "post_optimal"}, "a decay is wrapped once"),
    ({"scalar", "vector"}, "a decay has one granularity"),
    ({"rope", "lrpe", "tpe"}, "positions are encoded once"),
    ({"delta", "dplr"}, "a state has one update"),
    ({"attention", "ska"}, "a hybrid has one other mixer"),
)

# Layers that are the design-space block with settings of their own.
DESIGN_SPACE = ("linear", "gla", "retnet", "gated_deltanet", "deltanet")


def check_modifiers(name: str, modifiers: list[str]) -> None:
    """Raises for a modifier given twice, and for two that exclude each other, in the preset `name`."""
    for i, modifier in enumerate(modifiers):
        if modifier in modifiers[:i]:
            raise ValueError(f"modifier {modifier!r} is given twice in {name!r}")
    for group, why in EXCLUSIVE:
        if len(clash := group & set(modifiers)) > 1:
            raise ValueError(f"{' and '.join(sorted(clash))} exclude each other in {name!r}: {why}")


def heads(hidden_size: int, head_dim: int = 64) -> int:
    """As many heads of `head_dim` channels as fit, at least one."""
    return max(1, hidden_size // head_dim)


def hybrid(sizes: Sizes, mixer: str) -> Options:
    """`ModelConfig.hybrid` with `mixer` in place of the base's in some layers.

    One layer in twelve, at least one, evenly spaced: never the first, and the last only if there are two. Echo's two
    sizes have Echo's own layers (`sizes.ECHO`), so that every hybrid of these sizes is laid out as the paper's are.

    Raises:
        ValueError: a single layer.
    """
    depth, layout = sizes.num_layers, ECHO.get((sizes.hidden_size, sizes.num_layers))
    if depth < 2:
        raise ValueError(f"a hybrid has two kinds of layers, so at least two of them; got num_layers={depth}")
    count = max(1, depth // 12)
    where = [(i + 1) * depth // (count + 1) for i in range(count)] if layout is None else list(layout.layers)
    options: Options = {"num_heads": sizes.num_heads or heads(sizes.hidden_size)}
    if mixer == "ska":
        options["rank"] = 48 if layout is None else layout.rank
    return {"mixer": mixer, "options": options, "layers": where}


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
    return _post(base, model, train_length=sizes.train_length, reference_length=1)


@MODIFIERS.add("post_norm")
def post_norm(base: str, model: Options, sizes: Sizes) -> Options:
    """PoST as in its theorem: time-scales t^α, equal to the static spectrum at the training length."""
    return _post(base, model, train_length=sizes.train_length, reference_length=sizes.train_length)


@MODIFIERS.add("post_optimal")
def post_optimal(base: str, model: Options, sizes: Sizes) -> Options:
    """PoST as in its paper, but from the end points that approximate t^(−1/2) best, about 0.5/T and 4."""
    return _post(base, model, train_length=sizes.train_length, reference_length=1, endpoints="optimal")


def _post(base: str, model: Options, **options: Any) -> Options:
    _needs_decay(base, model, "post")
    if base == "gla":
        # PoST's GLA is its RetNet: rates a head, independent of the input (PoST, App. E).
        model = _with(model, decay="retnet", granularity="scalar")
    return _with(model, post=options)


@MODIFIERS.add("gate_rank")
def gate_rank(base: str, model: Options, sizes: Sizes) -> Options:
    """GateRank: beside the state that decays, a slow one that takes it over at learned resets (a scalar decay)."""
    _needs_decay(base, model, "gate_rank")
    if model["mixer"] == "rwkv7":
        raise ValueError("GateRank has the linear or the delta update, and RWKV-7 has DPLR")
    return _with(model, gate_rank={})


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
    """Spectral Koopman attention in some layers: one in twelve, at least one, evenly spaced, never the first."""
    return _hybrid(base, model, sizes, "ska")


@MODIFIERS.add("attention")
def attention(base: str, model: Options, sizes: Sizes) -> Options:
    """Softmax attention with RoPE in some layers, those that `ska` would take."""
    if model["mixer"] == "attention":
        raise ValueError(f"every layer of {base} is softmax attention already")
    return _hybrid(base, model, sizes, "attention")


def _hybrid(base: str, model: Options, sizes: Sizes, mixer: str) -> Options:
    if "hybrid" in model:
        raise ValueError(f"{base} has {model['hybrid']['mixer']} in some layers already, and one other mixer at most")
    return {**model, "hybrid": hybrid(sizes, mixer)}


@MODIFIERS.add("koopman_mlp")
def koopman_mlp(base: str, model: Options, sizes: Sizes) -> Options:
    """Echo's channel mixer in place of the MLP (of RWKV-7's channel mix)."""
    if model.get("mlp") == "koopman":
        raise ValueError(f"the MLPs of {base} are Koopman's already")
    return {**model, "mlp": "koopman"}
