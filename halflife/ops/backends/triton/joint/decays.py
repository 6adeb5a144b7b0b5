"""The gates of a layer by one launch (`halflife.ops.laws.gates`), whose parts have programs of their own.

First stand those of the log-decays, then those of the writing strengths, which are a law too, and then those of the
convolution of GateRank's slow gate. The gradients are those of the kernels of each part.
"""

from __future__ import annotations

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from halflife.ops.backends.triton.launch import launch, only_first_derivatives
from halflife.ops.backends.triton.laws import SHAPES, blocks, limit, log_decay_backward, positions, put_law
from halflife.ops.backends.triton.op import declare, declare_gradients
from halflife.ops.backends.triton.passes.convolution import convolve, convolve_backward, tile
from halflife.ops.backends.triton.post import block_of, spectrum_backward, spectrum_kernel
from halflife.precision import ROOMY


@triton.jit
@no_type_check
def gates_kernel(
    f, theta, delta, position, bias, rate, taper, g, step, logits, beta, x, taps, shift, slow_rate, first, cu_seqlens,
    g_slow, final, rows, T, D, f_b, f_t, p_b, p_t, log_length, factor, least, most, of_decay, S, l_b, l_t, strength,
    of_strength, G, x_b, x_t, N, steps, blocks, BLOCK: tl.constexpr, SHAPE: tl.constexpr, BR: tl.constexpr,
    BC: tl.constexpr, BR_S: tl.constexpr, BC_S: tl.constexpr, W: tl.constexpr, BR_G: tl.constexpr, BC_G: tl.constexpr,
):  # fmt: skip
    """The first `of_decay` programs have log-decays, and the next `of_strength` strengths. What is None is left out."""
    program = tl.program_id(0)
    if program < of_decay:
        if theta is not None:  # each stores the spectrum, the same numbers, and reads what it stored
            spectrum_kernel(theta, delta, rate, taper, D, log_length, BLOCK)
            tl.debug_barrier()
        put_law(
            program, f, position, bias, rate, taper, g, step, rows, T, D, f_b, f_t, p_b, p_t, factor, least, most,
            SHAPE, BR, BC,
        )  # fmt: skip
    elif program < of_decay + of_strength:
        if logits is not None:
            put_law(
                program - of_decay, logits, None, None, None, None, beta, None, rows, T, S, l_b, l_t, 0, 0, -strength,
                0.0, 0.0, 2, BR_S, BC_S,
            )  # fmt: skip
    elif x is not None:
        convolve(
            program - of_decay - of_strength, x, taps, shift, slow_rate, first, cu_seqlens, g_slow, None, None, final,
            rows, T, G, N, steps, blocks, x_b, x_t, G, 0, 0, W, False, 0, BR_G, BC_G,
        )  # fmt: skip


def _gates(
    f: Tensor, bias: Tensor | None, rate: Tensor | None, taper: Tensor | None, position: Tensor | None,
    theta: Tensor | None, delta: Tensor | None, logits: Tensor | None, slow: Tensor | None, taps: Tensor | None,
    shift: Tensor | None, slow_rate: Tensor | None, first: Tensor | None, cu_seqlens: Tensor | None, shape: str,
    factor: float, least: float, most: float | None, with_step: bool, log_length: float, strength: float,
) -> list[Tensor]:  # fmt: skip
    """g, φ, β, the slow log-decays, the state of the convolution, and the spectrum; without entries where not given."""
    (batch, length, channels), (tokens, rows, columns) = f.shape, blocks(f)
    g, step = (f.new_empty(f.shape if made else 0, dtype=torch.float32) for made in (True, with_step))
    of_decay, of_spectrum = triton.cdiv(channels, columns) * triton.cdiv(tokens, rows), [rate, taper]
    if theta is not None:
        of_spectrum = [theta.new_empty(channels) for _ in range(2)]
    beta, of_strength, given = f.new_empty(0), 0, (0, 0, 0, 16, 16)
    if logits is not None:
        beta = logits.new_empty(logits.shape, dtype=ROOMY[logits.dtype])
        _, size, width = blocks(logits)
        of_strength = triton.cdiv(logits.shape[2], width) * triton.cdiv(tokens, size)
        given = logits.shape[2], logits.stride(0), logits.stride(1), size, width
    g_slow, final, of_slow, convolved = f.new_empty(0), f.new_empty(0), 0, (0, 0, 0, 0, 0, 0, 1, *tile())
    if slow is not None and taps is not None:
        width, sequences = taps.shape[1], batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
        g_slow = slow.new_empty(slow.shape, dtype=torch.float32)
        final = slow.new_empty(sequences, slow.shape[2], width - 1, dtype=torch.float32)
        parts = triton.cdiv(tokens, tile()[0])
        of_slow = (parts + (sequences if width > 1 else 0)) * triton.cdiv(slow.shape[2], tile()[1])
        convolved = (slow.shape[2], slow.stride(0), slow.stride(1), sequences, sequences.bit_length(), parts, width)
        convolved += tile()
    if of_decay + of_strength + of_slow:
        launch(gates_kernel, (of_decay + of_strength + of_slow,))(
            f, theta, delta, position, bias, *of_spectrum, g, step if with_step else None, logits, beta, slow, taps,
            shift, slow_rate, first, cu_seqlens, g_slow, final, tokens, length, channels, f.stride(0), f.stride(1),
            *positions(position), log_length, factor, least, limit(most), of_decay, *given[:3], strength, of_strength,
            *convolved[:6], BLOCK=block_of(channels)[0], SHAPE=SHAPES[shape], BR=rows, BC=columns, BR_S=given[3],
            BC_S=given[4], W=convolved[6], BR_G=convolved[7], BC_G=convolved[8],
        )  # fmt: skip
    kept = [f.new_empty(0) if theta is None or x is None else x for x in of_spectrum]
    return [g, step, beta, g_slow, final, *kept]


