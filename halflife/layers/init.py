"""Initial values of linear maps.

A linear map is an `nn.Linear`, which starts by torch's law. Where a layer's maps start by another one, the layer has
`initial`, the laws by the maps' names, and its `reset_parameters` draws the whole layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import nn

Law = Callable[[nn.Linear], None]


@torch.no_grad()
def _draw_uniform(linear: nn.Linear, gain: float) -> None:
    bound = gain / math.sqrt(linear.in_features)
    drawn = torch.empty_like(linear.weight, dtype=torch.float32)
    linear.weight.copy_(drawn.uniform_(-bound, bound))


def uniform(gain: float) -> Law:
    """W uniform in ±`gain`/√D for D inputs; zero for gain 0. There is no bias."""
    return partial(_draw_uniform, gain=gain)


@torch.no_grad()
def orthogonal(linear: nn.Linear) -> None:
    """W orthonormal in its rows, or in its columns if there are fewer of them. There is no bias."""
    if not linear.weight.is_meta:
        linear.weight.copy_(nn.init.orthogonal_(torch.empty_like(linear.weight, dtype=torch.float32)))


def zero_bias(linear: nn.Linear) -> None:
    """torch's law for W, and a bias of zero."""
    linear.reset_parameters()
    nn.init.zeros_(linear.bias)


def drawn(inputs: int, outputs: int, law: Law, bias: bool = False) -> nn.Linear:
    """A linear map that starts by `law`."""
    with torch.device("meta"):
        linear = nn.Linear(inputs, outputs, bias=bias)
    linear.weight = nn.Parameter(torch.empty(outputs, inputs))  # `to_empty` fails with fake tensors
    if bias:
        linear.bias = nn.Parameter(torch.empty(outputs))
    law(linear)
    return linear


def reset(module: nn.Module, initial: Mapping[str, Law] | None = None) -> None:
    """Draw the parameters of all modules inside `module` again, in their order, parents first.

    Args:
        module: its own parameters stay as they are.
        initial: the laws of those of its maps that do not start by torch's.
    """
    for name, child in module.named_children():
        if initial and name in initial:
            initial[name](child)  # pyright: ignore[reportArgumentType] (the names are those of linear maps)
            continue
        if callable(draw := getattr(child, "reset_parameters", None)):
            draw()
        if not hasattr(child, "initial"):  # otherwise it has drawn its children too
            reset(child)
