"""Which library multiplies float32 matrices faster on this CPU: torch's own (MKL), or oneDNN.

MKL takes a slow path on CPUs of some makers. `measure` is called once, by a build of the kernels.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from halflife.ops.backends.native import by_onednn

TOKENS, INPUTS, OUTPUTS = 1024, 256, 768  # sizes of the products that are timed
TIMING_ROUNDS = 7
LEAST_SPEEDUP = 1.1  # oneDNN must be faster by this factor


def measure() -> dict[str, bool]:
    """Return for each product of a linear map, forward and backward, whether oneDNN is clearly faster."""
    if not torch.backends.mkldnn.is_available():
        return dict.fromkeys(("forward", "input", "weight"), False)
    x, weight, dy = torch.randn(TOKENS, INPUTS), torch.randn(OUTPUTS, INPUTS), torch.randn(TOKENS, OUTPUTS)
    pairs: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]] = {
        "forward": (lambda: x @ weight.t(), lambda: by_onednn(x, weight)),
        "input": (lambda: dy @ weight, lambda: by_onednn(dy, weight.t())),
        "weight": (lambda: dy.t() @ x, lambda: by_onednn(dy.t(), x.t())),
    }
    best = {(name, i): float("inf") for name in pairs for i in (0, 1)}
    for _ in range(TIMING_ROUNDS):
        for name, i in best:
            start = time.perf_counter()
            pairs[name][i]()
            best[name, i] = min(best[name, i], time.perf_counter() - start)
    return {name: best[name, 0] > LEAST_SPEEDUP * best[name, 1] for name in pairs}
