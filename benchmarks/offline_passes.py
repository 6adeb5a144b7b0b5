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


def launches(target: str = "sm_90") -> dict[str, list[Launch]]:
    """Case → its launches on a target, forward and backward."""
    return {f"pass, {name}": _of(run, target) for name, run in CASES.items()}


def launches_by_target() -> dict[str, list[dict[str, Launch]]]:
    """Case → its launches, each for each target, of which one may have more warps."""
    found = {target: launches(target) for target in offline_kernels.TARGETS}
    return {
        case: [dict(zip(found, alike, strict=True)) for alike in zip(*(x[case] for x in found.values()), strict=True)]
        for case in found["sm_90"]
    }


def _of(run: Callable[[], tuple[Tensor | None, ...]], target: str) -> list[Launch]:
    found: list[Launch] = []
    with offline_models.on_a_gpu(), offline_kernels.captured(found, target):
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


def _norm(
    op: str, channels: int, *settings: Any, heads: int | None = None, gate: bool = True, gate_kind: str | None = None,
    **options: Any,
) -> Any:  # fmt: skip
    """A norm of `ops.fused` over all channels, or over heads."""
    from halflife.ops import fused

    x, size = leaf(BATCH, LENGTH, channels), channels if heads is None else channels // heads
    first = x if heads is None else x.unflatten(-1, (heads, size))
    skip = {"skip": (weight(32), leaf(BATCH, LENGTH, channels))} if options.pop("skip", False) else {}
    skip |= {} if gate_kind is None else {"gate": gate_kind}
    gates = [leaf(BATCH, LENGTH, channels)] if gate else []
    weights = [] if op == "l2_normalize" else [weight(size)]
    return [getattr(fused, op)(first, *gates, *weights, *settings, **skip)]


def _narrow_norm(channels: int) -> list[Tensor]:
    from halflife.ops import fused

    return [fused.rms_norm(leaf(BATCH, LENGTH, channels), leaf(channels), 1e-5)]


def _added(channels: int) -> tuple[Tensor, Tensor]:
    from halflife.ops import fused

    stream, branch = leaf(BATCH, LENGTH, channels, dtype=torch.float32), leaf(BATCH, LENGTH, channels)
    return fused.add_rms_norm(stream, branch, weight(channels), 1e-5)


def _loss(tokens: int, vocabulary: int) -> list[Tensor]:
    from halflife.ops.cross_entropy import cross_entropy, losses_and_errors

    logits, labels = leaf(tokens, vocabulary), torch.empty(tokens, dtype=torch.long, device="meta")
    losses_and_errors(logits.detach(), labels, torch.empty((), device="meta"))
    return [cross_entropy(logits, labels)]


def _swiglu(channels: int, skip: bool = False) -> list[Tensor]:
    from halflife.ops import fused

    a, b, x = (leaf(BATCH, LENGTH, channels) for _ in range(3))
    return [fused.swiglu(a, b, skip=(weight(32), x) if skip else None)]


def _swiglu_linear(channels: int) -> list[Tensor]:
    from halflife.ops import fused

    parts = leaf(BATCH, LENGTH, channels), leaf(BATCH, LENGTH, channels)
    return [fused.swiglu_linear(*parts, leaf(1024, channels))]


def _gated_linear(channels: int) -> list[Tensor]:
    from halflife.ops import fused

    y, z, x = (leaf(BATCH, LENGTH, channels) for _ in range(3))
    skip = weight(32), x
    return [fused.rms_norm_of_gated_linear(y, z, weight(channels), 1, 1e-5, skip, leaf(1024, channels))]


def _scaled(heads: int, value: int) -> list[Tensor]:
    from halflife.ops import fused

    return [fused.scale_heads(leaf(BATCH, LENGTH, heads, value), weight(BATCH, LENGTH, heads))]


