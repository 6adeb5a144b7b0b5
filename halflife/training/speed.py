"""How fast a training runs, and how much of what the machine could do."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from halflife.models import LanguageModel

GEMM = 2048  # rows of the square matrices that measure the machine


@dataclass(frozen=True)
class Speed:
    """What a step is measured against.

    Attributes:
        tokens: of a step, of all processes.
        operations: of a token, forward and backward: floating-point operations that the model needs.
        rate: operations a second that the matrix products of all processes' devices reach together.
    """

    tokens: int
    operations: float
    rate: float

    def of(self, seconds: float) -> dict[str, float]:
        """Tokens a second of a step of so many seconds, and the share of the machine's rate (MFU)."""
        per_second = self.tokens / seconds
        return {"tokens_per_second": per_second, "mfu": per_second * self.operations / self.rate}


@torch.no_grad()
def operations(model: LanguageModel, length: int) -> float:
    """Operations of a token in training on `length` tokens: thrice those of the forward pass, which torch counts.

    They are counted over 128 and 256 tokens and carried on in a line: for each token, a recurrence does the same at
    every length, and softmax attention more for every token before. What is computed anew in the backward pass is work
    but no use and is not counted; nor are elementwise operations.
    """

    def count(tokens: int) -> float:
        ids = torch.zeros(1, tokens, dtype=torch.long, device=model.embedding.weight.device)
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:  # it misses the CPU's fused one
            model(ids)
        return counter.get_total_flops() / tokens

    short, long = count(128), count(256)
    return 3 * (short + (long - short) * (length - 128) / 128)


def gemm_rate(device: torch.device, dtype: torch.dtype, repetitions: int = 5) -> float:
    """Operations a second of a large matrix product on this device: what a model could reach at best."""
    a = torch.randn(GEMM, GEMM, device=device, dtype=dtype)
    seconds = []
    for _ in range(repetitions + 1):
        began = time.perf_counter()
        torch.mm(a, a)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return 2 * GEMM**3 / median(seconds[1:])
