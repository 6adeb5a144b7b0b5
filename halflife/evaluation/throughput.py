"""How fast a model trains and decodes, and in how much memory: what is timed, and fair ways to time it.

A model is anything with `logits, state = model(ids, state)` as `LanguageModel` has it, so that others can stand beside.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halflife.models import param_groups

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def interleaved(
    candidates: Mapping[str, Callable[[], object]], *, rounds: int = 3, seconds: float = 0.0
) -> dict[str, float]:
    """Median seconds of each candidate, over rounds in which each runs once: what slows the machine slows them all.

    Args:
        candidates: name → what to time; run it once before, if its first call does more than the others.
        rounds: at least so many.
        seconds: rounds begin until so many have passed.

    Raises:
        ValueError: fewer than one round.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1; got {rounds}")
    times: dict[str, list[float]] = {name: [] for name in candidates}
    began, done = time.perf_counter(), 0
    while done < rounds or time.perf_counter() - began < seconds:
        for name, run in candidates.items():
            start = _now()
            run()
            times[name].append(_now() - start)
        done += 1
    return {name: median(values) for name, values in times.items()}


def _now() -> float:
    """Seconds, when the device has done all that it was given."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


# ---------------------------------------------------------------------------------------- what is timed


def train_step(model: nn.Module, *, bf16: bool = False) -> Callable[[Tensor], Tensor]:
    """A step of training on `ids [B, T]`: forward, backward of the mean cross-entropy of the next token, AdamW.

    Args:
        model: put into training mode, and trained.
        bf16: mixed precision.

    Returns:
        `loss = step(ids)`; the first call also allocates AdamW's moments.
    """
    optimizer = torch.optim.AdamW(param_groups(model.train(), 0.1), lr=1e-4)

    def step(ids: Tensor) -> Tensor:
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=bf16):
            logits = model(ids)[0]
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


class Decoder:
    """A model that reads and then goes on with the likeliest token, one a call: what decoding costs after a context.

    Args:
        model: put into evaluation mode.

    Attributes:
        state: the model's, after all that was read.
        token: `[B, 1]`, the likeliest next one, which the next call reads.
        position: tokens read.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model.eval()
        self.state: Any = None
        self.token: Tensor | None = None
        self.position = 0

    @torch.no_grad()
    def read(self, ids: Tensor) -> Decoder:
        """Reads `ids [B, T]`, T ≥ 1, in one pass; returns the decoder."""
        logits, self.state = self.model(ids, self.state)
        self.token, self.position = logits[:, -1:].argmax(-1), self.position + ids.shape[1]
        return self

    def __call__(self) -> None:
        """Decodes a token.

        Raises:
            ValueError: nothing has been read yet.
        """
        if self.token is None:
            raise ValueError("the decoder has read nothing yet: let it read a context first")
        self.read(self.token)


@dataclass(frozen=True)
class Stretch:
    """Some tokens of a stream.

    Attributes:
        tokens: of the stream, this stretch included.
        seconds: median of a token in this stretch.
        resident: bytes of memory that the process holds at its end.
    """

    tokens: int
    seconds: float
    resident: int


class Pace:
    """Time and memory of a stream, stretch by stretch: call `tick` after each token.

    Args:
        every: tokens of a stretch.

    Attributes:
        stretches: those that are complete.
    """

    def __init__(self, every: int) -> None:
        if every < 1:
            raise ValueError(f"a stretch has at least 1 token; got every={every}")
        self.every = every
        self.stretches: list[Stretch] = []
        self._times: list[float] = []
        self._last = _now()

    def tick(self) -> None:
        """A token is done."""
        now = _now()
        self._times.append(now - self._last)
        if len(self._times) == self.every:
            tokens = self.every * (len(self.stretches) + 1)
            self.stretches.append(Stretch(tokens, median(self._times), resident_memory()))
            self._times.clear()
        self._last = _now()  # what was measured here is no time of the next token


# ------------------------------------------------------------------------------------------------ memory


def state_bytes(state: Iterable[Mapping[str, Any]]) -> int:
    """Bytes of the tensors of a state, one mapping a layer; counters (integers) are left out."""
    tensors = (x for layer in state for x in layer.values() if isinstance(x, Tensor))
    return sum(x.nbytes for x in tensors if x.is_floating_point())


def resident_memory(field: str = "VmRSS") -> int:
    """Bytes of memory that this process holds now; "VmHWM" for the most that it ever held (Linux).

    Raises:
        FileNotFoundError: there is no /proc.
        ValueError: an unknown field.
    """
    if not STATUS.exists():
        raise FileNotFoundError(f"memory is read from {STATUS}, which only Linux has")
    fields = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
    if field not in ("VmRSS", "VmHWM"):
        raise ValueError(f"unknown field {field!r}; choose from VmRSS, VmHWM")
    return 1024 * int(fields[field].split()[0])


def peak_memory(run: Callable[[], object]) -> int:
    """Bytes by which this process grows while `run` runs, at the most (Linux).

    Memory that was freed before and that the allocator kept is used again without being counted: measure what comes
    first in a fresh process.

    Raises:
        FileNotFoundError: there is no /proc.
    """
    before = resident_memory()
    CLEAR.write_text("5")  # the peak starts anew from what is held now
    run()
    return max(0, resident_memory("VmHWM") - before)
