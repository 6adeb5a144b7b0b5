"""The gates of a layer in one pass: its log-decays, writing strengths, and the log-decays of GateRank's slow state.

    β = s σ(logits),      g_slow = −e^{slow_rate} relu(Σ_i taps_i ⊙ slow_{t−W+1+i} + shift)

The log-decays are those of `ops.laws`, of a law or of PoST's spectrum. Source of the slow state: GateRank, Eq. 8.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from halflife.ops.arguments import dense, not_plain
from halflife.ops.backends import triton
from halflife.ops.backends.dispatch import implements_pass, run_pass
from halflife.ops.conv import MOST_TAPS, causal_conv1d
from halflife.ops.laws import MOST, Law, Spectrum, Unevaluated, expression, spectrum, why_not
from halflife.ops.spec import define
from halflife.packing import Packing
from halflife.precision import ROOMY, compute_dtype


class SlowInput(NamedTuple):
    """The input of GateRank's gate of the slow state, which another kernel computes.

    Attributes:
        f: activations `[B, T, G]` of one gate or a gate for each head.
        taps, bias, rate: of `SlowGate`, in float32.
        state: that of its convolution, or None at the start.
    """

    f: Tensor
    taps: Tensor
    bias: Tensor
    rate: Tensor
    state: Tensor | None


class Gates(NamedTuple):
    """What `gates` computes; None is what it was not asked for.

    Attributes:
        g, step: log-decays and φ, in the shape of their activations.
        beta: β `[B, T, S]`.
        g_slow: `[B, T, G]`.
        conv: the last W − 1 inputs of the convolution, `[N, G, W − 1]`.
    """

    g: Tensor
    step: Tensor | None
    beta: Tensor | None
    g_slow: Tensor | None
    conv: Tensor | None


def gates(
    decay: Unevaluated, logits: Tensor | None = None, slow: SlowInput | None = None, packing: Packing | None = None,
    backend: str = "auto",
) -> Gates:  # fmt: skip
    """Compute log-decays, with the other gates of their layer.

    Args:
        decay: the log-decays. Its activations are a tensor, and its law has a φ of `ops.laws.SHAPES`.
        logits: those of writing strengths `decay.most · σ(logits)`, `[B, T, S]`.
        slow: the input of GateRank's slow gate.
        packing: where the sequences lie; None is in rows.
        backend: "auto", or one of `available_backends("gates")`.
    """
    f, law, taper = decay.f, decay.law, decay.taper
    assert isinstance(f, Tensor)
    theta = delta = None
    log_length = 1.0
    if isinstance(taper, Spectrum):
        theta, delta, log_length = taper
        vectors = law.bias, None, None
    else:
        vectors = law.bias, law.rate, taper
    vectors = [None if x is None else x.expand(decay.shape).flatten() for x in vectors]
    tensors = (
        f.flatten(2), *vectors, None if taper is None else decay.position, theta, delta, logits,
        *((None,) * 5 if slow is None else slow),
    )  # fmt: skip
    settings = law.shape, law.factor, law.least, law.most, decay.gains, log_length, decay.most
    g, step, *others = run_pass("gates", backend, tensors, *settings, packing)
    return Gates(g.view(f.shape), None if step is None else step.view(f.shape), *others)


def _expression(
    f: Tensor, bias: Tensor | None, rate: Tensor | None, taper: Tensor | None, position: Tensor | None,
    theta: Tensor | None, delta: Tensor | None, logits: Tensor | None, slow: Tensor | None, taps: Tensor | None,
    shift: Tensor | None, slow_rate: Tensor | None, first: Tensor | None, shape: str, factor: float, least: float,
    most: float | None, with_step: bool, log_length: float, strength: float, packing: Packing | None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    if theta is not None and delta is not None:
        rate, taper = spectrum(theta, delta, log_length)
    g, step = expression(f, bias, rate, taper, position, shape, factor, least, most, with_step)
    beta = g_slow = conv = None
    if logits is not None:
        beta = strength * logits.to(ROOMY[logits.dtype]).sigmoid()
    if slow is not None and taps is not None and shift is not None:
        wide = compute_dtype(slow)
        y, conv = causal_conv1d(
            slow, taps.to(wide), shift.to(wide), activation=None, initial_state=first, output_final_state=True,
            cu_seqlens=packing, backend="chunked", dtype=wide,
        )  # fmt: skip
        law = Law("relu", rate=slow_rate)
        g_slow = law.log_decay(law.step(y))
    return g, step, beta, g_slow, conv


def _kernel(f: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
    vectors, position, spectrum, (logits, slow), of_slow = rest[:3], rest[3], rest[4:6], rest[6:8], rest[8:12]
    *settings, packing = rest[12:]
    contiguous = [[None if x is None else x.contiguous() for x in part] for part in (vectors, spectrum, of_slow)]
    found = triton.custom_op("gates")(
        dense(f), *contiguous[0], position, *contiguous[1], *[None if x is None else dense(x) for x in (logits, slow)],
        *contiguous[2], None if packing is None else packing.cu_seqlens, *settings,
    )  # fmt: skip
    there = True, settings[4], logits is not None, slow is not None, slow is not None
    return tuple(x if asked else None for x, asked in zip(found, there, strict=False))


def _why_not(op: str, device: torch.device, tensors: Any = None) -> str | None:
    if tensors is not None:
        f, *vectors, logits, slow, taps, shift, rate, first = tensors
        for x in (logits, slow, first):
            if x is not None and x.dtype not in triton.DTYPES:
                return f"the Triton kernels take activations of 16 or 32 bits; got {x.dtype}"
        if (odd := not_plain(logits, slow, first)) is not None:
            return odd
        if taps is not None and taps.shape[-1] > MOST_TAPS:
            return f"the Triton kernel takes at most {MOST_TAPS} taps; got {taps.shape[-1]}"
        if (delta := vectors[5]) is not None and len(delta) + 1 >= MOST:
            return f"the Triton kernel takes fewer than {MOST} channels"
        tensors = f, *vectors, taps, shift, rate
    return why_not(op, device, tensors)


define(
    "gates", f="B T D", bias="D | None", rate="D | None", taper="D | None", position="int B T | T | None",
    theta="1 | None", delta="D-1 | None", logits="B T H | None", slow="B T G | None", taps="G W | None",
    shift="G | None", slow_rate="G | None", first="B G W-1 | None", constants=["position"],
    settings={
        "shape": "softplus", "factor": 0.5, "least": 0.0, "most": None, "with_step": True, "log_length": 6.0,
        "strength": 2.0, "packing": None,
    },
)  # fmt: skip
implements_pass("gates", _expression, triton=(_kernel, _why_not))
