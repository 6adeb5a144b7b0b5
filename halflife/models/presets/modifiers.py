"""The table of modifiers of a preset, `base+modifier+…`: what each one changes, and which bases it refuses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from halflife.models.presets.sizes import PresetSizes
from halflife.registry import Registry

Options = dict[str, Any]

# Whether a base, given by its name and its fields of `ModelConfig`, is refused; and why, with {base} and {modifier}.
Refusal = tuple[Callable[[str, Options], bool], str]


@dataclass
class Modifier:
    """A row of the table of modifiers."""

    # the fields of `ModelConfig` that change, or a function that gives them for a base's name and the sizes. A hybrid's
    # second mixer has no layers yet.
    change: Options | Callable[[str, PresetSizes], Options]
    refusals: tuple[Refusal, ...]  # the bases that have no such model, and why
    summary: str  # one sentence for `halflife list`
    unchanged: tuple[str, ...] = ()  # mixers that are like this already

    def __post_init__(self) -> None:
        self.__doc__ = self.summary


def merge(old: Mapping[str, Any], new: Mapping[str, Any]) -> Options:
    """Return `old` with the values of `new`. Where both hold a mapping, the two are merged in the same way."""
    changed = {
        name: merge(old[name], value) if isinstance(value, Mapping) and isinstance(old.get(name), Mapping) else value
        for name, value in new.items()
    }
    return {**old, **changed}


def _mixer(**options: Any) -> Options:
    return {"mixer_options": options}


def _second(mixer: str, **options: Any) -> Options:
    return {"hybrid": {"mixer": mixer, "options": options}}


# Options of SKA as the paper prints them (Echo, §3.2 and Appendix F).
SKA_PAPER: Options = {
    "power": 2, "mix": "koopman", "query_init": "own", "normalization": "paper", "decode_refresh": "token"
}  # fmt: skip
SKA_DECAY: Options = {"decay": "simple", "beta": True}
SLIDING_WINDOW = 2048  # tokens, as in Samba

# The bases that the paper and the released code of PoST have.
POST_BASES = ("mamba2", "rwkv7", "gated_deltanet", "gla", "retnet")


def _post_options(sizes: PresetSizes, reference_length: int = 1, **options: Any) -> Options:
    return {"train_length": sizes.train_length, "reference_length": reference_length, **options}


def _post(base: str, sizes: PresetSizes, **options: Any) -> Options:
    # The decays of PoST's RetNet are one rate per head, independent of the input. Keys keep GLA's size. Mamba-3 gets
    # learned rates, because PoST sorts them.
    retnet, learned = {"decay": "retnet", "granularity": "scalar"}, {"rate_floor": None}
    own = {"gla": retnet, "mamba3": learned, "mamba3_mimo": learned}.get(base, {})
    return _mixer(**own, post=_post_options(sizes, **options))


def _post_retnet(sizes: PresetSizes, **decay: Any) -> Options:
    """The options with which GLA and RetNet are one model under PoST: equal heads, K = V, and no positions."""
    heads = sizes.heads(head_dim=128)
    size = sizes.hidden_size // heads
    return {"num_heads": heads, "head_dim": size, "value_dim": size, "position": "none", **decay}


def _post_paper(base: str, sizes: PresetSizes) -> Options:
    own: Options = {"decay_options": {"step_bias": "frozen"}} if base in ("mamba2", "gated_deltanet") else {}
    if base in ("gla", "retnet"):
        own = _post_retnet(sizes, decay="retnet", granularity="scalar")
    return _mixer(**own, post={"train_length": sizes.train_length})


def _post_released(base: str, sizes: PresetSizes) -> Options:
    own: Options = {}
    post: Options = {"train_length": sizes.train_length}
    if base in ("gla", "retnet"):
        own = _post_retnet(sizes, decay="mamba2_headwise", granularity="vector", decay_rank=0, decay_bias=False)
        post["rate_range"] = [1.0, 16.0]
    elif base == "gated_deltanet":
        own = {"decay_options": {"step_bias": "random"}}
        post["rate_range"] = [1.0, float(sizes.train_length)]
    elif base == "mamba2":
        own = {"decay_options": {"step_bias": "frozen"}}
    else:
        post["learning_rate_factor"] = 2.0
    return _mixer(**own, post=post)


def _of(*mixers: str) -> Callable[[str, Options], bool]:
    return lambda base, model: model["mixer"] in mixers


def _not_of(*mixers: str) -> Callable[[str, Options], bool]:
    return lambda base, model: model["mixer"] not in mixers


def _no_block(why: str) -> Refusal:
    return _not_of(*DESIGN_SPACE), f"{{base}} {why}; take a preset of the design-space block, such as simple or gla"


def _no_post(where: str) -> tuple[Refusal, ...]:
    why = f"PoST's {where} has mamba2, rwkv7, gated_deltanet, gla and retnet, but not {{base}}; take +post"
    return ((lambda base, model: base not in POST_BASES, why),)


# Layers that are built from the design-space block, each with its settings.
DESIGN_SPACE = ("linear", "gla", "retnet", "gated_deltanet", "deltanet")
NO_DECAY: tuple[Refusal, ...] = (
    (_of("attention", "deltanet"), "{modifier} changes a decay, and {base} has none"),
    (_of("mamba3_echo", "longhorn", "fox"),
     "{modifier} changes a decay with parameters, and in {base} the input alone sets it"),
)  # fmt: skip
NO_VECTOR = (*NO_DECAY, (_of("mamba2", "mamba3"),
    "{base} has one step size per head for the decay and the input; it cannot be vector. Mamba-2's vector decay in the "
    "Decay paper's block is its row vector/mamba2"))  # fmt: skip
NO_SCALAR = (*NO_DECAY, (_of("rwkv7"), "RWKV-7 has one decay per key channel, which cannot be scalar"))
NO_SHARED_KEYS = (*NO_DECAY, _no_block("projects its keys and cannot use k = 1 − λ"))
OWN_UPDATE = (_no_block("has an update of its own"),)
NO_GATE_RANK = (*NO_DECAY, (_of("rwkv7", "gdn2", "comba", "deltaproduct"),
    "GateRank needs the linear or the delta update, and {base} has another update"))  # fmt: skip
NO_LOG_LINEAR = (*NO_DECAY, (_not_of("mamba2", *DESIGN_SPACE),
    "log-linear attention needs the linear update of Mamba-2 or the design-space block; got {base}"))  # fmt: skip
OWN_POSITIONS = ((_of("attention"), "{base} has RoPE already"),
    _no_block("encodes positions already or has no keys that could carry them"))  # fmt: skip
NO_TOEPLITZ = ((_of("attention", "retnet"), "{base} has RoPE already"),)
HAS_KOOPMAN = ((lambda base, model: str(model.get("mlp")).startswith("koopman"), "{base} has Koopman MLPs already"),)
ALL_ATTENTION = ((_of("attention"), "every layer of {base} is softmax attention already"),)

TIME_SCALES: dict[str, Modifier] = {
    "post": Modifier(_post, NO_DECAY,
        "PoST with a trained step size: an ordered geometric spectrum that stretches with the position (t_ref = 1)."),
    "post_norm": Modifier(lambda base, sizes: _post(base, sizes, reference_length=sizes.train_length), NO_DECAY,
        "`post` as in the theorem: time-scales t^α that equal the static spectrum at the training length."),
    "post_optimal": Modifier(lambda base, sizes: _post(base, sizes, endpoints="optimal"), NO_DECAY,
        "`post` with the end points that approximate t^(−1/2) best, about 0.5/T and 4."),
    "post_paper": Modifier(_post_paper, _no_post("paper"),
        "PoST as its paper prints it: Δ fixed at 0.05; GLA and RetNet are one model (Algorithms 2 to 4)."),
    "post_released": Modifier(_post_released, _no_post("released code"),
        "PoST as its released code has it: Δ fixed for Mamba-2; other ranges for Gated DeltaNet, GLA and RetNet."),
    "vector": Modifier(_mixer(granularity="vector"), NO_VECTOR,
        "Vector decay: one decay for each key channel.", unchanged=("rwkv7",)),
    "scalar": Modifier(_mixer(granularity="scalar", share_keys=False), NO_SCALAR,
        "Scalar decay: one decay for each head.", unchanged=("mamba2", "mamba3")),
    "share": Modifier(_mixer(share_keys=True), NO_SHARED_KEYS,
        "Keys shared with the decay: k = 1 − λ."),
}  # fmt: skip
UPDATES: dict[str, Modifier] = {
    "delta": Modifier(_mixer(update="delta"), OWN_UPDATE,
        "Delta rule: after the decay, the value stored under a key is replaced."),
    "dplr": Modifier(_mixer(update="dplr"), OWN_UPDATE,
        "Diagonal plus low rank (DPLR): the value stored under a key is replaced while the state decays."),
    "dplr_released": Modifier(_mixer(update="dplr_released"), OWN_UPDATE,
        "DPLR as the Decay paper's authors ran it: the state decays first, β lies in (0, 2), and v has no β."),
    "gate_rank": Modifier(_mixer(gate_rank={}), NO_GATE_RANK,
        "GateRank: a slow state beside the fast (decaying) state, which it absorbs at learned resets; a scalar decay."),
    "log_linear": Modifier(_mixer(log_linear={}), NO_LOG_LINEAR,
        "Log-linear attention (Guo et al. 2025): a state for every power of two of the distance; a scalar decay."),
}  # fmt: skip
POSITIONS: dict[str, Modifier] = {
    "rope": Modifier(_mixer(position="rope"), OWN_POSITIONS,
        "Rotary position embedding of queries and keys; the two channels of a pair then share a decay."),
    "lrpe": Modifier(_mixer(position="lrpe"), OWN_POSITIONS,
        "Linearised relative position embedding: cosines of the distance; the state has twice as many rows."),
    "rope_released": Modifier(_mixer(position="half_lrpe"), OWN_POSITIONS,
        "The RoPE rows as the Decay paper's authors ran them: cosine LRPE on half of the channels."),
    "tpe": Modifier({"position": "tpe"}, NO_TOEPLITZ,
        "Toeplitz layer after the embedding: it weighs past tokens by their distance alone."),
    "tpe_paper": Modifier({"position": "tpe_paper"}, NO_TOEPLITZ,
        "TPE as the Decay paper prints it: one decay per head, without a norm or a projection."),
    "tpe_released": Modifier({"position": "tpe_released"}, NO_TOEPLITZ,
        "TPE as the Decay paper's authors ran it: one decay per head, norm and projection, in place of the embedding."),
}  # fmt: skip
HYBRIDS: dict[str, Modifier] = {
    "ska": Modifier(_second("ska"), (),
        "Spectral Koopman attention in one layer of twelve, at least one, evenly spaced, never the first."),
    "ska_decay": Modifier(_second("ska", **SKA_DECAY), (),
        "`ska` whose sums forget: a scalar Simple Decay and a strength β of every token."),
    "ska_post": Modifier(lambda base, sizes: _second("ska", **SKA_DECAY, post=_post_options(sizes)), (),
        "`ska_decay` with PoST around its decay, as in PoST's paper (t_ref = 1)."),
    "ska_paper": Modifier(_second("ska", **SKA_PAPER), (),
        "`ska` as Echo prints it: K = 2, μ = 1, projected queries, one norm per sequence, decoding by token."),
    "attention": Modifier(_second("attention"), ALL_ATTENTION,
        "Softmax attention with RoPE in the layers that `ska` would replace, or in 1 of n + 1 layers (`attention:n`)."),
    "swa": Modifier(_second("attention", window=SLIDING_WINDOW), (),
        "Sliding-window attention with RoPE over 2,048 tokens in the layers that `ska` would replace, or `swa:n`."),
    "nope": Modifier(_second("attention", position="none"), (),
        "Softmax attention without positions (NoPE) in the layers that `ska` would replace, or `nope:n`."),
}  # fmt: skip
MLPS: dict[str, Modifier] = {
    "koopman_mlp": Modifier({"mlp": "koopman"}, HAS_KOOPMAN,
        "Echo's Koopman MLP in place of the MLP or of RWKV-7's channel mix."),
}  # fmt: skip

# Family, by which `halflife list` orders the modifiers → name → row.
MODIFIER_TABLE = {
    "time-scales": TIME_SCALES, "update": UPDATES, "positions": POSITIONS, "hybrids": HYBRIDS, "MLP": MLPS
}  # fmt: skip
MODIFIERS: Registry[Modifier] = Registry("modifier")
for _rows in MODIFIER_TABLE.values():
    for _name, _row in _rows.items():
        MODIFIERS.add(_name)(_row)

# Modifiers of which a model has one.
EXCLUSIVE = (
    ({"post", "post_norm", "post_optimal", "post_paper", "post_released"}, "a decay is wrapped once"),
    ({"scalar", "vector"}, "a decay has one granularity"),
    ({"scalar", "share"}, "k = 1 − λ needs one λ per channel"),
    ({"rope", "lrpe", "tpe", "rope_released", "tpe_paper", "tpe_released"}, "positions are encoded once"),
    ({"delta", "dplr", "dplr_released"}, "a state has one update"),
    ({"gate_rank", "log_linear"}, "a layer has one set of states"),
)
# Bases, forms of PoST that replace their decay or their positions, and the modifiers that have no effect then.
REPLACED = (
    ({"gla"}, {"post", "post_norm", "post_optimal"}, {"vector"}),
    ({"gla", "retnet"}, {"post_paper", "post_released"}, {"vector", "scalar", "rope", "lrpe", "rope_released"}),
)
