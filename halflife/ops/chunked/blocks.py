"""The walk over blocks of chunks that every chunked op shares, forward and backward.

A chunked op is matrix products inside chunks of C tokens. Only the state `[B, H, K, V]` passes from chunk to chunk.
The walk takes a few chunks at a time, a block, so that a block's C×C matrices stay in cache and memory is linear in T.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from halflife.ops.call import Call
from halflife.ops.chunked.decays import FLOOR, DecayGrads, make_decay
from halflife.ops.chunked.layout import Place, make_layout
from halflife.precision import without_autocast

Step = Callable[[int, Tensor], Tensor]  # a chunk of the block, and a state or its gradient → the next one


def scan(
    step: Step, state: Tensor, place: Place, initial: Tensor, final: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the states entering each chunk `[b, H, c, K, V]`, and the one leaving the block, by `step(c, state)`.

    A sequence that starts at a chunk takes its state from `initial [N, H, K, V]`. The state of a sequence that ends is
    written into `final [N, H, K, V]`, if it is given.
    """
    entering = []
    for c in range(len(place.chunks)):
        start = place.starting(c)
        state = state if start is None else initial[start]
        entering.append(state)
        state = step(c, state)
        end = place.ending(c)
        if end is not None and final is not None:
            final[end] = state
    return torch.stack(entering, 2), state


def scan_back(
    step: Step, grad: Tensor, place: Place, grad_initial: Tensor, grad_final: Tensor
) -> tuple[Tensor, Tensor]:
    """The reverse of `scan`: gradients of the states leaving each chunk `[b, H, c, K, V]` and entering the block."""
    leaving: list[Tensor] = []
    for c in reversed(range(len(place.chunks))):
        end = place.ending(c)
        grad = grad if end is None else grad_final[end]
        leaving.append(grad)
        grad = step(c, grad)
        start = place.starting(c)
        if start is not None:
            grad_initial[start] = grad
    return torch.stack(leaving[::-1], 2), grad


def add_product_(out: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Compute `out += x @ y` in place and in one pass; all three are `[b, H, c, …, …]`."""
    out.flatten(0, 2).baddbmm_(x.flatten(0, 2), y.flatten(0, 2))
    return out


def split_diagonal(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the matrix `[…, C, C]` with its diagonal set to 0 (in place), and the diagonal as a column `[…, C, 1]`."""
    diagonal = matrix.diagonal(dim1=-2, dim2=-1).clone().unsqueeze(-1)
    matrix.diagonal(dim1=-2, dim2=-1).zero_()
    return matrix, diagonal


def unit_lower_inverse(lower: Tensor) -> Tensor:
    """Compute `(I + L)⁻¹` for a strictly lower triangular `L [b, H, c, C, C]` by one triangular solve."""
    eye = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device).expand_as(lower)
    return torch.linalg.solve_triangular(lower, eye, upper=False, unitriangular=True)


class ChunkBlock:
    """A block of chunks of one op, computed in `dtype`. Its tensors are `[b, H, c, C, D]`.

    Of the op's aligned inputs, the queries come first, and the log-decay (or None) last.
    """

    decay_type: Callable[..., Any] = staticmethod(make_decay)  # makes the decay of a block from its log-decays

    def __init__(self, inputs: Sequence[Any], scale: float, dtype: torch.dtype, place: Place) -> None:
        self.place, self.scale = place, scale
        q, *others, g = inputs
        heads = others[1].shape[2]
        self.inputs = [place.take(x, dtype, heads) for x in others]
        self.g = None if g is None else place.take(g, dtype, heads)
        self.q = place.take(q, dtype, heads) * scale  # out of place, because a block may be a view of the input
        self.decay = self.decay_type(self.g, place.layout.chunk, len(place.chunks), dtype, q.device)

    def forward(self, state: Tensor, initial: Tensor, final: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs `[b, H, c, C, V]` and the state leaving the block; see `scan` for the arguments."""
        raise NotImplementedError

    def backward(
        self, do: Tensor, state: Tensor, initial: Tensor, dstate: Tensor, dinitial: Tensor, dfinal: Tensor
    ) -> tuple[list[Tensor | None], Tensor]:
        """Return the gradients of the inputs, in their order, and of the state entering the block.

        The gradients of the initial states of sequences that start in the block are written into `dinitial`.
        """
        raise NotImplementedError

    def log_grad(self, grads: DecayGrads, entering: Tensor, leaving: Tensor) -> Tensor | None:
        """Return the gradient of the log-decays (see `decays`), exactly 0 where the decay is 0; None without decay."""
        if self.g is None:
            return None
        return self.decay.log_grad(grads, entering, leaving).masked_fill_(self.g < FLOOR[entering.dtype], 0)


def run(block_type: type[ChunkBlock], inputs: Sequence[Tensor | None], call: Call) -> tuple[Tensor, Tensor]:
    """Run a chunked op on the tensors of `call` that its blocks take, `q, k, v, …, g`, each `[B, T, H or G, …]`.

    Returns the outputs `[B, T, H, V]` and the final states `[N, H, num_states · K, V]`. The op can be differentiated
    once in every input.
    """
    layout = make_layout(call.packing, call.chunk_size, call.device)
    aligned = (None if x is None else layout.align(x) for x in inputs)
    o, state = _ChunkedOp.apply(block_type, call.output_scale, layout, call.num_states, call.first_state(), *aligned)
    return layout.restore(o), state


class _ChunkedOp(torch.autograd.Function):
    """The walk over all blocks. It saves the inputs and the state entering each block, and recomputes the rest."""

    @staticmethod
    def forward(ctx, block_type, scale, layout, num_states, initial, *inputs):
        v = inputs[2]
        o, final, borders, state = torch.empty_like(v), initial.clone(), [], initial[:0]
        for place in layout.blocks(v.shape[0], v.shape[2], v.device, num_states):
            borders.append(state)
            part, state = block_type(inputs, scale, initial.dtype, place).forward(state, initial, final)
            place.put(o, part)
        ctx.save_for_backward(initial, *inputs, *borders)
        ctx.settings, ctx.count = (block_type, scale, layout, num_states), len(inputs)
        return o, final

    @staticmethod
    def backward(ctx, do, dfinal):
        if torch.is_grad_enabled():  # only under create_graph=True, for which the saved states are constants
            raise RuntimeError("second derivatives (create_graph=True) need backend='reference'")
        block_type, scale, layout, num_states = ctx.settings
        initial, *saved = ctx.saved_tensors
        inputs, borders = saved[: ctx.count], saved[ctx.count :]
        grads = [None if x is None else torch.empty_like(x) for x in inputs]
        dinitial, dstate = dfinal.clone(), dfinal[:0]
        places = list(layout.blocks(do.shape[0], do.shape[2], do.device, num_states))
        with without_autocast(do.device):
            for place, state in zip(reversed(places), reversed(borders), strict=True):
                block = block_type(inputs, scale, initial.dtype, place)
                dob = place.take(do, initial.dtype, do.shape[2])
                parts, dstate = block.backward(dob, state, initial, dstate, dinitial, dfinal)
                for out, part in zip(grads, parts, strict=True):
                    if out is not None and part is not None:
                        place.put(out, part)
        return None, None, None, None, dinitial, *grads
