"""Sums of partial gradients, of several tensors by one launch: those of the heads of a group, and of blocks of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from halflife.ops.backends.triton.launch import launch

MOST = 6  # tensors of a launch
BLOCK = 256  # entries of a program


@triton.jit
@no_type_check
def _sum(x, out, entries, inner, parts, BLOCK: tl.constexpr):
    if x is not None:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < entries
        first = x + (at // inner) * parts * inner + at % inner
        total = tl.zeros([BLOCK], tl.float32)
        for part in range(parts):
            total += tl.load(first + part * inner, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def _parts_kernel(
    x0, x1, x2, x3, x4, x5, out0, out1, out2, out3, out4, out5, n0, n1, n2, n3, n4, n5, inner0, inner1, inner2, inner3,
    inner4, inner5, p0, p1, p2, p3, p4, p5, BLOCK: tl.constexpr,
):  # fmt: skip
    which = tl.program_id(1)
    if which == 0:
        _sum(x0, out0, n0, inner0, p0, BLOCK)
    if which == 1:
        _sum(x1, out1, n1, inner1, p1, BLOCK)
    if which == 2:
        _sum(x2, out2, n2, inner2, p2, BLOCK)
    if which == 3:
        _sum(x3, out3, n3, inner3, p3, BLOCK)
    if which == 4:
        _sum(x4, out4, n4, inner4, p4, BLOCK)
    if which == 5:
        _sum(x5, out5, n5, inner5, p5, BLOCK)


def sums_of_parts(*given: tuple[Tensor | None, Tensor | None, int]) -> list[Tensor | None]:
    """Sum parts `[outer, parts, inner]` to the shape and dtype of a tensor, for up to 6 `(parts, tensor, inner)`.

    Both are contiguous. One part is no sum, and None stays None.
    """
    found: list[Tensor | None] = []
    tasks: list[tuple[Tensor, Tensor, int]] = []
    for x, like, inner in given:
        if x is None or like is None:
            found.append(None)
        elif x.numel() == like.numel():
            found.append(x.view(like.shape).to(like.dtype))
        else:
            out = like.new_empty(like.shape)
            found.append(out)
            tasks.append((x, out, inner))
    tasks = [task for task in tasks if task[1].numel()]
    if all(out.numel() == inner for _, out, inner in tasks):  # blocks of rows alone, which torch adds as fast
        for x, out, inner in tasks:
            torch.sum(x.view(-1, inner), 0, out=out.view(-1))
    else:
        _launch(tasks)
    return found


def _launch(tasks: Sequence[tuple[Tensor, Tensor, int]]) -> None:
    most = max(out.numel() for _, out, _ in tasks)
    rows = [(x, out, out.numel(), inner, x.numel() // out.numel()) for x, out, inner in tasks]
    rows += [(None, None, 1, 1, 1)] * (MOST - len(rows))
    launch(_parts_kernel, (triton.cdiv(most, BLOCK), len(tasks)))(
        *[x for column in zip(*rows, strict=True) for x in column], BLOCK=BLOCK
    )
