"""Presets of architectures that were published after the papers of this library."""

from __future__ import annotations

from halflife.models.presets.modifiers import Options
from halflife.models.presets.presets import PRESETS
from halflife.models.presets.sizes import PresetSizes


def _base(mixer: str, num_heads: int, **options: object) -> Options:
    return {"mixer": mixer, "mixer_options": {"num_heads": num_heads, **options}}


@PRESETS.add("mamba3_mimo")
def mamba3_mimo(sizes: PresetSizes) -> Options:
    """Mamba-3 (MIMO): writes and reads of rank 4 in each token and head."""
    return _base("mamba3", sizes.heads(expand=2), rank=4)


@PRESETS.add("kda")
def kda(sizes: PresetSizes) -> Options:
    """Kimi Delta Attention: the delta rule under a vector decay, with low-rank sigmoid gates."""
    return _base("kda", sizes.heads())


@PRESETS.add("gdn2")
def gdn2(sizes: PresetSizes) -> Options:
    """Gated DeltaNet-2: KDA with an erase gate on the key's channels and a write gate on the value's."""
    return _base("gdn2", sizes.heads())


@PRESETS.add("comba")
def comba(sizes: PresetSizes) -> Options:
    """Comba: a scalar decay and a fraction of the key that reads the state, also from the output."""
    return _base("comba", sizes.heads())


@PRESETS.add("deltaproduct")
def deltaproduct(sizes: PresetSizes) -> Options:
    """DeltaProduct: two steps of the gated delta rule a token, with negative eigenvalues."""
    return _base("deltaproduct", sizes.heads())


@PRESETS.add("longhorn")
def longhorn(sizes: PresetSizes) -> Options:
    """Longhorn: the smallest change of the state that stores the new pair, with one step size a head."""
    return _base("longhorn", sizes.heads(expand=2))


@PRESETS.add("longhorn_paper")
def longhorn_paper(sizes: PresetSizes) -> Options:
    """Longhorn as its paper prints it: one step size for each channel."""
    return _base("longhorn", sizes.heads(expand=2), step="channel")


@PRESETS.add("mesa")
def mesa(sizes: PresetSizes) -> Options:
    """MesaNet: ridge regression on all tokens so far, which decay, solved at every token by conjugate gradients."""
    return _base("mesa", sizes.heads())


@PRESETS.add("fox")
def fox(sizes: PresetSizes) -> Options:
    """Forgetting attention: softmax attention in which old tokens fade; its memory grows with the context."""
    return _base("fox", sizes.heads())
