"""Spectral Koopman attention by the kernels of csrc/koopman*.cpp: their limits, and calls in its form."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from halflife.ops.arguments import not_plain
from halflife.ops.backends.native import DTYPES, build, names

if TYPE_CHECKING:
    from halflife.ops.koopman.call import KoopmanCall
    from halflife.ops.koopman.readout import KoopmanReadout
    from halflife.ops.koopman.state import KoopmanMemory

# The fields of a call that the kernels read. They refuse a call in which any other field has no default value.
BLOCKS = 8  # `kBorder` of csrc/koopman_call.h: blocks from one saved state to the next
TOKENS = 64  # `kTokenBlock`: tokens of a block where each has an operator of its own
_KNOWN = {
    "q", "k", "v", "gamma", "mix", "ridge", "power", "mode", "mask", "chunk_size", "refresh", "normalization",
    "initial_state", "cu_seqlens",
}  # fmt: skip


def why_not(op: str, device: torch.device, call: KoopmanCall | None = None) -> str | None:
    """Return the reason why the kernels cannot run on `device` (and this call, if given), or None if they can."""
    if device.type != "cpu":
        return f"native kernels run on CPUs, not on {device.type}"
    if call is not None:
        if (odd := not_plain(*vars(call).values(), *(call.initial_state or {}).values())) is not None:
            return odd
        dtypes = {x.dtype for x in (call.q, call.k, call.v)}
        if not dtypes <= DTYPES:
            return f"native kernels take float32, bfloat16 and float16; got {names(dtypes)}"
        if call.normalization in ("paper", "trace"):
            return f"native kernels of {op} do not cover normalization={call.normalization!r}"
        if isinstance(call.mix, Tensor) and call.mix.ndim == 2:
            return f"native kernels of {op} do not cover one weight per power"
        for field in fields(call):
            value = getattr(call, field.name)
            if field.name not in _KNOWN and not (value is field.default or value == field.default):
                shown = field.name if isinstance(value, Tensor) else f"{field.name}={value!r}"
                return f"native kernels of {op} do not cover {shown}"
    return build.why_not()


def run(call: KoopmanCall, memory: KoopmanMemory, readout: KoopmanReadout) -> tuple[Tensor, KoopmanMemory, int]:
    """Run all tokens in one call, as `chunked` and `prefix` of halflife/ops/koopman/op.py do."""
    build.load()
    prefix = call.mode != "chunk"
    (*sums, norm), last, keys, values, pending, *_ = memory
    entering = [x.contiguous() for x in (*sums, norm, last, keys, values)]
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (call.q, call.k, call.v))
    gamma, mix = readout.gamma.flatten(), readout.mix.flatten()
    save = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, *entering, gamma, mix))
    borders = _most_borders(call, prefix) if torch.compiler.is_compiling() else -1
    y, *sums, last, keys, values, pending, _, _, retries = torch.ops.halflife.koopman(
        q, k, v, entering, pending.contiguous(), gamma, mix, call.packing.cu_seqlens, readout.ridge, readout.power,
        call.tokens_per_operator, call.normalization == "sequence" and not prefix, prefix, borders if save else 0,
    )  # fmt: skip
    memory = type(memory)(type(memory.sums)._make(sums), last, keys, values, pending)
    return y, memory, retries if torch.compiler.is_compiling() else int(retries)


def _most_borders(call: KoopmanCall, prefix: bool) -> int:
    """How many sums are saved at most, by shapes alone: those before every `BLOCKS` blocks of each sequence."""
    sequences, size, length = call.packing.num_sequences, call.tokens_per_operator, call.k.shape[1]
    if prefix:
        return sequences
    waiting = 0 if call.initial_state is None else size - 1
    apart = BLOCKS * (TOKENS if size == 1 else size)
    if call.packing.cu_seqlens is None:
        return sequences * -(-(length + waiting) // apart)
    return (length + sequences * waiting) // apart + sequences


def step(
    call: KoopmanCall, memory: KoopmanMemory, inverse: Tensor, readout: KoopmanReadout
) -> tuple[Tensor, KoopmanMemory, int]:
    """Run one token without gradients by the inverse factor of the sums, as `_step` of halflife/ops/koopman/op.py."""
    build.load()
    sums, last, keys, values, pending, *_ = memory
    settings = [x.flatten().contiguous() for x in (readout.gamma, readout.mix)]
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (call.q, call.k, call.v))
    dense = [x.contiguous() for x in sums]
    if keys.shape[1]:
        inputs = (*dense, *(x.contiguous() for x in (inverse, keys, values, pending)), *settings)
        y, *waiting = torch.ops.halflife.koopman_wait(q, k, v, *inputs, readout.power)
        return y, type(memory)(sums, last, *waiting), 0
    y, *after, last, inverse, retries = torch.ops.halflife.koopman_enter(
        q, k, v, *dense, last.contiguous(), inverse.contiguous(), *settings, readout.ridge, readout.power
    )
    return y, type(memory)(type(sums)._make(after), last, keys, values, pending, inverse), int(retries)
