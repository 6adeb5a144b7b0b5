"""Whether a layer keeps the contract of `Mixer`: causality, streaming, packing, padding, gradients, dtypes, meta."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from halflife.layers import LAYERS, Mixer, build
from halflife.layers.init import reset
from halflife.registry import taken

OFFERED = {"num_heads": 4, "chunk_size": 4}  # options that layers with this name get
LENGTH, CUTS = 24, (1, 7, 13)
TOLERANCE = 1e-4  # of outputs, relative to the largest; some parts of layers are float32
STEP, SLOPE = 1e-3, 1e-2  # of finite differences, and the tolerance of a slope, relative

Make = Callable[[], Mixer]


class Finding(NamedTuple):
    """The result of one check."""

    check: str  # what was checked
    fault: str  # what is wrong; "" if nothing is


def check_layer(
    name: str, *, hidden_size: int = 32, checks: Sequence[str] = (), options: Mapping[str, Any] | None = None
) -> list[Finding]:
    """Check a registered layer with random parameters, in float64: all of `CHECKS`, or those of `checks`.

    Without other `options` it has 4 heads and chunks of 4 tokens, as far as it takes these.
    """
    given = {**taken(LAYERS[name], OFFERED), **(options or {})}
    make = partial(_made, name, hidden_size, given)
    make()
    found = []
    for check in checks or CHECKS:
        try:
            fault = CHECKS[check](make, hidden_size)
        except Exception as error:  # whatever a user's layer raises is the finding
            fault = f"{type(error).__name__}: {' '.join(str(error).split())}"
        found.append(Finding(check, fault))
    return found


def _made(name: str, hidden_size: int, options: Mapping[str, Any]) -> Mixer:
    """The layer, whose parameters that start at 0 are random, because an output of 0 would pass every check."""
    torch.manual_seed(0)
    layer = build(name, hidden_size=hidden_size, **options).double().eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            if not parameter.is_meta and not parameter.any():
                parameter.normal_(std=0.1)
    return layer


def _inputs(hidden_size: int, length: int = LENGTH, seed: int = 1) -> Tensor:
    return torch.randn(2, length, hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _difference(got: Tensor, expected: Tensor) -> Tensor:
    """By how much outputs `[B, T, D]` differ at each token, relative to the largest; 0 within the tolerance."""
    apart = (got.double() - expected.double()).abs().amax((0, 2)) / expected.double().abs().max().clamp(min=1e-30)
    return torch.where(apart > TOLERANCE, apart, 0.0)


@torch.no_grad()
def _causality(make: Make, hidden_size: int) -> str:
    layer, x, at = make(), _inputs(hidden_size), CUTS[-1]
    other = torch.cat([x[:, :at], _inputs(hidden_size, LENGTH - at, seed=2)], 1)
    apart = _difference(layer(other)[0][:, :at], layer(x)[0][:, :at])
    if not apart.any():
        return ""
    return f"it looks ahead: the output at token {int(apart.nonzero()[0])} changes with the tokens from {at} on"


@torch.no_grad()
def _streaming(make: Make, hidden_size: int) -> str:
    layer, x, state, parts = make(), _inputs(hidden_size), None, []
    for piece in x.tensor_split(CUTS, 1):
        y, state = layer(piece, state)
        parts.append(y)
    apart = _difference(torch.cat(parts, 1), layer(x)[0])
    return f"read in pieces, the output differs from token {int(apart.nonzero()[0])} on" if apart.any() else ""


@torch.no_grad()
def _packing(make: Make, hidden_size: int) -> str:
    layer, x, cut = make(), _inputs(hidden_size)[:1], CUTS[1]
    packed, _ = layer(x, cu_seqlens=torch.tensor([0, cut, LENGTH]))
    apart = _difference(packed, torch.cat([layer(part)[0] for part in x.tensor_split([cut], 1)], 1))
    return f"beside another sequence, the output differs at token {int(apart.nonzero()[0])}" if apart.any() else ""


@torch.no_grad()
def _padding(make: Make, hidden_size: int) -> str:
    layer, x = make(), _inputs(hidden_size)
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, : CUTS[1]] = 0
    padded, _ = layer(x, attention_mask=mask)
    if padded[0, : CUTS[1]].any():
        return "the output at padding is not 0"
    alone = [layer(x[:1, CUTS[1] :])[0], layer(x[1:])[0]]
    apart = _difference(torch.cat([padded[:1, CUTS[1] :], padded[1:]], 1), torch.cat(alone, 1))
    return "beside padding, the output of a sequence differs" if apart.any() else ""


def _gradients(make: Make, hidden_size: int) -> str:
    layer, x, weights = make(), _inputs(hidden_size).requires_grad_(), _inputs(hidden_size, seed=3)
    (layer(x)[0] * weights).sum().backward()
    assert x.grad is not None
    if lost := [name for name, parameter in layer.named_parameters() if parameter.grad is None]:
        return f"no gradient reaches {', '.join(lost)}"
    along = _inputs(hidden_size, seed=4)
    with torch.no_grad():
        ends = [(layer(x + sign * STEP * along)[0] * weights).sum() for sign in (1, -1)]
    slope, expected = (x.grad * along).sum().item(), ((ends[0] - ends[1]) / (2 * STEP)).item()
    wrong = abs(slope - expected) > SLOPE * max(abs(expected), x.grad.norm().item())
    return f"the gradient of the input has slope {slope:.4g}, and finite differences {expected:.4g}" if wrong else ""


@torch.no_grad()
def _dtype(make: Make, hidden_size: int) -> str:
    y, state = make().to(torch.bfloat16)(_inputs(hidden_size).bfloat16())
    if y.dtype != torch.bfloat16:
        return f"inputs in bfloat16 give outputs in {str(y.dtype).removeprefix('torch.')}"
    if not all(part.isfinite().all() for part in (y, *state.values())):
        return "in bfloat16 a number is not finite"
    return ""


def _meta(make: Make, hidden_size: int) -> str:
    with torch.device("meta"):
        layer = make()
    if here := [name for name, part in _tensors(layer) if not part.is_meta]:
        return f"on the meta device {', '.join(here)} is elsewhere"
    layer.to_empty(device="cpu")
    with torch.no_grad():
        for _, part in _tensors(layer):
            part.fill_(torch.nan)
    reset(nn.ModuleList([layer]))
    lost = [name for name, part in _tensors(layer) if not part.isfinite().all()]
    return f"`reset_parameters` does not write {', '.join(lost)}" if lost else ""


def _tensors(layer: nn.Module) -> list[tuple[str, Tensor]]:
    return [*layer.named_parameters(), *layer.named_buffers()]


CHECKS: dict[str, Callable[[Make, int], str]] = {
    "causality": _causality, "streaming": _streaming, "packing": _packing, "padding": _padding,
    "gradients": _gradients, "dtype": _dtype, "meta device": _meta,
}  # fmt: skip


def check_imported(names: Sequence[str]) -> list[str]:
    """Check layers of users without their options, and return the faults that are no reason to refuse them.

    A layer that looks ahead is a ValueError, because it would learn from the tokens that it should predict.
    """
    faults = []
    for name in names:
        for check, fault in check_layer(name, checks=("causality", "streaming", "packing")):
            if fault.startswith("it looks ahead"):
                raise ValueError(f"layer {name} cannot be trained to predict: {fault}; see `halflife check`")
            if fault:
                faults.append(f"layer {name} fails the check of {check}: {fault}")
    return faults
