"""Presets: the table of bases, and `preset`, which applies modifiers to a base (`mamba2+post`, `simple+rope`)."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from halflife import layers
from halflife.models.config import ModelConfig
from halflife.models.presets.modifiers import EXCLUSIVE, HYBRIDS, MODIFIER_TABLE, MODIFIERS, REPLACED, Options, merge
from halflife.models.presets.sizes import PresetSizes
from halflife.registry import Registry, taken, unknown

# Fields of `ModelConfig` that `preset` takes as they are.
CONFIG_FIELDS = [field.name for field in dataclasses.fields(ModelConfig) if field.name != "name"]


# (hidden_size, num_layers) → the SKA layers of Echo's models, counted from 0, and the rank of their keys. Source: §3.4.
ECHO_SKA = {(448, 16): ([3, 7, 11, 15], 56), (768, 24): ([8, 16], 48)}
SKA_RANK = 48  # at other sizes


@dataclass
class Base:
    """A row of the table of bases. Called with the sizes of a model, it returns fields of `ModelConfig`."""

    mixer: str  # name of the mixer
    summary: str  # one sentence for `halflife list`
    options: Options = dataclasses.field(default_factory=dict)  # options of the mixer beside its number of heads
    fields: Options = dataclasses.field(default_factory=dict)  # further fields of `ModelConfig`
    modifiers: tuple[str, ...] = ()  # modifiers that the base consists of
    # expand, head_dim: see `PresetSizes.heads`
    expand: int = 1
    head_dim: int = 64
    num_heads: int | None = None  # heads that the architecture has at every size

    def __post_init__(self) -> None:
        self.__doc__ = self.summary

    def __call__(self, sizes: PresetSizes) -> Options:
        heads = sizes.num_heads or self.num_heads or sizes.heads(expand=self.expand, head_dim=self.head_dim)
        options = {**taken(layers.LAYERS[self.mixer], {"num_heads": heads}), **self.options}
        model = {"mixer": self.mixer, "mixer_options": options, **self.fields}
        for modifier in self.modifiers:
            model = _modify(modifier, self.mixer, model, sizes)
        return model


def _block(summary: str, decay: str, granularity: str = "vector", share_keys: bool = False) -> Base:
    return Base("linear", summary, {"decay": decay, "granularity": granularity, "share_keys": share_keys})


UNTIED = {"tie_embeddings": False}
RWKV7 = {"mlp": "rwkv7", "norm": "layer", "embedding_norm": True, **UNTIED}

# Family, by which `halflife list` orders the bases → name → row.
BASE_TABLE: dict[str, dict[str, Base]] = {
    "state space": {
        "mamba2": Base("mamba2",
            "Mamba-2: scalar data-dependent decay, B and C shared by the heads, short convolution.", expand=2),
        "mamba3": Base("mamba3",
            "Mamba-3 (SISO): trapezoidal steps, rotation by a data-dependent angle, no convolution.", expand=2),
        "mamba3_mimo": Base("mamba3",
            "Mamba-3 (MIMO): writes and reads of rank 4 in each token and head.", {"rank": 4}, expand=2),
        "mamba3_echo": Base("mamba3_echo",
            "Mamba-3 as the baseline of Echo's tables: a convolution on the values, keys and angles per head.",
            fields=UNTIED, expand=2),
        "longhorn": Base("longhorn",
            "Longhorn: the smallest change of the state that stores the new pair; one step size per head.", expand=2),
        "longhorn_paper": Base("longhorn",
            "Longhorn as its paper prints it: one step size for each channel.", {"step": "channel"}, expand=2),
    },
    "linear attention": {
        "gla": Base("gla", "Gated Linear Attention: vector decay σ(f)^(1/16).", num_heads=4),
        "retnet": Base("retnet", "RetNet: one fixed decay per head, RoPE.", head_dim=128),
        "hgrn2": _block(
            "HGRN2's decay in the design-space block: its lower bound grows with depth, and k = 1 − λ.",
            "hgrn2", share_keys=True),
        "lightnet": _block(
            "LightNet's decay in the design-space block: a running softmax over the past, and k = 1 − λ.",
            "lightnet", share_keys=True),
        "tnl": _block(
            "TransNormerLLM's fixed decays in the design-space block, slower in deeper layers.", "tnl", "scalar"),
        "tnl_released": _block(
            "TransNormerLLM's fixed decays as released: half-lives of 1.4 to 177 tokens in the first layer.",
            "tnl_released", "scalar"),
        "tnl_l": _block("TransNormerLLM's decays in the design-space block, made learnable.", "tnl_l", "scalar"),
        "simple": _block("Simple Decay in the design-space block: σ(f + logit 0.99).", "simple"),
    },
    "delta rule": {
        "deltanet": Base("deltanet", "DeltaNet: the delta rule without decay."),
        "gated_deltanet": Base("gated_deltanet", "Gated DeltaNet: the delta rule under Mamba-2's decay."),
        "kda": Base("kda", "Kimi Delta Attention: the delta rule under a vector decay, with low-rank sigmoid gates."),
        "gdn2": Base("gdn2",
            "Gated DeltaNet-2: KDA with an erase gate on the key's channels and a write gate on the value's."),
        "comba": Base("comba",
            "Comba: a scalar decay and a fraction of the key that reads the state, also from the output."),
        "deltaproduct": Base("deltaproduct",
            "DeltaProduct: two steps of the gated delta rule per token, with negative eigenvalues."),
        "mesa": Base("mesa",
            "MesaNet: ridge regression on all tokens so far, which decay, solved per token by conjugate gradients."),
        "rwkv7": Base("rwkv7",
            "RWKV-7: vector decay and a rank-one correction of the state (DPLR), token shift, value residual.",
            fields=RWKV7),
    },
    "softmax attention": {
        "llama": Base("attention",
            "Softmax attention with RoPE: the baseline whose memory grows with the context."),
        "fox": Base("fox",
            "Forgetting attention: softmax attention in which old tokens fade; its memory grows with the context."),
    },
    # The layers and sizes of both are the paper's (§3.4), and so are the sums and the ridge regression of SKA. The SKA
    # of `echo` differs in its power K = 1 for the paper's 2, in a learned mixture with the ridge regression, in queries
    # that start as keys, and in a causal norm. One power maps a key to the key that followed it.
    # Counted from 0, the SKA layers are {8, 16} of 24 in the 180M model and {3, 7, 11, 15} of 16 in the 50M model. The
    # last layer of the 50M model contradicts the paper's "first and last layers are always Mamba-2". That rule holds
    # here at every other size, except that the second of two layers is SKA. d_state is 64, the paper's value for the
    # 50M model; the paper gives none for the 180M model.
    "Koopman attention": {
        "echo": Base("mamba2",
            "Our Echo: Mamba-2 with a few layers of our spectral Koopman attention, and Koopman MLPs.",
            {"state_size": 64}, {"mlp": "koopman"}, ("ska",), expand=2),
        "echo_paper": Base("mamba2",
            "Echo as its paper prints it: SKA of `ska_paper`, and Koopman MLPs with moduli clamped at 1.",
            {"state_size": 64}, {"mlp": "koopman_paper"}, ("ska_paper",), expand=2),
    },
}  # fmt: skip
# A base takes the sizes and returns fields of `ModelConfig`. Those of users may be functions.
PRESETS: Registry[Callable[[PresetSizes], Options]] = Registry("preset")
for _rows in BASE_TABLE.values():
    for _name, _row in _rows.items():
        PRESETS.add(_name)(_row)


def by_family(names: Iterable[str]) -> dict[str, list[str]]:
    """Group names of bases and modifiers, `": family" → names`. Those of users come first, under `""`."""
    tables = {**BASE_TABLE, **MODIFIER_TABLE}
    family = {name: f": {family}" for family, rows in tables.items() for name in rows}
    groups: dict[str, list[str]] = {"": []}
    for name in names:
        groups.setdefault(family.get(name, ""), []).append(name)
    return {title: members for title, members in groups.items() if members}


def _check_modifiers(name: str, base: str, written: list[str]) -> None:
    modifiers = [modifier.partition(":")[0] for modifier in written]
    for i, modifier in enumerate(modifiers):
        if modifier in modifiers[:i]:
            raise ValueError(f"modifier {modifier!r} is given twice in {name!r}")
    given = set(modifiers)
    clashes = [(sorted(group & given), why) for group, why in EXCLUSIVE]
    for bases, forms, lost in REPLACED:
        if base in bases and forms & given and lost & given:
            why = f"this form of PoST has its own decay and positions for {base}"
            clashes.append(([*sorted(forms & given), *sorted(lost & given)], why))
    hybrids = [modifier for modifier in written if modifier.partition(":")[0] in HYBRIDS]
    if not all(":" in modifier for modifier in hybrids):
        clashes.append((sorted(hybrids), "without ratios, as in attention:3, a hybrid has one other mixer"))
    for clash, why in clashes:
        if len(clash) > 1:
            raise ValueError(f"{' and '.join(clash)} exclude each other in {name!r}: {why}")


def _modify(written: str, base: str, model: Options, sizes: PresetSizes) -> Options:
    """Return the fields of `ModelConfig` of a base after a further modifier, as it is written in the preset's name."""
    name, colon, ratio = written.partition(":")
    row = MODIFIERS[name]
    if colon and name not in HYBRIDS:
        raise ValueError(f"{name} takes no ratio; these modifiers do: {', '.join(HYBRIDS)}")
    if colon and (not ratio.isdecimal() or int(ratio) < 1):
        raise ValueError(f"the ratio of {name} is a number of layers of the base, at least 1; got {ratio!r}")
    for refuses, why in row.refusals:
        if refuses(base, model):
            raise ValueError(why.format(base=base, modifier=name))
    if model["mixer"] in row.unchanged:
        return model
    change = copy.deepcopy(row.change(base, sizes) if callable(row.change) else row.change)
    if name not in HYBRIDS:
        return merge(model, change)
    kinds = [model["hybrid"], *model.get("more_hybrids", [])] if "hybrid" in model else []
    kinds.append(_second_mixer(written, base, kinds, change["hybrid"], sizes))
    # The first kind is the one whose options `--set` reaches, so it is SKA if the model has SKA.
    kinds.sort(key=lambda kind: kind["mixer"] != "ska")
    return {**model, "hybrid": kinds[0], **({"more_hybrids": kinds[1:]} if kinds[1:] else {})}