def _gates_backward(
    dg: Tensor, dstep: Tensor | None, dbeta: Tensor | None, dslow: Tensor | None, dfinal: Tensor | None, p: Tensor,
    alpha: Tensor, f: Tensor, bias: Tensor | None, rate: Tensor | None, taper: Tensor | None, position: Tensor | None,
    theta: Tensor | None, delta: Tensor | None, logits: Tensor | None, slow: Tensor | None, taps: Tensor | None,
    shift: Tensor | None, slow_rate: Tensor | None, first: Tensor | None, cu_seqlens: Tensor | None, shape: str,
    factor: float, least: float, most: float | None, log_length: float, strength: float, of_first: bool,
) -> list[Tensor]:  # fmt: skip
    """The gradients of f, of its vectors together, of θ, δ and the logits, and of what the convolution reads."""
    none = [f.new_empty(0) for _ in range(6)]
    if theta is not None:
        rate, taper = p, alpha
    df, sums = log_decay_backward(dg, dstep, f, bias, rate, taper, position, shape, factor, least, most)
    of_spectrum, dlogits, of_slow = none[:2], none[2], none[3:]
    if theta is not None and delta is not None:
        of_spectrum = spectrum_backward(theta, delta, sums[1], sums[2], log_length)
    if logits is not None and dbeta is not None:
        dlogits, _ = log_decay_backward(
            dbeta, None, logits, None, None, None, None, "sigmoid", -strength, 0.0, None
        )  # fmt: skip
    if slow is not None and taps is not None and dslow is not None:
        given = slow, taps, shift, slow_rate, first, cu_seqlens
        of_slow = convolve_backward([dslow], dfinal, *given, False, of_first, 0, 0)
    return [df, sums, *of_spectrum, dlogits, *of_slow]


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    *tensors, shape, factor, least, most, ctx.with_step, log_length, strength = inputs
    ctx.settings = shape, factor, least, most, log_length, strength
    ctx.save_for_backward(*output[5:], *tensors)
    ctx.mark_non_differentiable(*output[5:])
    ctx.set_materialize_grads(False)  # a training step does not use the final state


def _grad(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    only_first_derivatives()
    p, alpha, *tensors = ctx.saved_tensors
    f, bias, rate, taper, _, theta, _, logits, slow, taps, *_, first, _ = tensors
    dg, dstep, dbeta, dslow, dfinal = (None if d is None else d.contiguous() for d in grads[:5])
    dg = f.new_zeros(f.shape, dtype=torch.float32) if dg is None else dg
    if slow is not None and dslow is None and dfinal is not None:
        dslow = torch.zeros_like(slow, dtype=torch.float32)
    of_first = first is not None and ctx.needs_input_grad[12]
    df, sums, dtheta, ddelta, dlogits, dx, dsums, dfirst = _gradients(
        dg, dstep if ctx.with_step else None, dbeta, dslow, dfinal, p, alpha, *tensors, *ctx.settings, of_first
    )
    vectors = [None if x is None else dx for x, dx in zip((bias, rate, taper), sums.unbind(), strict=True)]
    of_spectrum = (None, None) if theta is None else (dtheta, ddelta)
    of_slow = [None] * 5
    if taps is not None and dslow is not None:
        dtaps, *others = dsums.split([taps.numel(), len(taps), len(taps)])
        of_slow = [dx, dtaps.view(taps.shape), *others, dfirst if of_first else None]
    of_logits = dlogits if logits is not None and dbeta is not None else None
    return df, *vectors, None, *of_spectrum, of_logits, *of_slow, *[None] * 8


_gradients = declare_gradients("triton_gates_backward", _gates_backward)
declare("triton_gates", _gates).register_autograd(_grad, setup_context=_save)
