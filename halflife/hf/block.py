"""A block that transformers can run again in the backward pass."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from halflife.layers import Shared, SharedTensors, State
from halflife.models.lm import Block
from halflife.packing import Packing


class _Names:
    """The names of the tensors that stand, in this order, in one flat tuple."""

    after: _Names  # the names of the results, which the block writes here. Hooks of accelerate copy lists and dicts.

    def __init__(self, state: State | None, shared: Shared) -> None:
        self.state, self.shared = None if state is None else [*state], [*shared]

    def split(self, tensors: tuple[Tensor, ...]) -> tuple[State | None, Shared]:
        count = 0 if self.state is None else len(self.state)
        state = None if self.state is None else dict(zip(self.state, tensors[:count], strict=True))
        return state, SharedTensors(dict(zip(self.shared, tensors[count:], strict=True)))


class HalflifeBlock(GradientCheckpointingLayer, Block):
    """A `Block` whose tensors are positional arguments and results.

    The reentrant kind of gradient checkpointing follows no others, so it would lose the gradients of tensors that one
    layer passes to another.
    """

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x: Tensor, *tensors: Tensor, names: _Names, packing: Packing
    ) -> tuple[Tensor, ...]:
        """Run the block on `x [B, T, D]` and the named `tensors`; the results after the first one are named as well."""
        state, shared = names.split(tensors)
        y, new = super().forward(x, state, packing, shared)
        names.after = _Names(new, shared)
        return y, *new.values(), *shared.values()


def as_kind(block: Block, kind: type[Block]) -> Any:
    """A block of another class with the parts of `block`."""
    new: Any = copy.copy(block)  # the two share the dict of their parts
    new.__class__ = kind
    return new


def run(block: nn.Module, x: Tensor, state: State | None, packing: Packing, shared: Shared) -> tuple[Tensor, State]:
    """Run a `HalflifeBlock` as one runs a `Block`."""
    names = _Names(state, shared)
    y, *tensors = block(x, *(state or {}).values(), *shared.values(), names=names, packing=packing)
    new, common = names.after.split(tuple(tensors))
    assert new is not None
    shared.update(common)
    return y, new
