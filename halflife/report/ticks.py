"""Where the ticks of an axis stand: one rule for pictures and for the page."""

from __future__ import annotations

import itertools
import math

FEWEST, MOST = 3, 8  # ticks of a logarithmic axis
WHOLE_STEPS = 5  # the most steps between ticks at whole numbers


def log_places(low: float, high: float) -> list[float]:
    """The first that has enough in the range: powers of ten, 1, 2 and 5 times each, all digits, or equal steps."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for digits in ((1,), (1, 2, 5), range(1, 10)):
        places = [float(f"{digit}e{power}") for power in powers for digit in digits]
        inside = [place for place in places if low <= place <= high]
        if len(inside) >= FEWEST:
            return inside[:: math.ceil(len(inside) / MOST)]
    return _steps(low, high)


def _steps(low: float, high: float) -> list[float]:
    """Multiples of the largest round step of which there are enough; one number for a range without width."""
    if math.isclose(low, high):
        return [low]
    power = math.floor(math.log10(high - low))
    for scale, digit in itertools.product((power, power - 1), (5, 2, 1)):
        step = float(f"{digit}e{scale}")
        inside = [float(f"{i * step:.12g}") for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
        if len(inside) >= FEWEST:
            break
    return inside


def whole_places(low: float, high: float) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten, at most `WHOLE_STEPS` steps."""
    sizes = (digit * 10**power for power in itertools.count() for digit in (1, 2, 5))
    step = next(size for size in sizes if high - low <= WHOLE_STEPS * size)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
