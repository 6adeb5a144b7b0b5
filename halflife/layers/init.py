"""Linear maps that start in their own way."""

from __future__ import annotations

import math

import torch
from torch import nn


class UniformLinear(nn.Linear):
    """`x W`, W uniform within ±`gain`/√D of D inputs; gain 0 starts it at zero."""

    def __init__(self, inputs: int, outputs: int, gain: float) -> None:
        self.bound = gain / math.sqrt(inputs)  # nn.Linear resets itself at once
        super().__init__(inputs, outputs, bias=False)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        drawn = torch.empty_like(self.weight, dtype=torch.float32)
        self.weight.copy_(drawn.uniform_(-self.bound, self.bound))


class OrthogonalLinear(nn.Linear):
    """`x W`, W with orthonormal rows, or columns where those are fewer."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            self.weight.copy_(nn.init.orthogonal_(torch.empty_like(self.weight, dtype=torch.float32)))
