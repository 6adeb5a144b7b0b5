"""The launches of kernels that are no op on a sequence of states: the step of a token, and log-decays."""

from __future__ import annotations

import offline_kernels
import torch
from offline_kernels import Launch
from torch import Tensor

FORMS = {
    "linear, none": (), "linear, vector": ("vector",), "delta, scalar": ("scalar", "beta"),
    "dplr, vector": ("vector", "a", "b"), "gate_rank": ("scalar", "g_slow"),
    "gate_rank delta": ("scalar", "g_slow", "beta"),
}  # fmt: skip
SIZES = ((64, 64), (128, 64), (256, 256))  # K, V


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def step(parts: tuple[str, ...], key: int, value: int, batch: int = 1, heads: int = 16) -> list[Launch]:
    """The launch for one token of an update and decay, in bfloat16."""
    from halflife.ops.backends.triton.step import _step

    row, narrow = meta(batch, 1, heads, key, dtype=torch.bfloat16), torch.bfloat16
    decay = row.float() if "vector" in parts else meta(batch, 1, heads)
    state = meta(batch, heads, key, value)
    v, beta = meta(batch, 1, heads, value, dtype=narrow), meta(batch, 1, heads, dtype=narrow)
    slow = "g_slow" in parts
    gates = (
        decay if parts else None, beta if "beta" in parts else None, row if "a" in parts else None,
        row if "b" in parts else None, decay if slow else None,
    )  # fmt: skip
    found: list[Launch] = []
    with offline_kernels.captured(found):
        _step(row, row, v, *gates, state, state.clone() if slow else None, 0.125)
    return found


def launches() -> dict[str, list[Launch]]:
    """Case → its launches."""
    steps = {
        f"token, {name}, {key} × {value}": step(parts, key, value)
        for name, parts in FORMS.items()
        for key, value in SIZES
    }
    return steps | decays()


def decays() -> dict[str, list[Launch]]:
    """The kernels of log-decays, forward and backward, of scalar and vector decays, and of PoST's spectrum."""
    from halflife.ops.backends.triton import laws, post

    found: dict[str, list[Launch]] = {}
    for case, shape, channels, with_step in (
        ("mamba2", "softplus", 32, True), ("gla", "logsigmoid", 1024, False), ("rwkv7", "sigmoid", 1024, False),
    ):  # fmt: skip
        f, vector = meta(16, 2048, channels, dtype=torch.bfloat16), meta(channels)
        given = (f, vector, vector, vector, meta(2048, dtype=torch.long), shape, 1.0, 0.0, None)
        with offline_kernels.captured(found.setdefault(f"decays, {case}", [])):
            laws._log_decay(*given, with_step)
            laws._log_decay_backward(f.float(), f.float() if with_step else None, *given)
    for count in (32, 2048):
        vector = meta(count)
        with offline_kernels.captured(found.setdefault(f"spectrum, {count}", [])):
            post._spectrum(meta(1), vector[1:], 8.0)
            post._spectrum_backward(meta(1), vector[1:], vector, vector, 8.0)
    return found
