"""The launches of kernels that are no op on a sequence: the step of a token, alone or in a layer, and log-decays."""

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


def layer(parts: tuple[str, ...], key: int, value: int, heads: int = 16, groups: int = 16) -> list[Launch]:
    """The launch for one token from the projection of a layer to what it reads, in bfloat16."""
    from halflife.ops.backends.triton.passes.token import _token

    channels = 2 * groups * key + heads * value
    x, weight, vector = meta(1, 1, channels, dtype=torch.bfloat16), meta(channels, 4), meta(1, 1, heads)
    gate, state = vector.bfloat16(), meta(1, heads, key, value)
    slow, delta, skip = ("g_slow" in parts), ("beta" in parts), ("skip" in parts)
    found: list[Launch] = []
    with offline_kernels.captured(found):
        _token(
            x, weight, weight[:, 0] if skip else None, meta(1, channels, 3, dtype=torch.bfloat16), gate,
            vector if slow else None, gate if delta else None, None, meta(heads) if skip else None,
            state, state.clone() if slow else None, [0, groups * key, 2 * groups * key], groups, delta, 1.0, 1.0,
            torch.bfloat16, meta(heads), meta(heads), None, None, "softplus", gains=skip,
        )  # fmt: skip
    return found


def maps() -> dict[str, list[Launch]]:
    """The launches of maps with the norm before them, in bfloat16."""
    from halflife.ops.backends.triton.passes.maps import _map

    narrow, found = torch.bfloat16, {}
    x, inner = (meta(1, 1, size, dtype=narrow) for size in (1024, 2048))
    up, out = (meta(*shape, dtype=narrow) for shape in ((2752, 1024), (1024, 2048)))
    for name, given in (
        ("swiglu of a sum", (x, x, None, x[0, 0], up, up)), ("gated norm", (inner, None, inner, inner[0, 0], out, None))
    ):  # fmt: skip
        with offline_kernels.captured(found.setdefault(f"token, {name}", [])):
            _map(*given, 1, 1e-5)
    return found


def launches() -> dict[str, list[Launch]]:
    """Case → its launches."""
    layers = {
        "layer of mamba2": layer(("skip",), 128, 64, 32, 1),
        "layer of mamba2, gate_rank": layer(("skip", "g_slow"), 128, 64, 32, 1),
        "layer of gated_deltanet": layer(("beta",), 64, 64),
        "layer of gated_deltanet, gate_rank": layer(("beta", "g_slow"), 128, 128),
    }
    steps = {
        f"token, {name}, {key} × {value}": step(parts, key, value)
        for name, parts in FORMS.items()
        for key, value in SIZES
    }
    return steps | layers | maps() | decays()


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
