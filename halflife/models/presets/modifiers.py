"""Modifiers of a preset, `base+modifier+…`: each one changes fields or mixer options of the base's configuration."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from halflife.models.presets.sizes import PresetSizes
from halflife.registry import Registry

Options = dict[str, Any]

# A modifier takes the base's name, the fields of `ModelConfig` so far, and the sizes. It returns the new fields.
Modifier = Callable[[str, Options, PresetSizes], Options]

# Modifiers that put another mixer into some layers. They take a ratio.
HYBRIDS = ("ska", "ska_decay", "ska_post", "ska_paper", "attention", "swa", "nope")


class Modifiers(Registry[Modifier]):
    """Modifiers by name. The name of a hybrid may end in a ratio, as in `attention:3`."""

    def __getitem__(self, name: str) -> Modifier:
        name, colon, ratio = name.partition(":")
        modifier: Any = super().__getitem__(name)
        if not colon:
            return modifier
        if name not in HYBRIDS:
            raise ValueError(f"{name} takes no ratio; these modifiers do: {', '.join(HYBRIDS)}")
        if not ratio.isdecimal() or int(ratio) < 1:
            raise ValueError(f"the ratio of {name} is a number of layers of the base, at least 1; got {ratio!r}")
        return partial(modifier, ratio=int(ratio))


MODIFIERS = Modifiers("modifier")

EXCLUSIVE = (
    ({"post", "post_norm", "post_optimal", "post_paper", "post_released"}, "a decay is wrapped once"),
    ({"scalar", "vector"}, "a decay has one granularity"),
    ({"scalar", "share"}, "k = 1 − λ needs one λ a channel"),
    ({"rope", "lrpe", "tpe", "rope_released", "tpe_paper", "tpe_released"}, "positions are encoded once"),
    ({"delta", "dplr", "dplr_released"}, "a state has one update"),
    ({"gate_rank", "gate_rank_paper", "log_linear"}, "a layer has one set of states"),
)

# Bases, forms of PoST that replace their decay or their positions, and the modifiers that would be lost by it.
REPLACED = (
    ({"gla"}, {"post", "post_norm", "post_optimal"}, {"vector"}),
    ({"gla", "retnet"}, {"post_paper", "post_released"}, {"vector", "scalar", "rope", "lrpe", "rope_released"}),
)

# Layers that are built from the design-space block, each with its settings.
DESIGN_SPACE = ("linear", "gla", "retnet", "gated_deltanet", "deltanet")


class SKAPlacement(NamedTuple):
    """The layers of a model that are SKA, counted from 0, and the rank of their keys."""

    layers: tuple[int, ...]
    rank: int


# Source: Echo, §3.4. The keys are (hidden_size, num_layers).
ECHO_SKA = {(448, 16): SKAPlacement((3, 7, 11, 15), 56), (768, 24): SKAPlacement((8, 16), 48)}


# Options of SKA as the paper prints them (Echo, §3.2 and Appendix F).
SKA_PAPER: Options = {
    "power": 2, "mix": "koopman", "query_init": "own", "normalization": "paper", "decode_refresh": "token"
}  # fmt: skip


def check_modifiers(name: str, written: list[str]) -> None:
    """Check that no modifier of the preset `name` is repeated and that no two exclude each other.

    Raises:
        ValueError: they are or do.
    """
    modifiers = [modifier.partition(":")[0] for modifier in written]
    for i, modifier in enumerate(modifiers):
        if modifier in modifiers[:i]:
            raise ValueError(f"modifier {modifier!r} is given twice in {name!r}")
    for group, why in EXCLUSIVE:
        if len(clash := group & set(modifiers)) > 1:
            raise ValueError(f"{' and '.join(sorted(clash))} exclude each other in {name!r}: {why}")
    base = name.partition("+")[0]
    for bases, forms, lost in REPLACED:
        if base in bases and (form := forms & set(modifiers)) and (clash := lost & set(modifiers)):
            raise ValueError(
                f"{min(form)} and {min(clash)} exclude each other in {name!r}: this form of PoST has its own decay and "
                f"positions for {base}"
            )
    others = [modifier for modifier in written if modifier.partition(":")[0] in HYBRIDS]
    if len(others) > 1 and not all(":" in modifier for modifier in others):
        raise ValueError(
            f"{' and '.join(sorted(others))} exclude each other in {name!r}: without ratios, as in attention:3, "
            "a hybrid has one other mixer"
        )


def _with_options(model: Options, **options: Any) -> Options:
    return {**model, "mixer_options": {**model["mixer_options"], **options}}


def _require_design_space(base: str, model: Options, why: str) -> None:
    if model["mixer"] not in DESIGN_SPACE:
        raise ValueError(f"{base} {why}; take a preset of the design-space block, such as simple or gla")


def _require_decay(base: str, model: Options, modifier: str) -> None:
    if model["mixer"] == "attention" or base == "deltanet":
        raise ValueError(f"{modifier} changes a decay, and {base} has none")
    if model["mixer"] in ("mamba3_echo", "longhorn", "fox"):
        raise ValueError(f"{modifier} changes a decay with parameters, and in {base} the input alone sets it")


@MODIFIERS.add("post")
def post(base: str, model: Options, sizes: PresetSizes) -> Options:
    """PoST as in its paper: an ordered geometric spectrum of decays that stretches with the position (t_ref = 1)."""
    return _post(base, model, train_length=sizes.train_length, reference_length=1)


@MODIFIERS.add("post_norm")
def post_norm(base: str, model: Options, sizes: PresetSizes) -> Options:
    """PoST as in its theorem: time-scales t^α that equal the static spectrum at the training length."""
    return _post(base, model, train_length=sizes.train_length, reference_length=sizes.train_length)


@MODIFIERS.add("post_optimal")
def post_optimal(base: str, model: Options, sizes: PresetSizes) -> Options:
    """PoST as in its paper, but with the end points that approximate t^(−1/2) best, about 0.5/T and 4."""
    return _post(base, model, train_length=sizes.train_length, reference_length=1, endpoints="optimal")


@MODIFIERS.add("post_paper")
def post_paper(base: str, model: Options, sizes: PresetSizes) -> Options:
    """PoST as its paper prints it: Δ fixed at 0.05; GLA and RetNet are one model (Algorithms 2 to 4)."""
    if base in ("gla", "retnet"):
        model = _with_options(model, **_post_retnet(sizes), decay="retnet", granularity="scalar")
    elif base in ("mamba2", "gated_deltanet"):
        model = _with_options(model, decay_options={"step_bias": "frozen"})
    elif base != "rwkv7":
        raise _no_post_form(base, "paper")
    return _post(base, model, train_length=sizes.train_length)


@MODIFIERS.add("post_released")
def post_released(base: str, model: Options, sizes: PresetSizes) -> Options:
    """PoST as its released code has it: Δ fixed for Mamba-2; other ranges for Gated DeltaNet, GLA and RetNet."""
    options: Options = {"train_length": sizes.train_length}
    if base in ("gla", "retnet"):
        decay = {"decay": "mamba2_headwise", "granularity": "vector", "decay_rank": 0, "decay_bias": False}
        model, options["rate_range"] = _with_options(model, **_post_retnet(sizes), **decay), [1.0, 16.0]
    elif base == "gated_deltanet":
        model = _with_options(model, decay_options={"step_bias": "random"})
        options["rate_range"] = [1.0, float(sizes.train_length)]
    elif base == "mamba2":
        model = _with_options(model, decay_options={"step_bias": "frozen"})
    elif base == "rwkv7":
        options["learning_rate_factor"] = 2.0
    else:
        raise _no_post_form(base, "released code")
    return _with_options(model, post=options)


def _post_retnet(sizes: PresetSizes) -> Options:
    """The options with which GLA and RetNet are one model under PoST: equal heads, K = V, and no positions."""
    heads = sizes.heads(head_dim=128)
    size = sizes.hidden_size // heads
    return {"num_heads": heads, "head_dim": size, "value_dim": size, "position": "none"}


def _no_post_form(base: str, where: str) -> ValueError:
    return ValueError(f"PoST's {where} has mamba2, rwkv7, gated_deltanet, gla and retnet, but not {base}; take +post")


def _post(base: str, model: Options, **options: Any) -> Options:
    _require_decay(base, model, "post")
    if base == "gla":
        # The decays of PoST's RetNet: one rate a head, independent of the input. Keys keep GLA's size (`post_paper`).
        model = _with_options(model, decay="retnet", granularity="scalar")
    return _with_options(model, post=options)


@MODIFIERS.add("gate_rank")
def gate_rank(base: str, model: Options, sizes: PresetSizes) -> Options:
    """GateRank: a slow state beside the fast (decaying) state, which it absorbs at learned resets; a scalar decay."""
    _require_decay(base, model, "gate_rank")
    if model["mixer"] in ("rwkv7", "gdn2", "comba", "deltaproduct"):
        raise ValueError(f"GateRank needs the linear or the delta update, and {base} has another update")
    return _with_options(model, gate_rank={})


@MODIFIERS.add("gate_rank_paper")
def gate_rank_paper(base: str, model: Options, sizes: PresetSizes) -> Options:
    """GateRank with the paper's gate: one a layer, its bias before the convolution and 0, A as Mamba-2's (Eq. 8)."""
    gates = {"gates": "layer", "bias": "before", "reset_rate": 0.5, "rate_start": "uniform_1_16"}
    return _with_options(gate_rank(base, model, sizes), gate_rank=gates)


@MODIFIERS.add("log_linear")
def log_linear(base: str, model: Options, sizes: PresetSizes) -> Options:
    """Log-linear attention (Guo et al. 2025): a state for every power of two of the distance; a scalar decay."""
    _require_decay(base, model, "log_linear")
    if model["mixer"] != "mamba2" and model["mixer"] not in DESIGN_SPACE:
        raise ValueError(
            f"log-linear attention needs the linear update of Mamba-2 or the design-space block; got {base}"
        )
    return _with_options(model, log_linear={})


@MODIFIERS.add("vector")
def vector(base: str, model: Options, sizes: PresetSizes) -> Options:
    """Vector decay: one decay for each key channel."""
    return _granularity(base, model, "vector")


@MODIFIERS.add("scalar")
def scalar(base: str, model: Options, sizes: PresetSizes) -> Options:
    """Scalar decay: one decay for each head."""
    return _granularity(base, model, "scalar")


def _granularity(base: str, model: Options, granularity: str) -> Options:
    _require_decay(base, model, granularity)
    if {"mamba2": "scalar", "mamba3": "scalar", "rwkv7": "vector"}.get(model["mixer"]) == granularity:
        return model
    if model["mixer"] in ("mamba2", "mamba3"):
        raise ValueError(f"{base} has one step size a head for the decay and the input; it cannot be vector")
    if model["mixer"] == "rwkv7":
        raise ValueError("RWKV-7 has one decay a key channel, which cannot be scalar")
    return _with_options(model, granularity=granularity, **({"share_keys": False} if granularity == "scalar" else {}))


@MODIFIERS.add("share")
def share(base: str, model: Options, sizes: PresetSizes) -> Options:
    """Keys shared with the decay: k = 1 − λ."""
    _require_decay(base, model, "share")
    _require_design_space(base, model, "projects its keys and cannot use k = 1 − λ")
    return _with_options(model, share_keys=True)


@MODIFIERS.add("delta")
def delta(base: str, model: Options, sizes: PresetSizes) -> Options:
    """Delta rule: after the decay, the value stored under a key is replaced."""
    _require_design_space(base, model, "has an update of its own")
    return _with_options(model, update="delta")


@MODIFIERS.add("dplr")
def dplr(base: str, model: Options, sizes: PresetSizes) -> Options:
    """Diagonal plus low rank (DPLR): the value stored under a key is replaced while the state decays."""
    _require_design_space(base, model, "has an update of its own")
    return _with_options(model, update="dplr")


@MODIFIERS.add("dplr_released")
def dplr_released(base: str, model: Options, sizes: PresetSizes) -> Options:
    """DPLR as the Decay paper's authors ran it: the state decays first, β lies in (0, 2), and v has no β."""
    _require_design_space(base, model, "has an update of its own")
    return _with_options(model, update="dplr_released")


