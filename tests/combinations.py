"""The combinations of presets and modifiers that exist, from trying them when a test runs."""

from functools import cache

from halflife import preset
from halflife.models import MODIFIERS, PRESETS

SIZES = {"hidden_size": 32, "num_layers": 2, "vocab_size": 31, "num_heads": 4, "train_length": 16}


@cache
def exists(name):
    """Whether the combination has a meaning, from trying it."""
    try:
        preset(name, **SIZES)
    except ValueError:
        return False
    return True


def combinations(base):
    """Return (valid names, invalid names): the base with none, one or two modifiers."""
    pairs = ("post+rope", "vector+share", "scalar+post")
    names = [base, *(f"{base}+{modifier}" for modifier in (*MODIFIERS, *pairs))]
    return list(filter(exists, names)), [name for name in names if not exists(name)]


def every_part():
    """Every preset, and every modifier on the first preset that takes it; so a new one is tested without a word."""
    return [*PRESETS, *(next(n for base in PRESETS if exists(n := f"{base}+{modifier}")) for modifier in MODIFIERS)]