def _rotated(heads: int, key: int, pairs: int) -> list[Tensor]:
    from halflife.ops import fused

    cos, sin = (torch.empty(LENGTH, pairs, device="meta") for _ in range(2))
    return [fused.rotate(leaf(BATCH, LENGTH, heads, key), cos, sin)]


def _mixed(count: int, packed: bool = False) -> tuple[Tensor, ...]:
    from halflife.ops import rwkv7

    x, before = leaf(BATCH, LENGTH, 1024, dtype=torch.float32), None
    if packed:
        before = leaf(BATCH, LENGTH, 1024, dtype=torch.float32)
    return rwkv7.token_mix(x, before, [weight(1024) for _ in range(count)], last=not packed)


def _mixed_norm(count: int, size: int = 1024) -> tuple[Tensor, ...]:
    from halflife.ops import rwkv7

    x, branch = leaf(BATCH, LENGTH, size, dtype=torch.float32), leaf(BATCH, LENGTH, size)
    return rwkv7.token_mix_of_norm(x, branch, weight(size), weight(size), None, [weight(size)] * count, 1e-5)


def _keys(heads: int, size: int) -> tuple[Tensor, ...]:
    from halflife.ops import rwkv7

    key, rate, r = (leaf(BATCH, LENGTH, heads, size) for _ in range(3))
    bias, unit, change, bonus = (weight(heads, size) for _ in range(4))
    return rwkv7.rwkv7_keys(key, rate, r, bias, unit, change, bonus, torch.bfloat16)


def _output(heads: int, size: int) -> list[Tensor]:
    from halflife.ops import rwkv7

    (o, v), s = (leaf(BATCH, LENGTH, heads, size) for _ in range(2)), weight(BATCH, LENGTH, heads)
    gate = leaf(BATCH, LENGTH, heads * size)
    return [rwkv7.rwkv7_output(o, s, v, gate, *(weight(heads * size) for _ in range(2)), 1e-3, torch.bfloat16)]


def _values(heads: int, size: int) -> list[Tensor]:
    from halflife.ops import rwkv7

    v, first, rate = (leaf(BATCH, LENGTH, heads, size) for _ in range(3))
    return [rwkv7.rwkv7_values(v, first, rate, weight(heads, size))]


def _squared(channels: int) -> list[Tensor]:
    from halflife.ops import rwkv7

    return [rwkv7.relu_square(leaf(BATCH, LENGTH, channels))]


def _bounded(bound: bool) -> Any:
    from halflife.ops import laws

    return laws.bounded_decay(leaf(BATCH, LENGTH, 16, 64), weight(16, 64) if bound else None, True)


def _erase_write(heads: int, key: int, value: int) -> Any:
    from halflife.ops.dplr import erase_write

    k, v = leaf(BATCH, LENGTH, heads, key), leaf(BATCH, LENGTH, heads, value)
    gates = leaf(BATCH, LENGTH, heads * key), leaf(BATCH, LENGTH, heads * value)
    return erase_write(*gates, k, v, weight(BATCH, LENGTH, heads, key))


def _feedback(heads: int, key: int, apart: bool = False) -> Any:
    from halflife.ops.dplr import feedback_keys

    q, k = (leaf(BATCH, LENGTH, heads, key) for _ in range(2))
    return feedback_keys(q, k, leaf(BATCH, LENGTH, heads), weight(heads), weight(heads), apart=apart)


def _running(packed: bool) -> Any:
    from halflife.ops.linear_attention import running_decay
    from halflife.packing import Packing

    rows, packing = (BATCH, LENGTH), Packing(BATCH, LENGTH)
    if packed:
        rows = 1, BATCH * LENGTH
        packing = Packing(*rows, torch.arange(BATCH + 1, device="meta"))
    first = weight(BATCH, 16, 64) if packed else None
    g, last, key = running_decay(leaf(*rows, 16, 64), first, packing, with_key=True)
    return g, key, last if packed else None


def _longhorn(heads: int, key: int) -> Any:
    from halflife.ops.linear_attention import longhorn_keys

    return longhorn_keys(leaf(BATCH, LENGTH, heads), leaf(BATCH, LENGTH, key), torch.bfloat16)


