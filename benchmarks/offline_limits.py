"""The limits of compiled kernels, and what a row misses of them."""

from __future__ import annotations

from typing import Any

Row = dict[str, dict[str, Any]]  # target → figures


def misses(row: Row, facts: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Target → the limits that a row does not keep, with its figures.

    No kernel spills. At least 2 programs fit an SM. Products of 16-bit inputs use tensor cores, and walks load
    asynchronously, on NVIDIA's cards.
    """
    found: dict[str, dict[str, int]] = {}
    for target, figures in row.items():
        wrong = {"spills": figures["spills"]} if figures["spills"] else {}
        if target.startswith("sm"):
            tensor = "wgmma" if target == "sm_90" else "mma"
            wrong |= {"programs": figures["programs"]} if figures["programs"] < 2 else {}
            wrong |= {tensor: 0} if facts["products"] and not figures[tensor] else {}
            wrong |= {"cp_async": 0} if facts["walk"] and not figures["cp_async"] else {}
        if wrong:
            found[target] = wrong
    return found


def worse(row: Row, facts: dict[str, Any], allowed: dict[str, dict[str, int]]) -> list[str]:
    """What a row misses that `allowed`, its entry of "missed_today", does not have, or has smaller."""
    return [
        f"{target}: {limit} {value}"
        for target, wrong in misses(row, facts).items()
        for limit, value in wrong.items()
        if limit not in (known := allowed.get(target, {}))
        or (value > known[limit] if limit == "spills" else value < known[limit])
    ]
