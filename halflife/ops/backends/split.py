"""Parts of a tensor whose gradients lie beside each other in memory from the start.

Autograd joins the gradients of parts by one more pass over all of them. Here a kernel that computes the gradient of a
part asks for its memory (`new_gradient`), and is given a slice of the gradient of the whole tensor. What other ops give
is copied there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halflife.ops.arguments import is_transformed


def split(x: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """`x.split(sizes, -1)`, on a GPU with gradients that lie beside each other."""
    plain = x.is_cpu or torch.compiler.is_compiling() or is_transformed() or not torch.is_grad_enabled()
    return x.split(sizes, -1) if plain or not x.requires_grad else Split.apply(x, sizes)  # pyright: ignore


def split_silu(x: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """`x.split(sizes, -1)` with SiLU of all parts but the last one, on a GPU in one pass."""
    if x.is_cpu or torch.compiler.is_compiling():
        *parts, last = x.split(sizes, -1)
        return [*[F.silu(part) for part in parts], last]
    *sizes, size = sizes
    first, last = split(x, [sum(sizes), size])
    return [*split(F.silu(first) if _place_of(first) is None else Silu.apply(first), sizes), last]  # pyright: ignore


def new_gradient(x: Tensor) -> Tensor:
    """Memory for the gradient of x: a slice of that of the tensor it is a part of, or new and contiguous."""
    if (place := _place_of(x)) is None:
        return x.new_empty(x.shape)
    slot = place[0].take(place[1])
    if slot.shape[:2] != x.shape[:2]:
        return slot.reshape(x.shape)
    heads = x.new_empty(x.shape[2:], device="meta").stride()  # a view may change the stride of a single token
    return slot.as_strided(x.shape, (*slot.stride()[:2], *heads))


def _place_of(x: Tensor) -> tuple[Neighbours, int] | None:
    """The neighbours of x, or of what it is a view of, and its place, if a function that knows them made it."""
    made_by, place = x.grad_fn, x.output_nr
    while made_by is not None and made_by.name() == "ViewBackward0":
        made_by, place = made_by.next_functions[0]
    neighbours = getattr(made_by, "neighbours", None)
    return None if neighbours is None else (neighbours, place)


class Split(torch.autograd.Function):
    """`x.split(sizes, -1)`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
        ctx.neighbours = Neighbours(x, sizes)
        ctx.set_materialize_grads(False)
        return x.split(sizes, -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None]:
        return ctx.neighbours.joined(grads), None


class Silu(torch.autograd.Function):
    """`silu(x)` of a part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.silu(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # under create_graph=True
            return dy * x.sigmoid() * (1 + x * (-x).sigmoid())
        return torch.ops.aten.silu_backward.grad_input(dy, x, grad_input=new_gradient(x))


class Neighbours:
    """Memory for the gradients of the parts of x, which have `sizes` channels each.

    A backward pass may run twice, or end before it reaches x. So memory that was taken is not given again, and is
    returned only if all that was taken of it came back.
    """

    def __init__(self, x: Tensor, sizes: Sequence[int]) -> None:
        self.sizes, self.outer = [*sizes], _place_of(x)
        self.shape, self.options = x.shape, {"dtype": x.dtype, "device": x.device}
        self.memory: Tensor | None = None
        self.taken: set[int] = set()

    def new(self) -> Tensor:
        return torch.empty(self.shape, **self.options) if self.outer is None else self.outer[0].take(self.outer[1])

    def take(self, place: int) -> Tensor:
        """Memory for the gradient of the part at this place."""
        if self.memory is None or place in self.taken:
            self.memory, self.taken = self.new(), set()
        self.taken.add(place)
        return self.memory.split(self.sizes, -1)[place]

    def joined(self, grads: Sequence[Tensor | None]) -> Tensor:
        """The gradient of x."""
        memory, taken = self.memory, self.taken
        self.memory, self.taken = None, set()
        given = [
            torch.zeros(*self.shape[:-1], size, **self.options) if d is None else d
            for d, size in zip(grads, self.sizes, strict=True)
        ]
        if torch.is_grad_enabled():  # under create_graph=True
            return torch.cat(given, -1)
        if (whole := beside(given, -1)) is not None:
            return whole
        there: list[bool] = []
        if memory is not None:
            there = [is_at(d, slot) for d, slot in zip(given, memory.split(self.sizes, -1), strict=True)]
        kept = sum(size for size, known in zip(self.sizes, there, strict=False) if known)
        little = kept * 8 < sum(self.sizes) and self.outer is None  # one launch copies all, and two what is around it
        if memory is None or little or not all(there[place] for place in taken):
            memory, there = self.new(), [False] * len(given)
        end, waiting = 0, []
        for d, known, size in zip([*given, None], [*there, True], [*self.sizes, 0], strict=True):
            if known and waiting:  # one launch copies those that are neighbours
                torch.cat(waiting, -1, out=memory[..., end - sum(x.shape[-1] for x in waiting) : end])
                waiting = []
            waiting += [] if known or d is None else [d]
            end += size
        return memory


def is_at(x: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same memory."""
    same = x.untyped_storage()._cdata == other.untyped_storage()._cdata and x.storage_offset() == other.storage_offset()
    return same and x.shape == other.shape and x.stride() == other.stride() and x.dtype == other.dtype


def beside(parts: Sequence[Tensor], dim: int) -> Tensor | None:
    """The parts along the first or last axis as one tensor where they lie beside each other in memory, else None."""
    first, size = parts[0], sum(part.shape[dim] for part in parts)
    shape = [size, *first.shape[1:]] if dim == 0 else [*first.shape[:-1], size]
    strides, at = [1], first.storage_offset()
    for length in shape[:0:-1]:
        strides.insert(0, length * strides[0])
    for part in parts:
        shared = part.untyped_storage()._cdata == first.untyped_storage()._cdata and part.storage_offset() == at
        if not shared or list(part.stride()) != strides:
            return None
        at += part.shape[dim] * strides[dim]
    return first.as_strided(shape, strides)


def neighbours(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Empty tensors of these shapes in one piece of memory, each where a product reads it fast."""
    starts, end = [], 0
    for x in tensors:
        starts.append(end)
        end += -(-x.numel() // 8) * 8  # 16 bytes
    memory = torch.empty(end, dtype=dtype, device=tensors[0].device if tensors else None)
    return [memory[start : start + x.numel()].view(x.shape) for start, x in zip(starts, tensors, strict=True)]


class Cast(torch.autograd.Function):
    """Copies of tensors of one dtype in another, or in their own, which lie beside each other."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
        copies = _copied(neighbours(tensors, dtype), tensors)
        ctx.mark_non_differentiable(*[y for x, y in zip(tensors, copies, strict=True) if not x.requires_grad])
        ctx.set_materialize_grads(False)
        ctx.dtypes = dtype, tensors[0].dtype if tensors else dtype
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        dtype, wanted = ctx.dtypes
        if dtype == wanted:
            return None, *grads
        if torch.is_grad_enabled():  # under create_graph=True
            return None, *[None if d is None else d.to(wanted) for d in grads]
        given = [d for d in grads if d is not None]
        wide = iter(_copied([torch.empty_like(d, dtype=wanted) for d in given], given))
        return None, *[None if d is None else next(wide) for d in grads]


def _copied(copies: list[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    if copies:
        torch._foreach_copy_(copies, list(tensors))  # pyright: ignore[reportPrivateImportUsage]
    return copies
