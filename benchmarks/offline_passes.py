"""The launches of kernels that are passes of a layer over memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import offline_kernels
import offline_models
import torch
from offline_kernels import Launch
from torch import Tensor

BATCH, LENGTH = 16, 2048


def leaf(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A tensor without data that asks for a gradient."""
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=True)


def weight(*shape: int) -> Tensor:
    return leaf(*shape, dtype=torch.float32)


def launches() -> dict[str, list[Launch]]:
    """Case → its launches, forward and backward."""
    return {f"pass, {name}": _of(run) for name, run in CASES.items()}


def _of(run: Callable[[], tuple[Tensor | None, ...]]) -> list[Launch]:
    found: list[Launch] = []
    with offline_models.on_a_gpu(), offline_kernels.captured(found):
        outputs = run()
        sum(x.float().sum() for x in outputs if x is not None).backward()
    return found


def _conv(channels: int, width: int, **options: Any) -> tuple[Tensor, Tensor | None]:
    from halflife.ops import causal_conv1d

    x, packed = leaf(BATCH, LENGTH, channels), options.pop("packed", False)
    if packed:
        x = leaf(1, BATCH * LENGTH, channels)
        options["cu_seqlens"] = torch.arange(BATCH + 1, device="meta")
    return causal_conv1d(x, weight(channels, width), weight(channels), output_final_state=packed, **options)


CASES = {
    "mamba2": lambda: _conv(2304, 4),
    "packed": lambda: _conv(2304, 4, packed=True, initial_state=leaf(BATCH, 2304, 3)),
}