def _gates(heads: int, post: bool, strengths: bool) -> Any:
    from halflife.ops import laws
    from halflife.ops.laws.gates import SlowInput, gates

    rows, vector = (BATCH, LENGTH, heads), weight(heads)
    spectrum = laws.Spectrum(weight(1), weight(heads - 1), 8.0) if post else None
    position = torch.empty(LENGTH, dtype=torch.long, device="meta") if post else None
    law = laws.Unevaluated(leaf(*rows), laws.Law("softplus", vector, vector), spectrum, position, (heads,), gains=post)
    slow = SlowInput(leaf(*rows), weight(heads, 4), weight(heads), weight(heads), None)
    return gates(law, leaf(*rows) if strengths else None, slow)[:4]


def _ranks(heads: int, key: int, rank: int) -> Any:
    """The products and the output of Mamba-3 MIMO, of values with 64 channels."""
    from halflife.ops import trapezoid

    q, k, before = (leaf(BATCH, LENGTH, rank, heads, key) for _ in range(3))
    v_before, v, z = (leaf(BATCH, LENGTH, heads, 64) for _ in range(3))
    gains = [weight(BATCH, LENGTH, heads) for _ in range(2)]
    later, now = trapezoid.mimo_products(q, k, before, *gains, weight(heads))
    y, weights = leaf(BATCH, LENGTH, rank, heads, 64), [weight(rank, heads, 64) for _ in range(3)]
    return [trapezoid.mimo_output(y, later, now, v_before, v, z, *weights)]


def _angles(per_head: bool, packed: bool = False) -> Any:
    from halflife.ops import trapezoid
    from halflife.packing import Packing

    rows, packing = (BATCH, LENGTH), None
    if packed:
        rows = 1, BATCH * LENGTH
        packing = Packing(*rows, torch.arange(BATCH + 1, device="meta"))
    first = leaf(BATCH, 32, 32, dtype=torch.float64) if packed else None
    rate = leaf(*rows, 32, 32) if per_head else leaf(*rows, 32)
    return trapezoid.running_angles(weight(*rows, 32), rate, first, not per_head, packing)


def _trapezoid(heads: int, key: int, pairs: int, rank: int = 1, normed: bool = True, packed: bool = False) -> Any:
    """All of Mamba-3's passes but the angles, of values with 64 channels."""
    from halflife.ops import trapezoid
    from halflife.packing import Packing

    rows, packing, firsts = (BATCH, LENGTH), None, (None, None, None)
    if packed:
        rows = 1, BATCH * LENGTH
        packing = Packing(*rows, torch.arange(BATCH + 1, device="meta"))
        firsts = weight(BATCH, rank * heads, key), leaf(BATCH, heads, 64), weight(BATCH, heads)
    norms = [(weight(key), weight(rank * heads, key)) if normed else None for _ in range(2)]
    c, b = (leaf(*rows, (rank if normed else heads) * key) for _ in range(2))
    v, angle = leaf(*rows, heads, 64), weight(*rows, heads, pairs)
    q, before, v_before, dot, *rest = trapezoid.trapezoid_keys(
        c, b, v, angle, *norms, firsts[:2], 1e-5, rank > 1, packing
    )  # fmt: skip
    share = leaf(*rows, heads)
    of_g, gain, last = trapezoid.trapezoid_weights(
        weight(*rows, heads), weight(*rows, heads), share, firsts[2], packing
    )  # fmt: skip
    y = trapezoid.trapezoid_output(
        v_before, v, dot[:, :, :heads], gain, weight(heads), leaf(*rows, heads * 64)
    )  # fmt: skip
    return q, before, y, of_g, *((last, *rest) if packed else rest[2:])  # a step uses no last token


