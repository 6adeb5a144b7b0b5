"""Tiles, warps and stages of the kernels that walk over chunks, by architecture, head sizes and dtype.

They were found by compiling for each target, so that no kernel spills and two programs fit a multiprocessor; see
`benchmarks/offline.py`. Nothing is tuned at run time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton

from halflife.ops.backends.triton import interpreted


class Settings(NamedTuple):
    """How a kernel is launched."""

    chunk: int  # tokens per chunk
    rows: int  # BK, which covers K
    columns: int  # BV
    warps: int
    stages: int  # chunks whose loads are under way


def architecture() -> str:
    """The architecture of the GPU: sm_90 and later are "hopper", earlier ones "ampere", and AMD's "amd"."""
    if interpreted():
        return "hopper"
    target: Any = triton.runtime.driver.active.get_current_target()
    if target.backend != "cuda":
        return "amd"
    return "hopper" if target.arch >= 90 else "ampere"


# (kernel, states a head) → architecture → (tokens of a chunk, columns or rows of a block) for K and V up to 64, and for
# larger ones. "walk" has all rows of a state and some columns, "grads" all columns and some rows.
_TILES = {
    ("walk", 1): {"hopper": ((64, 64), (64, 64)), "ampere": ((64, 64), (32, 64)), "amd": ((64, 64), (64, 64))},
    ("walk", 2): {"hopper": ((32, 64), (16, 32)), "ampere": ((32, 32), (16, 32)), "amd": ((64, 64), (32, 32))},
    ("grads", 1): {"hopper": ((32, 64), (16, 64)), "ampere": ((32, 64), (32, 32)), "amd": ((32, 64), (32, 32))},
    ("grads", 2): {"hopper": ((32, 32), (16, 16)), "ampere": ((32, 32), (16, 16)), "amd": ((32, 32), (16, 32))},
}
_EXACT = {"walk": (16, 32), "grads": (16, 16)}  # products of float32 use no tensor cores


def settings_of(kind: str, key: int, value: int, dtype: torch.dtype, states: int, most: int) -> Settings:
    """The settings of a kernel ("walk" or "grads") whose chunks have at most `most` tokens, a power of two."""
    exact = dtype == torch.float32
    chunk, size = _EXACT[kind] if exact else _TILES[kind, states][architecture()][max(key, value) > 64]
    rows, columns = block(key, 256 if kind == "walk" else size), block(value, 256 if kind == "grads" else size)
    return Settings(min(chunk, most), rows, columns, 4, 1 if exact else 2)


def block(size: int, most: int = 64) -> int:
    """The power of two, from 16 to `most`, that covers `size`."""
    return max(16, min(most, triton.next_power_of_2(size)))
