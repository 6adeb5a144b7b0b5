"""Linear maps, some with special initial weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from halflife.ops.linear import linear


class Linear(nn.Linear):
    """`nn.Linear` with `ops.linear`, the faster of two libraries in float32."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


class UniformLinear(Linear):
    """`x W` with initial W uniform in ±`gain`/√D for D inputs. With gain 0, W starts at zero."""

    def __init__(self, inputs: int, outputs: int, gain: float) -> None:
        self.bound = gain / math.sqrt(inputs)  # before the base class's constructor, which calls reset_parameters
        super().__init__(inputs, outputs, bias=False)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        drawn = torch.empty_like(self.weight, dtype=torch.float32)
        self.weight.copy_(drawn.uniform_(-self.bound, self.bound))


class OrthogonalLinear(Linear):
    """`x W` with initial W orthonormal in its rows, or in its columns if there are fewer of them."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            self.weight.copy_(nn.init.orthogonal_(torch.empty_like(self.weight, dtype=torch.float32)))
