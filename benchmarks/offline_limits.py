"""The limits of compiled kernels, and what a row misses of them."""

from __future__ import annotations

from typing import Any

COUNTED = (
    "launches",
    "forward_launches",
    "bf16_launches",
    "syncs",
    "graph_breaks",
    "decode_launches",
    "decode_syncs",
    "saved_bytes",
)

LEAST_SHARED = 99 << 10  # bytes that a program can have on the cards of sm_86, sm_89 and sm_120; they run sm_80's tiles

Row = dict[str, dict[str, Any]]  # target → figures


def misses(row: Row, facts: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Target → the limits that a row does not keep, with its figures.

    No kernel spills. At least 2 programs fit an SM, and one fits the cards with the least shared memory. Products of
    16-bit inputs use tensor cores, and walks load asynchronously, on NVIDIA's cards.
    """
    found: dict[str, dict[str, int]] = {}
    for target, figures in row.items():
        wrong = {"spills": figures["spills"]} if figures["spills"] else {}
        if target.startswith("sm"):
            tensor = "wgmma" if target == "sm_90" else "mma"
            wrong |= {"programs": figures["programs"]} if figures["programs"] < 2 else {}
            wrong |= {"shared": x} if target == "sm_80" and (x := figures["shared"]) > LEAST_SHARED else {}
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
        or (value > known[limit] if limit in ("spills", "shared") else value < known[limit])
    ]


def missed_bytes(ops: dict[str, Any]) -> dict[str, list[float]]:
    """Op and shape → bytes ÷ floor, forward and with backward, where either is above its target."""
    return {
        f"{case}, {shape}": row["bytes_over_floor"]
        for case, shapes in ops.items()
        for shape, row in shapes.items()
        if row["target"] and any(x > y for x, y in zip(row["bytes_over_floor"], row["target"], strict=True))
    }


def more(now: dict[str, Any], limits: dict[str, Any]) -> list[str]:
    """What is above a limit that was reached before: figures of ops (lists) or of models (by name)."""
    return [
        f"{name}: {now[name]} where {limit} was reached"
        for name, limit in limits.items()
        if name in now and _above(now[name], limit)
    ]


def _above(now: Any, limit: Any) -> bool:
    if isinstance(limit, dict):
        return any(now[key] > most for key, most in limit.items())
    return any(x > y for x, y in zip(now, limit, strict=True))


def least(now: dict[str, Any], limits: dict[str, Any]) -> dict[str, Any]:
    """The limits after this run: the least figures that were reached, of what is there."""
    found: dict[str, Any] = {}
    for name, row in now.items():
        old = limits.get(name, row)
        if isinstance(row, dict):
            found[name] = {key: min(row[key], old.get(key, row[key])) for key in row}
        else:
            found[name] = [min(x, y) for x, y in zip(row, old, strict=True)]
    return found
