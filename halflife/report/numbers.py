"""Numbers as the tables and figures print them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

MISSING = "–"
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
T = TypeVar("T")


def percent(fraction: float, digits: int = 1) -> str:
    """A fraction in percent, "87.5 %", or a dash if it is not finite."""
    return f"{100 * fraction:.{digits}f} %" if math.isfinite(fraction) else MISSING


def count(number: float) -> str:
    """A whole number with separated thousands: "12,345"."""
    return f"{number:,.0f}"


def short_count(number: float) -> str:
    """A number of tokens for an axis: "512", "1,500", "4K" for 4,096."""
    return f"{number / 1024:g}K" if number >= 1024 and number % 1024 == 0 else f"{number:,g}"


def axis_number(number: float) -> str:
    """A number for an axis: "0.01", "1,000", "10⁶"."""
    exponent = math.floor(math.log10(abs(number))) if number else 0
    if not -4 <= exponent < 6 and math.isclose(number, 10.0**exponent):
        return f"10{str(exponent).translate(SUPERSCRIPTS)}"
    return f"{number:,g}"


def rounded(number: float, digits: int = 6) -> float | None:
    """The number with that many significant digits, or None if it is not finite, for which JSON has no literal."""
    return float(f"{number:.{digits}g}") if math.isfinite(number) else None


def evenly(items: Sequence[T], most: int) -> list[T]:
    """Return at most `most` of the items, evenly spaced, with the first and the last one."""
    chosen = np.linspace(0, len(items) - 1, min(most, len(items))).round().astype(int)
    return [items[i] for i in chosen]


def token_count(number: float | None, longest: int | None = None) -> str:
    """Format a number of tokens in a few digits: None as "–", infinity as "∞" or, with a longest lag, as ">longest"."""
    if number is None:
        return "–"
    if math.isinf(number):
        return "∞" if longest is None else f">{longest:,}"
    return f"{number:,.0f}" if 100 <= number < 1e6 else f"{number:.3g}"
