"""Small tables of the crosses of many axes, with every pair of values."""

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
    """Parametrise a test by rows of the cross (name → values) with every pair of values.

    With `strength=1`, the rows that contain every single value are fast, and the others are slow.
    """
    values = [list(axis) for axis in axes.values()]
    fast = covering_rows(values, strength)
    rows = []
    for case in sorted(fast | covering_rows(values)):
        row = [axis[i] for axis, i in zip(values, case, strict=True)]
        marks = () if case in fast else pytest.mark.slow
        rows.append(pytest.param(*row, id="-".join(map(_label, row)), marks=marks))
    return pytest.mark.parametrize(list(axes), rows)


def _label(value):
    return "x".join(map(_label, value)) if isinstance(value, tuple) else str(value)


def slow_beyond(fast, names):
    """Parametrise a test by the names. Names that are not in `fast` are marked slow."""
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]
