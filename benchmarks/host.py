"""The processor's time that a host needs to launch a layer of a training step, forward and backward: `host.py mamba2`.

The choices are those of a GPU, kernels are not launched, and products of torch are small. What remains is Python's and
autograd's part, to which a GPU adds some microseconds a launch. Small models on a fast GPU wait for it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"

import offline_models
import torch

from halflife import LanguageModel, preset
from halflife.ops import arguments, call
from halflife.ops.backends import triton

MODELS = ("mamba2", "mamba2+post+gate_rank", "gated_deltanet", "gla", "rwkv7", "llama")
STEPS = 40


def nothing(*given: object, **options: object) -> None:
    """In the place of a launch and of a check."""


def launch(kernel: object, grid: object) -> Callable[..., None]:
    return nothing


@contextlib.contextmanager
def without_launches() -> Iterator[None]:
    """Inside this block models run as on a GPU, and no kernel computes. Log-decays without values are not checked."""
    triton.load()
    with contextlib.ExitStack() as stack:
        for name, module in [*sys.modules.items()]:
            if name.startswith(triton.__name__ + ".") and callable(vars(module).get("launch")):
                stack.enter_context(mock.patch.object(module, "launch", launch))
        stack.enter_context(mock.patch.object(torch.Tensor, "is_cpu", False))
        stack.enter_context(mock.patch.object(call, "check_decay", nothing))
        stack.enter_context(mock.patch.object(arguments, "HOSTS", set()))
        stack.enter_context(offline_models.on_a_gpu())
        yield


def step(name: str, layers: int) -> tuple[float, float]:
    """Milliseconds of a forward and of a backward pass, at the first quartile of some steps."""
    model = LanguageModel(preset(name, vocab_size=16, hidden_size=64, num_layers=layers, num_heads=2))
    ids, times = torch.zeros(1, 64, dtype=torch.long), []
    for _ in range(STEPS):
        start = time.process_time()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(ids)[0].float().sum()
        middle = time.process_time()
        loss.backward()
        times.append((middle - start, time.process_time() - middle))
    return tuple(1e3 * statistics.quantiles(part[3:], n=4)[0] for part in zip(*times, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS)
    torch.set_num_threads(1)
    print("milliseconds a layer, forward and backward")
    with without_launches():
        for name in parser.parse_args().models:
            (few, few_back), (more, more_back) = step(name, 1), step(name, 4)
            print(f"{name:24s} {(more - few) / 3:.2f} {(more_back - few_back) / 3:.2f}", flush=True)


if __name__ == "__main__":
    main()
