"""The speed of training, in tokens per second and as a share of the rate that the machine can reach."""

from __future__ import annotations

import ctypes
import os
import time
from dataclasses import dataclass
from statistics import median

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from halflife.models import LanguageModel
from halflife.ops.backends import native

GEMM = 2048  # rows of the square matrices of `gemm_rate`
PRODUCT = 0.5  # seconds of one product at most; twice the rows take eight times as long


_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # parameters of mallopt(3)


def keep_freed_memory() -> bool:
    """Let this process keep the memory that it frees, for its next tensors; return whether it does now.

    By default glibc returns large tensors to the kernel, which must clear every page before it hands it out again. A
    step of training frees as much as the next step needs, so on a CPU this took up to a quarter of its time
    (docs/native.md). The resident memory grows by about a fifth. Nothing changes without glibc, or where the
    environment has settings for it (`MALLOC_…` or `GLIBC_TUNABLES`).
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library or another system
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, 2**31 - 1) and mallopt(_M_MMAP_MAX, 0))


@dataclass(frozen=True)
class Speed:
    """Converts the duration of a step into rates.

    Attributes:
        tokens: the tokens of a step, over all processes.
        operations: floating-point operations of the forward and backward pass, per token.
        rate: operations per second that matrix products reach on the devices of all processes together.
    """

    tokens: int
    operations: float
    rate: float

    def of(self, seconds: float) -> dict[str, float]:
        """Tokens per second, and the share of `rate` (MFU), when a step takes `seconds`."""
        per_second = self.tokens / seconds
        return {"tokens_per_second": per_second, "mfu": per_second * self.operations / self.rate}


@torch.no_grad()
def operations(model: LanguageModel, length: int) -> float:
    """Floating-point operations per token in training on `length` tokens, three times those of the forward pass.

    torch counts the forward pass on 128 and on 256 tokens, and the count per token is extrapolated linearly: it is
    constant for a recurrence, and grows linearly with the length for softmax attention. Recomputed activations and
    elementwise operations are not counted.
    """

    def count(tokens: int) -> float:
        ids = torch.zeros(1, tokens, dtype=torch.long, device=model.embedding.weight.device)
        # The counter knows neither torch's fused CPU kernel of attention nor our native kernels.
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False, custom_mapping=native.formulas()) as counter:
            model(ids)
        return counter.get_total_flops() / tokens

    short, long = count(128), count(256)
    return 3 * (short + (long - short) * (length - 128) / 128)


def gemm_rate(device: torch.device, dtype: torch.dtype, largest: int = GEMM, repetitions: int = 5) -> float:
    """Operations per second of a large matrix product on this device, an upper bound for a model.

    Args:
        largest: rows of the matrices, fewer where a product takes longer than `PRODUCT`: bfloat16 is a hundred times
            slower than float32 on CPUs without instructions for it.
        repetitions: products of which the median counts.
    """

    def product(rows: int) -> float:
        a = torch.randn(rows, rows, device=device, dtype=dtype)
        start = time.perf_counter()
        torch.mm(a, a)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    rows = min(256, largest)
    product(rows)  # the first one also initializes the device
    while rows < largest and product(rows) < PRODUCT / 8:
        rows *= 2
    return 2 * rows**3 / median(product(rows) for _ in range(repetitions))


def bf16_slowdown(device: torch.device) -> float:
    """How many times as long as in float32 a matrix product takes in bfloat16, below 1 where it is faster."""
    return gemm_rate(device, torch.float32, 256) / gemm_rate(device, torch.bfloat16, 256)
