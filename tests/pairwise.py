"""Crosses of many axes: a small table that contains every pair of values is fast, and the rest is slow."""

from itertools import combinations, product

import pytest


def covering_rows(axes, strength=2):
    """Return rows of the cross of `axes`, as index tuples, with every combination of values of `strength` axes."""
    cases = list(product(*(range(len(axis)) for axis in axes)))
    pairs = [
        {(which, *(case[i] for i in which)) for which in combinations(range(len(axes)), strength)} for case in cases
    ]
    missing, chosen = set().union(*pairs), set()
    for wanted in range(len(pairs[0]), 0, -1):  # rows with many new pairs come first
        for case, its in zip(cases, pairs, strict=True):
            if len(its & missing) >= wanted:
                chosen.add(case)
                missing -= its
    return chosen


def crossed(strength=2, **axes):
    """Parametrise a test by the cross of the axes (name → values). Rows beyond `covering_rows` are marked slow."""
    values = [list(axis) for axis in axes.values()]
    fast = covering_rows(values, strength)
    rows = [
        pytest.param(
            *(axis[i] for axis, i in zip(values, case, strict=True)),
            id="-".join(_label(axis[i]) for axis, i in zip(values, case, strict=True)),
            marks=() if case in fast else pytest.mark.slow,
        )
        for case in product(*(range(len(axis)) for axis in values))
    ]
    return pytest.mark.parametrize(list(axes), rows)


def _label(value):
    return "x".join(map(_label, value)) if isinstance(value, tuple) else str(value)


def slow_beyond(fast, names):
    """Parametrise a test by the names. Names that are not in `fast` are marked slow."""
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]
