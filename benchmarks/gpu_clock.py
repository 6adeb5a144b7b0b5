"""The sizes and the clock of `gpu.py`: milliseconds of calls, eagerly and as CUDA graphs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import parity
import torch

from halflife.ops.backends.dispatch import CannotRun

Row = dict[str, Any]


@dataclass(frozen=True)
class Scale:
    """Sizes of the measurements: (B, T) of the ops and of a step, heads, K = V, and the models'."""

    shapes: tuple[tuple[int, int], ...] = ((16, 2048), (4, 8192), (1, 32768))
    heads: int = 16
    sizes: tuple[int, ...] = (64, 128)
    hidden: int = 1024
    depth: int = 4
    step: tuple[int, int] = (16, 2048)
    seconds: float = 0.3  # of a measurement
    product: int = 8192  # rows of the matrices whose product is timed
    megabytes: int = 4096  # of the copy that is timed
    checked: int = 200  # tokens of a call that is compared with float64


SCALES = {"cuda": Scale(), "cpu": Scale(((1, 32),), 2, (16,), 32, 1, (1, 16), 0.0, 64, 1, 40)}
SCALES["meta"] = SCALES["cuda"]
FLUSHED = 1 << 27  # bytes that are written before each measurement, more than the cache of any GPU


def times(run: Callable[[], object], device: str, seconds: float) -> list[float]:
    """Quartiles of the milliseconds of a call, with nothing of its arguments in the cache of the device."""
    found: list[float] = []
    run()
    flushed = torch.empty(FLUSHED if device == "cuda" else 1, dtype=torch.int8, device=device)
    began = time.perf_counter()
    while len(found) < 3 or (time.perf_counter() - began < seconds and len(found) < 100):
        flushed.zero_()
        found.append(_once(run, device))
    return [round(x, 5) for x in statistics.quantiles(found, n=4, method="inclusive")]


def _once(run: Callable[[], object], device: str) -> float:
    if device != "cuda":
        start = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - start)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def replayed(run: Callable[[], object], device: str) -> Callable[[], object]:
    """The launches of a call as a CUDA graph, without the time of the host; the call itself on another device."""
    if device != "cuda":
        return run
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def measured(run: Callable[[], object], device: str, name: str = "ms") -> Row:
    """The median milliseconds of a call, "ms", and its quartiles, eagerly and ("graph_ms") as a graph."""
    seconds, row = SCALES[device].seconds, {}
    for key, how in ((name, lambda x, _: x), (f"graph_{name}", replayed)):
        try:
            found = times(how(run, device), device, seconds)
        except Exception as error:  # what cannot be captured is timed eagerly alone
            if key == name:
                raise
            row[f"{key}_failure"] = parity.said(error)
            continue
        row |= {key: found[1], f"{key}_quartiles": [found[0], found[2]]}
    return row


def failed(error: Exception) -> Row:
    refused = isinstance(error, CannotRun)
    return {"refused": str(error)[:300]} if refused else {"failure": parity.said(error), "ok": False}
