"""Products in which float32 operands keep their precision beside 16-bit ones.

Tensor cores multiply bfloat16 numbers, whose range is that of float32. So a float32 operand is written as high + low,
two bfloat16 numbers with 16 bits together, and the product low · low is left out. TF32, for which tensor cores need
twice the time and memory, would have 11 bits. Products of float32 inputs are exact.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from halflife.ops.backends.triton.gates import dot
from halflife.ops.backends.triton.walks import load, store


@triton.jit
@no_type_check
def split(x):
    """Split a float32 `x` into two bfloat16 numbers, high and low.

    High is rounded as an integer, which a GPU does in a third of the time of a conversion.
    """
    bits = (x.to(tl.int32, bitcast=True) + 0x8000) & -0x10000
    high = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return high, (x - bits.to(tl.float32, bitcast=True)).to(tl.bfloat16)


@triton.jit
@no_type_check
def product(x, y, out, PRECISION: tl.constexpr):
    """Compute `x y + out` in float32, for operands in float32 or in the dtype of inputs."""
    if x.dtype == y.dtype and (x.dtype != tl.float32 or PRECISION == "ieee"):
        return dot(x, y, out, PRECISION)
    elif x.dtype == tl.bfloat16:
        high, low = split(y)
        return dot(x, high, dot(x, low, out, PRECISION), PRECISION)
    elif y.dtype == tl.bfloat16:
        high, low = split(x)
        return dot(high, y, dot(low, y, out, PRECISION), PRECISION)
    else:
        high, low = split(x.to(tl.float32))
        high_y, low_y = split(y.to(tl.float32))
        out = dot(high, low_y, dot(low, high_y, out, PRECISION), PRECISION)
        return dot(high, high_y, out, PRECISION)


@triton.jit
@no_type_check
def _triangle(at, first, h, H, size, cc, inside, C: tl.constexpr):
    """Return where the lower triangular matrix `[C, C]` of a head and `size` tokens is, and which places there are.

    It is stored in pieces of 16 numbers: one for each of the first 16 rows, two for each later one. Of the 2 bfloat16
    numbers of a pair, the 16 low ones follow the 16 high ones.
    """
    PAIR: tl.constexpr = 1 if at.dtype.element_ty == tl.float32 else 2
    ROW: tl.constexpr = 3 * C // 4 if C > 16 else C
    piece = (cc + tl.maximum(cc - 16, 0))[:, None] + (cc // 16)[None, :]
    there = inside[:, None] & ((cc >= 16)[:, None] | (cc < 16)[None, :])
    return at + (first * H + h * size) * (ROW * PAIR) + piece * (16 * PAIR) + (cc % 16)[None, :], there


@triton.jit
@no_type_check
def load_triangle(at, first, h, H, size, cc, inside, C: tl.constexpr):
    """Load what `store_triangle` stored, as (high, low). What is stored in float32 is high, without a low part."""
    places, there = _triangle(at, first, h, H, size, cc, inside, C)
    high = tl.load(places, mask=there, other=0.0)
    if at.dtype.element_ty == tl.float32:
        return high, high
    else:
        return high, tl.load(places + 16, mask=there, other=0.0)


@triton.jit
@no_type_check
def store_triangle(at, value, first, h, H, size, cc, inside, C: tl.constexpr):
    """Store a lower triangular `value [C, C]` for the tokens from `first` on, in float32 or as two bfloat16 numbers."""
    places, there = _triangle(at, first, h, H, size, cc, inside, C)
    if at.dtype.element_ty == tl.float32:
        tl.store(places, value, mask=there)
    else:
        high, low = split(value)
        tl.store(places, high, mask=there)
        tl.store(places + 16, low, mask=there)


@triton.jit
@no_type_check
def by_pair(x, high, low, out, PRECISION: tl.constexpr):
    """Compute `x (high + low) + out`, for a pair of `load_triangle` or its transpose."""
    if high.dtype == tl.float32:
        return product(x, high, out, PRECISION)
    elif x.dtype == tl.bfloat16:
        return dot(x, high, dot(x, low, out, PRECISION), PRECISION)
    else:
        high_x, low_x = split(x.to(tl.float32))
        return dot(high_x, high, dot(high_x, low, dot(low_x, high, out, PRECISION), PRECISION), PRECISION)


@triton.jit
@no_type_check
def pair_by(high, low, y, out, PRECISION: tl.constexpr):
    """Compute `(high + low) y + out`."""
    if high.dtype == tl.float32:
        return product(high, y, out, PRECISION)
    elif y.dtype == tl.bfloat16:
        return dot(high, y, dot(low, y, out, PRECISION), PRECISION)
    else:
        high_y, low_y = split(y.to(tl.float32))
        return dot(high, high_y, dot(high, low_y, dot(low, high_y, out, PRECISION), PRECISION), PRECISION)


@triton.jit
@no_type_check
def store_scaled(at, scale_at, value, rows, cols, inside, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Store a float32 `value` in float32, or as float16 times a power of two, which fits its largest entry.

    float16 has the 11 bits of TF32.
    """
    if at.dtype.element_ty == tl.float16:
        largest = tl.max(tl.abs(value)).to(tl.int32, bitcast=True) & 0x7F800000
        power = tl.where(largest == 0, 1.0, largest.to(tl.float32, bitcast=True))
        tl.store(scale_at, power)
        value *= 1 / power
    store(at, value, rows, cols, inside, SIZE, SIZE, BLOCK)


@triton.jit
@no_type_check
def load_scaled(at, scale_at, rows, cols, inside, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Load in float32 what `store_scaled` stored; `scale_at` points to the power of two of each row."""
    value = load(at, rows, cols, inside, SIZE, SIZE, BLOCK).to(tl.float32)
    if at.dtype.element_ty == tl.float16:
        value *= tl.load(scale_at)[:, None]
    return value
