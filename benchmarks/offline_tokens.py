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


def layer(
    parts: tuple[str, ...], key: int, value: int, heads: int = 16, groups: int = 16, rank: int = 0
) -> list[Launch]:  # fmt: skip
    """The launch for one token from the projection of a layer to what it reads, in bfloat16."""
    from halflife.ops.backends.triton.passes.token import _token

    def narrow(*shape: int) -> Tensor:
        return meta(*shape, dtype=torch.bfloat16)

    channels = 2 * groups * key + heads * value
    state, of_head, delta = meta(1, heads, key, value), meta(heads), "beta" in parts
    skip, slow, convolved = ("skip" in parts), ("g_slow" in parts), not rank or delta
    taps = [meta(channels, 4), *[meta(channels)] * skip] if convolved else []
    gate = [narrow(1, 1, heads), meta(heads, 4), of_head, of_head, meta(1, heads, 3)] if slow else []
    of_g = narrow(1, 1, rank or heads), [narrow(heads * key, rank)] if rank else []
    spectrum = [[meta(1), of_head[1:]], 7.6] if "post" in parts else [[], 1.0]
    vector = meta(heads, key) if rank else of_head
    law = vector, None if "post" in parts else vector, None, meta(1, dtype=torch.long) if "post" in parts else None
    angles = {name: meta(1, 1, key // 2) for name in ("cos", "sin")} if "rope" in parts else {}
    found: list[Launch] = []
    with offline_kernels.captured(found):
        _token(
            narrow(1, 1, channels), taps, narrow(1, channels, 3) if convolved else None, *of_g, None, gate,
            narrow(1, 1, heads) if delta else None, None, of_head if skip else None, state,
            state.clone() if slow else None, [0, groups * key, 2 * groups * key], groups, convolved, delta, 1.0, 1.0,
            torch.bfloat16, *spectrum, *law, "softplus", gains=skip, **angles,
        )  # fmt: skip
    return found


def maps() -> dict[str, list[Launch]]:
    """The launches of maps with what stands before them, in bfloat16."""
    from halflife.ops.backends.triton.passes.maps import _map

    def narrow(*shape: int) -> Tensor:
        return meta(*shape, dtype=torch.bfloat16)

    x, inner, wide = (narrow(1, 1, size) for size in (1024, 2048, 2752))
    of_x, found = [narrow(rows, 1024) for rows in (3072, 16, 16, 1024)], {}
    for name, given in {
        "maps of a sum": (x, x, None, x[0, 0], of_x, "none", 1, 1e-5, True),
        "gated norm": (inner, None, inner, inner[0, 0], [narrow(1024, 2048)], "silu_before", 1, 1e-5, False),
        "gated norm of heads": (x, None, x, x[0, 0, :64], of_x[-1:], "silu_after", 16, 1e-5, False),
        "relu_square": (wide, None, None, None, [narrow(1024, 2752)], "relu_square", 1, 0.0, False),
        "swiglu": (wide, None, wide, None, [narrow(1024, 2752)], "silu_before", 1, 0.0, False),
    }.items():
        with offline_kernels.captured(found.setdefault(f"token, {name}", [])):
            _map(*given)
    return found


def attention() -> dict[str, list[Launch]]:
    """The launches of softmax attention of a token to a cache, in bfloat16."""
    from halflife.ops.backends.triton.passes.attend import _attend

    found: dict[str, list[Launch]] = {}
    for heads, groups, size in ((16, 16, 64), (32, 8, 128)):
        q, k, cache = (
            meta(*shape, size, dtype=torch.bfloat16) for shape in ((1, 1, heads), (1, 1, groups), (1, 8191, groups))
        )
        angle, seen = meta(1, 1, size // 2), meta(1, dtype=torch.long)
        with offline_kernels.captured(found.setdefault(f"token, attention, {heads} and {groups} × {size}", [])):
            _attend(q, k, k.clone(), angle, angle.clone(), cache, cache.clone(), seen, 0.1)
    return found


def koopman() -> dict[str, list[Launch]]:
    """The launches of Koopman attention of a token with a state, in bfloat16."""
    from halflife.ops.backends.triton.koopman_token import _koopman_token

    found: dict[str, list[Launch]] = {}
    for heads, rank, width in ((16, 24, 64), (16, 48, 64)):
        k, v, square = meta(1, 1, heads, rank), meta(1, 1, heads, width), meta(1, heads, rank, rank)
        sums = [square, square.clone(), meta(1, heads, width, rank), meta(1, heads), meta(1, heads, rank)]
        waiting = [meta(1, 63, heads, rank), meta(1, 63, heads, width), meta(1, dtype=torch.long)]
        q, k, v, of_head = k.bfloat16(), k.bfloat16(), v.bfloat16(), meta(heads)
        with offline_kernels.captured(found.setdefault(f"token, koopman, {rank} and {width}", [])):
            _koopman_token(
                q, k, v, [*sums, *waiting], of_head, of_head, of_head, 1.0, 1.0, 1, 1e-3, "causal", torch.bfloat16
            )
    return found


def rwkv7() -> dict[str, list[Launch]]:
    """The launches of a token of RWKV-7's time mix, in bfloat16."""
    from halflife.ops.backends.triton.dplr.rwkv7_maps import _mixed_maps
    from halflife.ops.backends.triton.dplr.rwkv7_token import _rwkv7_token

    def narrow(*shape: int) -> Tensor:
        return meta(*shape, dtype=torch.bfloat16)

    ranks, row, vector, found = (64, 64, 160, 64), narrow(1, 1, 1024), meta(1024), []
    low, ups = [narrow(1, 1, rank) for rank in ranks], [narrow(1024, rank) for rank in ranks]
    given = [row, row.clone(), row.clone()], row.clone(), low, ups, [vector] * 7, meta(1, 16, 64, 64)
    with offline_kernels.captured(found):
        _rwkv7_token(*given, 1e-3, torch.bfloat16, meta(16, 64), None, None, None, "sigmoid", 0.6, 0.0, None)
    maps: list[Launch] = []
    mu, weights = [vector.bfloat16()] * 7, [narrow(size, 1024) for size in (1024, 1024, 1024, *ranks)]
    with offline_kernels.captured(maps):
        _mixed_maps(row, row[0], mu, weights, row.clone(), mu[:2], 1e-5)
    return {"token, layer of rwkv7": found, "token, maps of rwkv7": maps}


def launches() -> dict[str, list[Launch]]:
    """Case → its launches."""
    layers = {
        "layer of mamba2": layer(("skip",), 128, 64, 32, 1),
        "layer of mamba2, gate_rank": layer(("skip", "g_slow"), 128, 64, 32, 1),
        "layer of mamba2, post, gate_rank": layer(("skip", "g_slow", "post"), 128, 64, 32, 1),
        "layer of gla": layer((), 128, 256, 4, 4, 16),
        "layer of kda": layer(("beta",), 64, 64, rank=64),
        "layer with rope": layer(("rope",), 64, 128),
        "layer of gated_deltanet": layer(("beta",), 64, 64),
        "layer of gated_deltanet, gate_rank": layer(("beta", "g_slow"), 128, 128),
    }
    steps = {
        f"token, {name}, {key} × {value}": step(parts, key, value)
        for name, parts in FORMS.items()
        for key, value in SIZES
    }
    return steps | layers | maps() | attention() | koopman() | rwkv7() | decays()


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
            laws.log_decay_backward(f.float(), f.float() if with_step else None, *given)
    for count in (32, 2048):
        vector = meta(count)
        with offline_kernels.captured(found.setdefault(f"spectrum, {count}", [])):
            post._spectrum(meta(1), vector[1:], 8.0)
            post.spectrum_backward(meta(1), vector[1:], vector, vector, 8.0)
    return found
