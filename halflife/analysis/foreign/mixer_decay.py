"""The contract of a mixer of transformers: which of its modules shows the decay, and what the decay is there.

A new mixer is one class in `families.py`, a subclass of `MixerDecay` that is registered under the mixer's class names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from halflife.registry import Registry

MIXERS: Registry[type[MixerDecay]] = Registry("class of a mixer")


class MixerDecay(nn.Module):
    """The log-decays g = log λ ≤ 0 of one mixer of transformers, `[B, T, H]` or `[B, T, H, K]`, in float32.

    A subclass names its `family`, and the `granularity` of its decay. `source_name` is the name of its `source`, and
    `sizes` are the names of the mixer's numbers that `shape` has. `key_axis` is the axis of the keys in the state
    `[B, H, …, …]` that transformers caches, -2 or -1. It is None if the state is no matrix that tokens write to
    linearly, or lies outside the cache. Then there is no forecast.

    The mixer stays as it is. While `observed` is open, a hook on one of its modules, the `source`, calls this module
    with what the source read and returned. `halflife.analysis.capture` takes g from this call, as it takes g from the
    decays of our models. The attributes have the meaning that they have in `halflife.decay.Decay`.
    """

    family: ClassVar[str]
    granularity: ClassVar[str] = "scalar"
    source_name: ClassVar[str]
    sizes: ClassVar[tuple[str, ...]] = ("num_heads",)
    key_axis: ClassVar[int | None] = None

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.mixer: Any = mixer

    @property
    def source(self) -> nn.Module:
        """The module of the mixer whose input or output determines g. The mixer calls it once for each text."""
        return getattr(self.mixer, self.source_name)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one token's log-decays: `(H,)` or `(H, K)`."""
        return tuple(getattr(self.mixer, name) for name in self.sizes)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return g from the source's input x and output y, `[B, T, …]`."""
        raise NotImplementedError

    @property
    def num_heads(self) -> int:
        """H."""
        return self.shape[0]

    @torch.no_grad()
    def at_rest(self) -> Tensor:
        """Return g where the input of the layer is zero, in `shape`."""
        width = int(getattr(self.source, "in_features", 0)) or int(self.mixer.hidden_size)
        x = next(self.source.parameters()).new_zeros(1, 1, width)
        return self.forward(x, self.source(x)).view(self.shape)

    def timescales(self, position: float = 1) -> Tensor:
        """Return the tokens in which each channel decays by 1/e at zero input, in `shape`. No position changes them."""
        return -1 / self.at_rest()

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Call this module with each input and output of the source while the context is open."""

        def after(module: nn.Module, inputs: tuple[Tensor, ...], options: dict[str, Tensor], output: Tensor) -> None:
            self(inputs[0] if inputs else next(iter(options.values())), output)

        with self.source.register_forward_hook(after, with_kwargs=True):
            yield


def softplus_decay(A_log: Tensor, step: Tensor, limits: tuple[float, float] = (0.0, math.inf)) -> Tensor:
    """Return `g = −e^A_log · clamp(softplus(step))`, the law of Mamba-2 and Gated DeltaNet, in float32."""
    return -A_log.float().exp() * nn.functional.softplus(step.float()).clamp(*limits)
