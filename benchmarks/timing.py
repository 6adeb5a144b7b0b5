"""Timing on a noisy machine: candidates take turns in one process, and their medians are compared."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

from halflife.files import write_text
from halflife.ops.backends.native import build


def medians(
    candidates: Mapping[Any, Callable[[], object]], seconds: float = 3.0, device: str = "cpu", rounds: int = 5
) -> dict[Any, float]:
    """Return the median seconds of each candidate over rounds, in each of which every candidate runs once.

    Args:
        candidates: name → function to time.
        seconds: approximate duration of the measurement.
        device: with "cuda", the host waits for the device around each call.
        rounds: the fewest rounds.
    """
    times: dict[Any, list[float]] = {name: [] for name in candidates}
    for run in candidates.values():
        run()
    began = time.perf_counter()
    while len(next(iter(times.values()))) < rounds or time.perf_counter() - began < seconds:
        for name, run in candidates.items():
            _wait(device)
            start = time.perf_counter()
            run()
            _wait(device)
            times[name].append(time.perf_counter() - start)
    return {name: median(values) for name, values in times.items()}


CARRIED = 64  # tokens that `decoding` reads behind a context


def decoding(step: Callable[[Any], Any], state: Any) -> Callable[[], None]:
    """Return a function that decodes a token behind the token of the call before.

    A state that is read again and again is a cache that goes on in many ways, which softmax attention has to copy each
    time. After `CARRIED` tokens it begins again behind `state`, so that the context keeps its length.

    Args:
        step: takes a state, reads a token and returns the new state.
        state: that of the context.
    """
    read, after = 0, state

    def decode() -> None:
        nonlocal read, after
        after = step(after if read % CARRIED else state)
        read += 1

    return decode


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident_memory(field: str = "VmRSS") -> int:
    """Return the bytes of memory that this process holds now (field "VmRSS") or held at its peak ("VmHWM")."""
    if not STATUS.exists():
        raise FileNotFoundError(f"memory is read from {STATUS}, which only Linux has")
    fields = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
    if field not in ("VmRSS", "VmHWM"):
        raise ValueError(f"unknown field {field!r}; choose from VmRSS, VmHWM")
    return 1024 * int(fields[field].split()[0])


def peak_memory(run: Callable[[], object]) -> int:
    """Return the peak growth of this process in bytes while `run` runs (Linux).

    Memory that the allocator holds from before is used again and is not counted. Measure in a fresh process therefore.
    """
    before = resident_memory()
    CLEAR.write_text("5")  # resets the peak to the memory held now
    run()
    return max(0, resident_memory("VmHWM") - before)


def onednn_rate(dtype: torch.dtype = torch.float32, size: int = 2048) -> float:
    """Measure the FLOP/s of one large matrix product on this CPU by oneDNN, where torch uses MKL."""
    a, b = torch.randn(2, size, size).to(dtype)
    product = torch.ops.mkldnn._linear_pointwise
    return 2 * size**3 / medians({"gemm": lambda: product(a, b, None, "none", [], "")}, 1.0)["gemm"]


def copy_rate(device: str = "cpu", megabytes: int = 256) -> float:
    """Measure the bytes a second (read + written) of one large copy on this machine."""
    a = torch.ones(megabytes << 18, device=device)  # memory that was never written is not read from memory
    b = torch.zeros_like(a)
    return 2 * a.nbytes / medians({"copy": lambda: b.copy_(a)}, 1.0, device)["copy"]


def command() -> str:
    """The command line of this process, in Markdown."""
    return f"`python benchmarks/{' '.join([Path(sys.argv[0]).name, *sys.argv[1:]])}`"


def write_section(page: Path, mark: str, text: str) -> None:
    """Replace what stands between `mark` and the next comment of a Markdown page.

    A heading of the section belongs into `text`, because what stands before a mark is part of the section before it.
    """
    head, _, rest = page.read_text().partition(mark)
    write_text(page, f"{head}{mark}\n\n{text}\n\n{''.join(rest.partition('<!-- ')[1:])}")


@contextmanager
def without_kernels() -> Iterator[None]:
    """Run everything by torch inside this block, as on a machine without a C++ compiler."""
    before = build.why_not
    build.why_not = lambda: "the benchmark compares with torch"
    try:
        yield
    finally:
        build.why_not = before
