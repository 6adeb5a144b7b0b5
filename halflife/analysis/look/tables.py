"""The exact numbers of heads as a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from halflife.analysis.look.lens import Head, Lens
from halflife.files import atomic_path


def write_exact(lens: Lens, heads: Sequence[Head], path: Path) -> None:
    """Write the arrays of heads to an .npz file, which holds no pickles.

    `ids` are the tokens. The names of a head begin with `<layer>.<head>.`. They are `weights [T, T]`, with which a
    token (row) reads another one, `left [T, T]` and `faded [T, T]` after each token (row), and `sizes [T]` of values.
    """
    arrays: dict[str, np.ndarray] = {"ids": lens.ids.numpy()}
    for one in lens.details(heads, len(lens.ids)):
        name = f"{one.head.place.layer}.{one.head.head}."
        parts = {"weights": one.weights, "left": one.left, "faded": one.faded, "sizes": one.sizes}
        arrays |= {name + key: measured.values for key, measured in parts.items()}
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **arrays)
