"""The forms of `cascade`: the token loop that defines it, the mask, and chunks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from halflife.ops.backends import native
from halflife.ops.backends.dispatch import implements
from halflife.ops.call import pieces
from halflife.ops.cascade.op import CascadeCall, changes, transitions
from halflife.ops.chunked.blocks import scan, unit_lower_inverse
from halflife.ops.chunked.layout import make_layout, take_block

NATIVE_STATES = 8  # a token has 2N − 1 entries, of 16 in csrc/cascade.cpp


@implements("cascade", "reference")
def reference(call: CascadeCall) -> tuple[Tensor, Tensor]:
    """The definition, token by token."""
    matrices = transitions(call.g, call.r)
    outputs, finals = [call.op.v[:, :0].to(call.initial)], []
    for rows, tokens in pieces(call.op.q.shape[1], call.op.cu_seqlens):
        states = call.initial[rows]
        for t in range(tokens.start, tokens.stop):
            states = torch.einsum("bhnm,bhmkv->bhnkv", matrices[:, t], states)
            q, k, v = (x[:, t].to(states.dtype) for x in (call.op.q, call.op.k, call.op.v))
            if call.op.beta is not None:
                v = call.op.beta[:, t].to(v).unsqueeze(-1) * (v - torch.einsum("bhnkv,bhk->bhv", states, k))
            written = torch.zeros_like(states)
            written[:, :, 0] = k.unsqueeze(-1) * v.unsqueeze(-2)
            states = states + written
            outputs.append(torch.einsum("bhnkv,bhk->bhv", states, q).unsqueeze(1))
        finals.append(states)
    return torch.cat(outputs, 1) * call.op.output_scale, torch.cat([call.initial[:0], *finals])


class Weights(NamedTuple):
    """Products of the matrices M of C tokens.

    Attributes:
        pairs: `1ᵀ M_i ⋯ M_{j+1} e_1`, the weight of key j at query i, `[…, C, C]`; 1 for i = j and 0 for i < j.
        reads: `1ᵀ M_i ⋯ M_1`, the weights of the states before the first token at query i, `[…, C, N]`.
        keys: `M_C ⋯ M_{j+1} e_1`, the weights of key j in the states after the last token, `[…, C, N]`.
        carry: `M_C ⋯ M_1`, `[…, N, N]`.
    """

    pairs: Tensor
    reads: Tensor
    keys: Tensor
    carry: Tensor


def weights(matrices: Tensor) -> Weights:
    """Multiply the matrices `[…, C, N, N]` of C = 2^n tokens in pairs, then in fours, and so on.

    A block of twice the size has the pairs of its halves, and below them `reads` of the second half times `keys` of
    the first, so its rank is N. No inverse is needed, so weights of states that were erased are exact zeros.
    """
    first = torch.zeros_like(matrices[..., 0])
    first[..., 0] = 1
    pairs, reads, keys, carry = (
        torch.ones_like(matrices[..., :1, :1]),
        matrices.sum(-2, True),
        first.unsqueeze(-2),
        matrices,
    )
    while carry.shape[-3] > 1:
        (early, late), (read_early, read_late), (key_early, key_late), (carry_early, carry_late) = (
            x.unflatten(-3, (-1, 2)).unbind(-3) for x in (pairs, reads, keys, carry)
        )
        across = read_late @ key_early.transpose(-1, -2)
        upper = torch.cat([early, torch.zeros_like(early)], -1)
        pairs = torch.cat([upper, torch.cat([across, late], -1)], -2)
        reads = torch.cat([read_early, read_late @ carry_early], -2)
        keys = torch.cat([key_early @ carry_late.transpose(-1, -2), key_late], -2)
        carry = carry_late @ carry_early
    return Weights(*(x.squeeze(-3) for x in (pairs, reads, keys, carry)))


@implements("cascade", "mask")
def mask(call: CascadeCall) -> tuple[Tensor, Tensor]:
    """The quadratic form, one chunk of all tokens, for reading and teaching; its memory is quadratic in T."""
    return _chunks(call, max(1, call.op.q.shape[1]))


@implements("cascade", "chunked")
def chunked(call: CascadeCall) -> tuple[Tensor, Tensor]:
    """Matrix products inside chunks; the N states pass from chunk to chunk."""
    return _chunks(call, call.op.chunk_size)


def _native_limits(device: torch.device, call: CascadeCall | None) -> str | None:
    if call is not None and call.num_states > NATIVE_STATES:
        return f"native kernels take at most {NATIVE_STATES} states; got {call.num_states}"
    if call is not None and call.initial.dtype != torch.float32:
        return f"native kernels have states in float32, not in {str(call.initial.dtype).removeprefix('torch.')}"
    return native.unsupported(device, None if call is None else call.op)


@implements("cascade", "native", _native_limits)
def compiled(call: CascadeCall) -> tuple[Tensor, Tensor]:
    """The kernels of `linear_attention` and `delta_rule`, whose decay is that of csrc/cascade.cpp."""
    states = call.num_states
    whole = replace(call.op, g=changes(call.g, call.r), initial_state=call.initial.flatten(2, 3), op="cascade")
    o, final = native.run(whole)
    return o, final.unflatten(2, (states, -1))


def _chunks(call: CascadeCall, size: int) -> tuple[Tensor, Tensor]:
    """Each chunk writes `u = X − Y S`, where S are the states before it, X and Y are found for all chunks at once."""
    op, states, dtype = call.op, call.num_states, call.initial.dtype
    layout = make_layout(op.q.shape[1], size, op.cu_seqlens, op.device)
    every, chunks = slice(None), range(layout.num_chunks)
    if not chunks:
        return op.v.to(dtype), call.initial

    def blocks(*tensors: Tensor) -> Iterator[Tensor]:
        return (take_block(layout.align(x), every, chunks, layout.chunk, dtype) for x in tensors)

    q, k, v = blocks(op.q, op.k, op.v)
    (packed,) = blocks(
        (transitions(call.g, call.r) - torch.eye(states).to(call.g)).flatten(-2)
    )  # no change where there is no token
    found = weights(packed.unflatten(-1, (states, states)) + torch.eye(states).to(packed))
    read = _spread(q, found.reads)
    x, y = v, None
    if op.beta is not None:
        (beta,) = blocks(op.beta.unsqueeze(-1))
        inverse = unit_lower_inverse((beta * (k @ k.transpose(-1, -2)) * found.pairs).tril(-1))
        x, y = inverse @ (beta * v), inverse @ (beta * _spread(k, found.reads))
    written = _spread(k, found.keys).transpose(-1, -2)

    def step(c: int, state: Tensor) -> Tensor:
        u = x[:, :, c] if y is None else x[:, :, c] - y[:, :, c] @ state
        carried = torch.einsum("bhnm,bhmkv->bhnkv", found.carry[:, :, c], state.unflatten(2, (states, -1)))
        return carried.flatten(2, 3) + written[:, :, c] @ u

    initial = call.initial.flatten(2, 3)
    final = initial.clone()
    entering, _ = scan(step, initial[:0], layout, every, chunks, initial, final)
    u = x if y is None else x - y @ entering
    o = (q @ k.transpose(-1, -2) * found.pairs) @ u + read @ entering
    o = layout.restore(o.permute(0, 2, 3, 1, 4).flatten(1, 2)) * op.output_scale
    return o, final.unflatten(2, (states, -1))


def _spread(x: Tensor, factors: Tensor) -> Tensor:
    """`[…, C, K]` times `[…, C, N]` for each of N states: `[…, C, N·K]`."""
    return (factors.unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2)