@MODIFIERS.add("rope")
def rope(base: str, model: Options, sizes: PresetSizes) -> Options:
    """Rotary position embedding of queries and keys; the two channels of a pair then share a decay."""
    return _position(base, model, "rope")


@MODIFIERS.add("lrpe")
def lrpe(base: str, model: Options, sizes: PresetSizes) -> Options:
    """Linearised relative position embedding: cosines of the distance; the state has twice as many rows."""
    return _position(base, model, "lrpe")


@MODIFIERS.add("rope_released")
def rope_released(base: str, model: Options, sizes: PresetSizes) -> Options:
    """The RoPE rows as the Decay paper's authors ran them: cosine LRPE on half of the channels."""
    return _position(base, model, "half_lrpe")


def _position(base: str, model: Options, position: str) -> Options:
    if model["mixer"] == "attention":
        raise ValueError(f"{base} has RoPE already")
    _require_design_space(base, model, "encodes positions already or has no keys that could carry them")
    return _with_options(model, position=position)


@MODIFIERS.add("tpe")
def tpe(base: str, model: Options, sizes: PresetSizes) -> Options:
    """Toeplitz layer after the embedding: it weighs past tokens by their distance alone."""
    return _toeplitz(base, model, "tpe")


@MODIFIERS.add("tpe_paper")
def tpe_paper(base: str, model: Options, sizes: PresetSizes) -> Options:
    """TPE as the Decay paper prints it: one decay a head, without a norm or a projection."""
    return _toeplitz(base, model, "tpe_paper")


@MODIFIERS.add("tpe_released")
def tpe_released(base: str, model: Options, sizes: PresetSizes) -> Options:
    """TPE as the Decay paper's authors ran it: one decay a head, a norm and a projection, in place of the embedding."""
    return _toeplitz(base, model, "tpe_released")


def _toeplitz(base: str, model: Options, position: str) -> Options:
    if model["mixer"] in ("attention", "retnet"):
        raise ValueError(f"{base} has RoPE already")
    return {**model, "position": position}


@MODIFIERS.add("koopman_mlp")
def koopman_mlp(base: str, model: Options, sizes: PresetSizes) -> Options:
    """Echo's Koopman MLP in place of the MLP or of RWKV-7's channel mix."""
    if str(model.get("mlp")).startswith("koopman"):
        raise ValueError(f"{base} has Koopman MLPs already")
    return {**model, "mlp": "koopman"}
