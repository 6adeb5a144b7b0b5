"""Rows of model states: stacked into a batch, taken out of it, measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from halflife.models.lm import ModelState


def form(state: ModelState) -> tuple:
    """Return what two states must share so that they can be rows of one batch: names, shapes of a row and dtypes."""
    return tuple(tuple((name, x.shape[1:], x.dtype) for name, x in layer.items()) for layer in state)


def stack(states: Sequence[ModelState]) -> ModelState:
    """Return one state with the rows of all `states`, which have one form."""
    if len(states) == 1:
        return states[0]
    layers = zip(*states, strict=True)
    return tuple({name: torch.cat([layer[name] for layer in same]) for name in same[0]} for same in layers)


def select(state: ModelState, rows: Sequence[int]) -> ModelState:
    """Return the rows `rows` of a state, in this order."""
    index = torch.tensor(rows, device=state[0]["position"].device)
    return changed(state, lambda x: x.index_select(0, index))


def size(state: ModelState) -> int:
    """Return the bytes that a state keeps in memory; memory that several tensors share counts once."""
    memory = [x.untyped_storage() for layer in state for x in layer.values()]
    return sum({part.data_ptr(): part.nbytes() for part in memory}.values())


def changed(state: ModelState, change: Callable[[Tensor], Tensor]) -> ModelState:
    """Return the state with `change` applied to each tensor, once where layers share one."""
    shared = {id(x): x for layer in state for x in layer.values()}
    new = {key: change(x) for key, x in shared.items()}
    return tuple({name: new[id(x)] for name, x in layer.items()} for layer in state)