def _second_mixer(written: str, base: str, kinds: list[Options], row: Options, sizes: PresetSizes) -> Options:
    """A further kind of layers, in the form of the field `hybrid` of `ModelConfig`.

    With a ratio n, such a layer follows every n layers of the base. Without one it is one layer in twelve, and at least
    one, evenly spaced; never the first, and the last in a model of two layers alone. Models of Echo's two sizes have
    Echo's places.
    """
    depth, ratio = sizes.num_layers, int(written.partition(":")[2] or 0)
    count = max(1, depth // 12)
    spaced = [(i + 1) * depth // (count + 1) for i in range(count)]
    placed, rank = ECHO_SKA.get((sizes.hidden_size, depth), (spaced, SKA_RANK))
    free = [layer for layer in range(depth) if not any(layer in kind["layers"] for kind in kinds)]
    if ratio:
        chosen = free[ratio :: ratio + 1]
        if not chosen:
            raise ValueError(f"{written} needs {ratio + 1} layers of {base}, and only {len(free)} are left")
    elif kinds:
        raise ValueError(f"{base} has {kinds[0]['mixer']} in some layers already; a hybrid has one other mixer")
    elif depth < 2:
        raise ValueError(f"a hybrid has two kinds of layers and needs at least two layers; got num_layers={depth}")
    else:
        chosen = list(placed)
    ranks = {"rank": rank} if row["mixer"] == "ska" else {}
    return {**row, "options": {"num_heads": sizes.heads(), **ranks, **row["options"]}, "layers": chosen}


def preset(
    name: str, *, hidden_size: int = 256, num_layers: int = 4, vocab_size: int = 256, num_heads: int | None = None,
    train_length: int = 2048, mixer_options: Options | None = None, **config: Any,
) -> ModelConfig:  # fmt: skip
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
    _check_modifiers(name, base, modifiers)
    given = {"hidden_size": hidden_size, "num_layers": num_layers, "vocab_size": vocab_size, "num_heads": num_heads}
    for field, size in given.items():
        if size is not None and size < 1:
            raise ValueError(f"{field} must be at least 1; got {size}")
    sizes = PresetSizes(hidden_size, num_layers, num_heads, train_length)
    model = PRESETS[base](sizes)
    for modifier in modifiers:
        model = _modify(modifier, base, model, sizes)
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
                    place = taken(layers.LAYERS[mixer], {"layer_idx": layer, "num_layers": num_layers})
                    layers.build(mixer, hidden_size=hidden_size, **place, **own)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"{name!r} has no meaning: {error}") from error
    return resolved
