"""The channel mixer: SwiGLU."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class SwiGLU(nn.Module):
    """`(silu(x W_gate) ⊙ x W_up) W_down` (Shazeer 2020).

    Args:
        hidden_size: D.
        intermediate_size: width inside; None means 8/3 D, rounded up to a multiple of 64.
    """

    def __init__(self, hidden_size: int, intermediate_size: int | None = None) -> None:
        super().__init__()
        width = intermediate_size or -(-8 * hidden_size // 3 // 64) * 64
        self.gate = nn.Linear(hidden_size, width, bias=False)
        self.up = nn.Linear(hidden_size, width, bias=False)
        self.down = nn.Linear(width, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))
