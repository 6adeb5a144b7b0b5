"""The real-gated linear recurrent unit (RG-LRU) of RecurrentGemma (https://arxiv.org/abs/2402.19427)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from halflife.analysis.foreign.mixer_decay import MIXERS, MixerDecay

GATE_POWER = 8.0  # c of the paper, a constant in transformers too


@MIXERS.add("RecurrentGemmaRecurrentBlock")
class RGLRUDecay(MixerDecay):
    """One decay per channel, `g = −8 · σ(W_a x + b_a) · softplus(Λ)`. A head is a block of W_a.

    At position 0 the unit resets its state. The first g of a text is the gate's value nevertheless.
    """

    family = "RG-LRU"
    granularity = "vector"
    source_name = "rg_lru"

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.source.num_attention_heads, self.source.block_width)  # pyright: ignore

    def forward(self, x: Tensor, y: Tensor | None) -> Tensor:
        unit: Any = self.source
        gate = torch.einsum("bthk, hkl -> bthl", x.unflatten(-1, self.shape), unit.recurrent_gate_weight)
        gate = (gate + unit.recurrent_gate_bias).float().sigmoid()
        return -GATE_POWER * gate * nn.functional.softplus(unit.recurrent_param.float()).view(self.shape)

    @torch.no_grad()
    def at_rest(self) -> Tensor:
        """Return g where the unit reads zeros. Calling the unit would change its state."""
        weight: Tensor = self.source.recurrent_gate_weight  # pyright: ignore
        return self.forward(weight.new_zeros(1, 1, weight.shape[0] * weight.shape[1]), None).view(self.shape)

    @contextmanager
    def observed(self) -> Iterator[None]:
        """As in the parent class. Moreover, the convolution goes on from the previous window.

        The block of transformers carries the state of the unit between calls, but the convolution's state only when it
        reads single tokens. Here the last inputs of a window precede the next window.
        """
        conv: nn.Conv1d = self.mixer.conv_1d
        memory = conv.kernel_size[0] - 1
        last: list[Tensor] = []

        def before(module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
            past = last.pop() if last else inputs[0].new_zeros(*inputs[0].shape[:2], memory)
            joined = torch.cat([past, inputs[0]], -1)
            last.append(joined[..., joined.shape[-1] - memory :])
            return (joined,)

        def after(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
            return output[..., memory:]

        with super().observed(), conv.register_forward_pre_hook(before), conv.register_forward_hook(after):
            yield
