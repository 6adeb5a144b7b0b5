"""Modifiers that put another mixer into some layers: `+ska`, `+attention:3`."""

from __future__ import annotations

from halflife.models.presets.modifiers import ECHO_SKA, MODIFIERS, SKA_PAPER, Options
from halflife.models.presets.sizes import PresetSizes

WINDOW = 2048  # tokens that sliding-window attention sees, as in Samba

SKA_DECAY: Options = {"decay": "simple", "beta": True}

# The mixer of each modifier and its options.
KINDS: dict[str, tuple[str, Options]] = {
    "ska": ("ska", {}), "ska_decay": ("ska", SKA_DECAY), "ska_post": ("ska", SKA_DECAY),
    "ska_paper": ("ska", SKA_PAPER), "attention": ("attention", {}),
    "swa": ("attention", {"window": WINDOW}), "nope": ("attention", {"position": "none"}),
}  # fmt: skip


def hybrid_layers(sizes: PresetSizes, name: str, layers: list[int] | None = None) -> Options:
    """Return the field `hybrid` of `ModelConfig`, which puts a mixer into some layers in place of the base's mixer.

    Args:
        sizes: the sizes of the model.
        name: a modifier of `HYBRIDS`.
        layers: the replaced layers. None means one layer in twelve, and at least one. They are evenly spaced. The first
            layer is never among them, and the last only in a model of two layers. Models of Echo's two sizes use Echo's
            placement instead (`ECHO_SKA`), so that every hybrid of such a size has the paper's layers.

    Raises:
        ValueError: the model has a single layer.
    """
    mixer, own = KINDS[name]
    depth, placement = sizes.num_layers, ECHO_SKA.get((sizes.hidden_size, sizes.num_layers))
    if depth < 2:
        raise ValueError(f"a hybrid has two kinds of layers and needs at least two layers; got num_layers={depth}")
    if layers is None:
        count = max(1, depth // 12)
        layers = [(i + 1) * depth // (count + 1) for i in range(count)] if placement is None else [*placement.layers]
    options: Options = {"num_heads": sizes.heads()}
    if mixer == "ska":
        options["rank"] = 48 if placement is None else placement.rank
    if name == "ska_post":
        options["post"] = {"train_length": sizes.train_length, "reference_length": 1}
    return {"mixer": mixer, "options": options | own, "layers": layers}


def _add(name: str, base: str, model: Options, sizes: PresetSizes, ratio: int | None) -> Options:
    """Add a kind of layers. With a ratio n, a layer of this kind follows every n layers that are still the base's."""
    if name == "attention" and model["mixer"] == "attention":
        raise ValueError(f"every layer of {base} is softmax attention already")
    kinds = [model["hybrid"], *model.get("more_hybrids", [])] if "hybrid" in model else []
    if ratio is None:
        if kinds:
            raise ValueError(f"{base} has {kinds[0]['mixer']} in some layers already; a hybrid has one other mixer")
        return {**model, "hybrid": hybrid_layers(sizes, name)}
    taken = {layer for kind in kinds for layer in kind["layers"]}
    free = [layer for layer in range(sizes.num_layers) if layer not in taken]
    if not free[ratio :: ratio + 1]:
        raise ValueError(f"{name}:{ratio} needs {ratio + 1} layers of {base}, and only {len(free)} are left")
    kinds.append(hybrid_layers(sizes, name, free[ratio :: ratio + 1]))
    # The first kind is the one whose options `--set` reaches, so it is SKA if the model has SKA.
    kinds.sort(key=lambda kind: kind["mixer"] != "ska")
    return {**model, "hybrid": kinds[0], **({"more_hybrids": kinds[1:]} if kinds[1:] else {})}


@MODIFIERS.add("ska")
def ska(base: str, model: Options, sizes: PresetSizes, ratio: int | None = None) -> Options:
    """Spectral Koopman attention in one layer of twelve, at least one, evenly spaced, never the first."""
    return _add("ska", base, model, sizes, ratio)


@MODIFIERS.add("ska_decay")
def ska_decay(base: str, model: Options, sizes: PresetSizes, ratio: int | None = None) -> Options:
    """`ska` whose sums forget: a scalar Simple Decay and a strength β of every token."""
    return _add("ska_decay", base, model, sizes, ratio)


@MODIFIERS.add("ska_post")
def ska_post(base: str, model: Options, sizes: PresetSizes, ratio: int | None = None) -> Options:
    """`ska_decay` with PoST around its decay, as in PoST's paper (t_ref = 1)."""
    return _add("ska_post", base, model, sizes, ratio)


@MODIFIERS.add("ska_paper")
def ska_paper(base: str, model: Options, sizes: PresetSizes, ratio: int | None = None) -> Options:
    """`ska` as Echo prints it: K = 2, μ = 1, projected queries, one norm a sequence, decoding by token."""
    return _add("ska_paper", base, model, sizes, ratio)


@MODIFIERS.add("attention")
def attention(base: str, model: Options, sizes: PresetSizes, ratio: int | None = None) -> Options:
    """Softmax attention with RoPE in the layers that `ska` would replace, or in one of n + 1 layers (`attention:n`)."""
    return _add("attention", base, model, sizes, ratio)


@MODIFIERS.add("swa")
def swa(base: str, model: Options, sizes: PresetSizes, ratio: int | None = None) -> Options:
    """Sliding-window attention with RoPE over 2,048 tokens in the layers that `ska` would replace, or `swa:n`."""
    return _add("swa", base, model, sizes, ratio)


@MODIFIERS.add("nope")
def nope(base: str, model: Options, sizes: PresetSizes, ratio: int | None = None) -> Options:
    """Softmax attention without positions (NoPE) in the layers that `ska` would replace, or `nope:n`."""
    return _add("nope", base, model, sizes, ratio)