CASES: dict[str, Callable[[], Any]] = {
    "mamba2": lambda: _conv(2304, 4),
    "packed": lambda: _conv(2304, 4, packed=True, initial_state=leaf(BATCH, 2304, 3)),
    "gated_deltanet": lambda: _conv(3072, 4, unit=(2048, 64)),
    "kda 128": lambda: _conv(3072, 4, unit=(2048, 128)),
    "rms_norm 1024": lambda: _norm("rms_norm", 1024, 1e-5, gate=False),
    "weights of 16 bits": lambda: _narrow_norm(1024),
    "add_rms_norm 1024": lambda: _added(1024),
    "rms_norm 8192": lambda: _norm("rms_norm", 8192, 1e-5, gate=False),
    "rms_norm_of_gated 2048": lambda: _norm("rms_norm_of_gated", 2048, 1, 1e-5, skip=True),
    "rms_norm_of_gated 8192": lambda: _norm("rms_norm_of_gated", 8192, 1, 1e-5, skip=True),
    "rms_norm_of_sigmoid_gated 1024": lambda: _norm("rms_norm_of_sigmoid_gated", 1024, 1e-5),
    "gated_head_norm 128": lambda: _norm("gated_head_norm", 1024, 1e-5, heads=8),
    "gated_head_norm 64, sigmoid": lambda: _norm("gated_head_norm", 1024, 1e-5, heads=16, gate_kind="sigmoid"),
    "l2_normalize 64": lambda: _norm("l2_normalize", 1024, heads=16, gate=False),
    "token_mix 6": lambda: _mixed(6),
    "token_mix 6, packed": lambda: _mixed(6, packed=True),
    "token_mix 1": lambda: _mixed(1),
    "token_mix_of_norm 6": lambda: _mixed_norm(6),
    "token_mix_of_norm 1": lambda: _mixed_norm(1),
    "token_mix_of_norm 6 of 4096": lambda: _mixed_norm(6, 4096),
    "rwkv7_keys 64": lambda: _keys(16, 64),
    "rwkv7_output 64": lambda: _output(16, 64),
    "rwkv7_values 64": lambda: _values(16, 64),
    "relu_square 4096": lambda: _squared(4096),
    "cross_entropy 128256": lambda: _loss(4096, 128_256),
    "swiglu 2816": lambda: _swiglu(2816),
    "swiglu 2816 and its map": lambda: _swiglu_linear(2816),
    "swiglu 2048 with skip": lambda: _swiglu(2048, skip=True),
    "rms_norm_of_gated 2048 and its map": lambda: _gated_linear(2048),
    "scale_heads 64": lambda: _scaled(32, 64),
    "rotate 64": lambda: _rotated(16, 64, 32),
    "rotate 128 in part": lambda: _rotated(8, 128, 16),
    "bounded_decay": lambda: _bounded(True),
    "bounded_decay, first layer": lambda: _bounded(False),
    "erase_write 64": lambda: _erase_write(16, 64, 64),
    "feedback_keys 64": lambda: _feedback(16, 64),
    "feedback_keys 128, apart": lambda: _feedback(8, 128, apart=True),
    "running_decay": lambda: _running(False),
    "running_decay, packed": lambda: _running(True),
    "longhorn_keys": lambda: _longhorn(32, 16),
    "longhorn_keys of channels": lambda: _longhorn(2048, 16),
    "gates of mamba2+post+gate_rank": lambda: _gates(32, True, False),
    "gates of gated_deltanet+gate_rank": lambda: _gates(16, False, True),
    "running_angles": lambda: _angles(False),
    "running_angles, packed": lambda: _angles(False, packed=True),
    "running_angles of heads": lambda: _angles(True),
    "mamba3": lambda: _trapezoid(32, 128, 32),
    "mamba3, packed": lambda: _trapezoid(32, 128, 32, packed=True),
    "mamba3_mimo": lambda: _trapezoid(32, 128, 32, rank=4),
    "mamba3_mimo, ranks": lambda: _ranks(32, 128, 4),
    "mamba3_echo": lambda: _trapezoid(8, 16, 8, normed=False),
}
