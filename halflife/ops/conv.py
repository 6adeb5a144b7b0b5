"""Short causal depthwise convolution over the last W tokens.

    y_t = act( Σ_{i<W} w_i ⊙ x_{t−W+1+i} + bias )

Before the first token of each sequence stand zeros, or the state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halflife.ops.arguments import dense, is_transformed
from halflife.ops.backends import native, triton
from halflife.ops.backends.dispatch import be_kind, dispatch, implements
from halflife.ops.call import Call
from halflife.ops.fused import unit
from halflife.ops.spec import define
from halflife.packing import Packing
from halflife.precision import compute_dtype

ACTIVATIONS = {"silu": F.silu, None: lambda y: y}

define(
    "causal_conv1d", x="B T D", weight="D W", bias="D | None", state="N D W-1", wide=False,
    settings={"activation": "silu", "unit": None, "splits": None},
)  # fmt: skip


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *,
    activation: str | None = "silu", initial_state: Tensor | None = None, output_final_state: bool = False,
    cu_seqlens: Tensor | Packing | None = None, backend: str = "auto", dtype: torch.dtype | None = None,
    unit: tuple[int, int] | None = None, splits: Sequence[int] | None = None,
) -> tuple[Any, Tensor | None]:  # fmt: skip
    """Causal depthwise convolution `y_t = act(Σ_i w_i ⊙ x_{t−W+1+i} + bias)`.

    Args:
        x: inputs `[B, T, D]`.
        weight: taps `[D, W]`, the last one on the current token.
        bias: `[D]` or None.
        activation: "silu" or None.
        initial_state: the W − 1 inputs before the first token, oldest first, `[B, D, W − 1]`
            (`[N, D, W − 1]` when packed); None means zeros.
        output_final_state: whether to return the last W − 1 inputs.
        cu_seqlens: boundaries `[N + 1]` of N sequences packed along T (then B = 1). No window crosses a boundary.
        backend: "auto", or one of `available_backends("causal_conv1d")`.
        dtype: dtype of the results; None is that of x.
        unit: `(channels, size)`; each `size` of the first `channels` outputs are divided by `√(‖y‖² + 1e-6)`.
        splits: numbers of channels, which add up to D, of the parts in which y is returned. None is y as one tensor. A
            kernel may give each part its own memory.

    Returns:
        `y [B, T, D]`, or with `splits` the tuple of its parts `[B, T, Dᵢ]`; and the final state `[N, D, W − 1]`, or
        None.

    Raises:
        ValueError: a shape does not fit, the activation is unknown, or `splits` do not add up to D.
    """
    if isinstance(weight, Tensor) and weight.shape[-1:] == (0,):
        raise ValueError(f"weight must be [D, W] with at least one tap; got {list(weight.shape)}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be 'silu' or None; got {activation!r}")
    if unit is not None and (unit[1] < 1 or unit[0] % unit[1] or unit[0] > x.shape[-1]):
        raise ValueError(f"unit must be (channels, size), channels of x in groups of equal size; got {unit}")
    if splits is not None and (sum(splits) != x.shape[-1] or min(splits, default=0) < 0):
        raise ValueError(f"splits must add up to the {x.shape[-1]} channels of x; got {list(splits)}")
    tensors = {"x": x, "weight": weight, "bias": bias}
    y, state = dispatch(
        "causal_conv1d", tensors, initial_state, cu_seqlens, backend, output_final_state, activation=activation,
        dtype=dtype, unit=unit, splits=splits,
    )  # fmt: skip
    return (y.split(splits, -1) if splits is not None and isinstance(y, Tensor) else y), state


def _native(call: Call) -> tuple[Tensor, Tensor]:
    (x, *parameters), bounds = call.tensors.values(), call.packing.cu_seqlens
    given = (x.to(call.output_dtype), *parameters, _first(call), bounds)
    y, state = native.op("causal_conv")(*given, call.options["activation"] == "silu")
    return y if call.options["unit"] is None else _with_units(y, call), state


be_kind("conv", "causal_conv1d", "causal_conv", "conv")
implements("causal_conv1d", "native", _native, why_not=native.why_not_matrices(1), steps=True)

MOST_TAPS = 8  # of the Triton kernel, which has them all at hand
UNITS = (16, 32, 64, 128)  # sizes of unit vectors of which a program has all channels


def _triton(call: Call) -> tuple[Tensor | tuple[Tensor, ...], Tensor]:
    x, weight, bias = call.tensors.values()
    state = None if call.state is None else call.state[0].contiguous()
    given = (weight.contiguous(), bias if bias is None else bias.contiguous(), state, call.packing.cu_seqlens)
    channels, size = call.options["unit"] or (0, 0)
    inside = size in UNITS
    parts = call.options["splits"] if inside or not channels else None
    final, *ys = triton.custom_op("conv")(
        dense(x), *given, call.options["activation"] == "silu", call.output_dtype, channels if inside else 0, size,
        [x.shape[-1]] if parts is None else [*parts],
    )  # fmt: skip
    if channels and not inside:
        return _with_units(ys[0], call), final
    return ys[0] if len(ys) == 1 else tuple(ys), final


def _with_units(y: Tensor, call: Call) -> Tensor:
    channels, size = call.options["unit"]
    vectors = unit(y[..., :channels].unflatten(-1, (-1, size)))
    return torch.cat([vectors.flatten(-2), y[..., channels:]], -1)


def _why_not_triton(op: str, device: torch.device, call: Call | None = None) -> str | None:
    if call is not None and call.sizes["W"] > MOST_TAPS:
        return f"the Triton kernel takes at most {MOST_TAPS} taps; got {call.sizes['W']}"
    return triton.why_not_pass(op, device, call)


implements("causal_conv1d", "triton", _triton, why_not=_why_not_triton, steps=True)


def _first(call: Call) -> Tensor:
    return call.first_states(call.output_dtype)[0] if call.state is None else call.state[0]


def _activated(
    convolve: Callable[[Tensor, Tensor, Tensor, Packing], tuple[Tensor, Tensor]],
) -> Callable[[Call], tuple[Tensor, Tensor]]:
    """The implementation `convolve(x, weight, state, packing)` with a bias and an activation after it."""

    @wraps(convolve)
    def run(call: Call) -> tuple[Tensor, Tensor]:
        x, weight, bias = call.tensors.values()
        x = x.to(call.output_dtype)
        y, state = convolve(x, weight, _first(call), call.packing)
        y = ACTIVATIONS[call.options["activation"]](y if bias is None else y + bias).to(x.dtype)
        return y if call.options["unit"] is None else _with_units(y, call), state

    return run


@implements("causal_conv1d", "reference")
@_activated
def reference(x: Tensor, weight: Tensor, state: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
    """The definition: a window of W inputs moves by one token at a time."""
    outputs, finals, weight = [], [], weight.to(compute_dtype(x))  # gradients of the taps add up in this dtype
    for rows, tokens in packing.pieces():
        before = state[rows]
        window = torch.cat([before, before[..., :0].new_zeros(*before.shape[:2], 1)], -1).to(compute_dtype(x))
        for t in range(tokens.start, tokens.stop):
            window = torch.cat([window[..., 1:] if t > tokens.start else before, x[:, t].unsqueeze(-1)], -1)
            outputs.append((window * weight).sum(-1))
        finals.append(window[..., 1:] if tokens.stop > tokens.start else before)
    y = torch.stack(outputs, 1) if outputs else torch.zeros_like(x)
    return y, torch.cat(finals).to(x.dtype) if finals else state


@implements("causal_conv1d", "chunked", steps=True, traceable=True)
@_activated
def chunked(x: Tensor, weight: Tensor, state: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
    """The sum of W shifted products. The state of each sequence is put before its first token."""
    taps = weight.to(compute_dtype(x)).t().contiguous()
    history, before = len(taps) - 1, state.transpose(1, 2).to(x.dtype)
    if packing.cu_seqlens is None:
        extended = torch.cat([before, x], 1)
        tail = extended[:, x.shape[1] :]
    else:
        extended, tail = _extend(x, before, packing)
    # Under transforms, and in graphs, whose backward torch 2.11 traces wrongly, plain products.
    plain = torch.compiler.is_compiling() or is_transformed()
    y = _sum_of_shifts(extended, taps) if plain else _ShiftedProducts.apply(extended, taps)
    if packing.cu_seqlens is not None:
        y = y.index_select(1, _token_rows(packing, history, x.device))
    return y, tail.transpose(1, 2)


def _sum_of_shifts(x: Tensor, taps: Tensor) -> Tensor:
    length = x.shape[1] - len(taps) + 1
    y = x[:, :length] * taps[0]
    for i in range(1, len(taps)):
        y.addcmul_(x[:, i : i + length], taps[i])
    return y


class _ShiftedProducts(torch.autograd.Function):
    """`y_t = Σ_i taps_i ⊙ x_{t+i}`: `x [B, T + W − 1, D]`, `taps [W, D]` → `[B, T, D]`.

    On a CPU it is 2 to 7 times as fast as `F.conv1d` with groups or autograd's gradient of the shifts (docs/log.md).
    """

    @staticmethod
    def forward(ctx, x, taps):
        ctx.save_for_backward(x, taps)
        return _sum_of_shifts(x, taps)

    @staticmethod
    def backward(ctx, dy):
        x, taps = ctx.saved_tensors
        length = dy.shape[1]
        dx, dtaps = torch.zeros(x.shape, dtype=dy.dtype, device=dy.device), torch.empty_like(taps)
        product = None if torch.is_grad_enabled() else torch.empty_like(dy)  # for second derivatives each is kept
        for i in range(len(taps)):
            dx[:, i : i + length].addcmul_(dy, taps[i])
            dtaps[i] = torch.mul(dy, x[:, i : i + length], out=product).sum((0, 1))
        return dx.to(x.dtype), dtaps


def _token_rows(packing: Packing, history: int, device: torch.device) -> Tensor:
    """For each packed token, the row of the extended inputs at which its window starts: `[T]`."""
    return torch.arange(packing.length, device=device) + packing.sequence * history


def _extend(x: Tensor, before: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
    """Packed inputs with W − 1 rows of state before each sequence, and the last W − 1 rows of each sequence."""
    bounds = packing.cu_seqlens
    assert bounds is not None
    sequences, history, channels = before.shape
    offsets = torch.arange(sequences, device=x.device) * history
    window = torch.arange(history, device=x.device)
    tokens = _token_rows(packing, history, x.device) + history
    states = (bounds[:-1] + offsets).unsqueeze(1) + window
    extended = x.new_zeros(1, packing.length + sequences * history, channels)
    extended = extended.index_copy(1, tokens, x).index_copy(1, states.flatten(), before.reshape(1, -1, channels))
    tails = (bounds[1:] + offsets).unsqueeze(1) + window
    return extended, extended[0, tails]
