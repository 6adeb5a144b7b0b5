"""Crosses of many axes: a table with every pair of values is fast, the rest of the cross is slow."""

from itertools import combinations, product

import pytest


def pairwise_rows(axes):
    """A subset of the cross of `axes` (lists) in which every pair of values of two axes occurs, as a set of indices."""
    cases = list(product(*(range(len(axis)) for axis in axes)))
    pairs = [{(i, case[i], j, case[j]) for i, j in combinations(range(len(axes)), 2)} for case in cases]
    missing, chosen = set().union(*pairs), set()
    for wanted in range(len(pairs[0]), 0, -1):  # first the rows that bring many new pairs
        for case, its in zip(cases, pairs, strict=True):
            if len(its & missing) >= wanted:
                chosen.add(case)
                missing -= its
    return chosen


def crossed(**axes):
    """Parametrise a test by the cross of the axes, name → values; rows beyond `pairwise_rows` are marked slow."""
    values = [list(axis) for axis in axes.values()]
    fast = pairwise_rows(values)
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
