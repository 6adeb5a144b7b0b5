"""The speed of training, in tokens per second and as a share of the rate that the machine can reach."""

from __future__ import annotations

import ctypes
import os
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from halflife.ops.backends.widened import times

GEMM_ROWS = 2048  # of the square matrices of `gemm_rate`
GEMM_SECONDS = 0.5  # of one product at most; twice the rows take eight times as long
GEMM_REPETITIONS = 5

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
    """Converts the duration of a step into rates."""

    tokens: int  # the tokens of a step, over all processes
    operations: float  # floating-point operations of the forward and backward pass, per token
    rate: float  # operations per second that matrix products reach at most on the devices of all processes together

    def of(self, seconds: float) -> dict[str, float]:
        """Tokens per second, and the share of `rate` (MFU), when a step takes `seconds`."""
        per_second = self.tokens / seconds
        return {"tokens_per_second": per_second, "mfu": per_second * self.operations / self.rate}


class StepTimes:
    """The durations of steps; of a GPU by its own clock, because the host only launches a step and runs ahead."""

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._start: Any = None
        self._running: deque[tuple[Any, Any]] = deque()  # events around the steps that a GPU may not have done yet

    def begin(self, device: torch.device) -> None:
        self._start = _event() if device.type == "cuda" else time.perf_counter()

    def end(self) -> None:
        if isinstance(self._start, float):
            self._seconds.append(time.perf_counter() - self._start)
        else:
            self._running.append((self._start, _event()))

    def seconds(self) -> list[float]:
        """The duration of every step that is done, without waiting for the others."""
        while self._running and self._running[0][1].query():
            start, end = self._running.popleft()
            self._seconds.append(start.elapsed_time(end) / 1000)
        return self._seconds


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def peak_rate(device: torch.device, bf16: bool) -> float:
    """The highest operations per second that large matrix products reach, which no training exceeds.

    It is the fastest of several products: others may use the machine during one. Mixed precision counts against float32
    too where that is faster, because kernels compute in float32 on CPUs without instructions for bfloat16.
    """
    dtypes = (torch.float32, torch.bfloat16) if bf16 else (torch.float32,)
    return max(gemm_rate(device, dtype, of=max) for dtype in dtypes)


def gemm_rate(
    device: torch.device, dtype: torch.dtype, largest: int = GEMM_ROWS, of: Callable[[Iterable[float]], float] = median
) -> float:
    """Operations per second of a large matrix product on this device.

    Args:
        of: which of the rates of several products counts.
        largest: rows of the matrices; fewer where a product takes longer than `GEMM_SECONDS`.
    """

    def product(rows: int) -> float:
        a = torch.randn(rows, rows, device=device, dtype=dtype)
        start = time.perf_counter()
        times(a, a)
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return time.perf_counter() - start

    rows = min(256, largest)
    product(rows)  # the first one also initializes the device
    while rows < largest and product(rows) < GEMM_SECONDS / 8:
        rows *= 2
    return of(2 * rows**3 / product(rows) for _ in range(GEMM_REPETITIONS))


def bf16_speedup(device: torch.device) -> float:
    """The rate of a matrix product in bfloat16, divided by that in float32."""
    return gemm_rate(device, torch.bfloat16, 256) / gemm_rate(device, torch.float32, 256)
