"""The loss over a large vocabulary, its time and peak memory: `python benchmarks/loss.py [--write docs/benchmarks.md]`.

The loss with all logits, our loss in chunks, and `torch.nn.functional.linear_cross_entropy` with its default chunks
(torch 2.13) each do one forward and backward pass in a fresh process.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import timing  # noqa: E402

from halflife.models.loss import ChunkedLoss  # noqa: E402

WIDTH, TOKENS = 512, 1024
VOCABULARIES = (128_256,)
MARK = "<!-- loss -->"
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def all_logits(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), labels)


def of_torch(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    options = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(hidden, weight, labels, options=options)


LOSSES: dict[str, Loss] = {"all logits": all_logits, "ours, in chunks": ChunkedLoss.apply}
if hasattr(F, "linear_cross_entropy"):
    LOSSES["torch, in chunks"] = of_torch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="also write the table here, after the line " + MARK)
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that all runs")
    parser.add_argument("--measure", nargs=4, metavar=("LOSS", "DTYPE", "TOKENS", "V"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.quick and arguments.write:
        parser.error("--quick only sees that all runs; its numbers are not to be written")
    if arguments.measure:
        name, dtype, tokens, vocabulary = arguments.measure
        print(json.dumps(measure(LOSSES[name], getattr(torch, dtype), int(tokens), int(vocabulary))))
        return
    text = "\n".join(report(64 if arguments.quick else TOKENS, (500,) if arguments.quick else VOCABULARIES))
    print(text)
    if arguments.write:
        timing.write_section(arguments.write, MARK, text)


def report(tokens: int, vocabularies: tuple[int, ...]) -> Iterator[str]:
    """Yield the Markdown lines of the table."""
    yield "## Loss over a large vocabulary"
    yield ""
    yield timing.command()
    yield ""
    yield f"Forward and backward of {tokens:,} tokens of width {WIDTH}, one thread, torch {torch.__version__}. Seconds"
    yield "of the processor, peak memory beyond the inputs and the two gradients, and the loss."
    yield ""
    yield "| vocabulary | dtype | loss | seconds | MB | value |"
    yield "|---:|---|---|---:|---:|---:|"
    for vocabulary in vocabularies:
        for dtype in ("float32", "bfloat16"):
            for name in LOSSES:
                found = _process(name, dtype, tokens, vocabulary)
                yield (
                    f"| {vocabulary:,} | {dtype} | {name} | {found['seconds']:.1f} | {found['bytes'] / 1e6:,.0f} | "
                    f"{found['loss']:.4f} |"
                )


def _process(*arguments: Any) -> dict[str, float]:
    command = [sys.executable, __file__, "--measure", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{arguments} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(loss: Loss, dtype: torch.dtype, tokens: int, vocabulary: int) -> dict[str, float]:
    """Do one pass in this process; its peak memory counts from here."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    few = [torch.randn(n, 8, dtype=dtype, requires_grad=True) for n in (2, 4)]
    loss(*few, torch.tensor([0, 1])).backward()  # the first call of torch's function imports modules
    hidden = torch.randn(tokens, WIDTH).to(dtype).requires_grad_()
    weight = (0.02 * torch.randn(vocabulary, WIDTH)).to(dtype).requires_grad_()
    labels = torch.randint(vocabulary, (tokens,))
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    value = loss(hidden, weight, labels)
    value.backward()
    seconds = time.process_time() - start
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)  # Linux counts KiB
    return {"seconds": seconds, "bytes": grown - hidden.nbytes - weight.nbytes, "loss": value.item()}


if __name__ == "__main__":
    main()
