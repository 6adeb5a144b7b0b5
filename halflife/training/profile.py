"""A profile of training steps by pass: a Chrome trace, and a table of times.

Hooks give modules ranges named after their pass. An operation belongs to the innermost range around it, and a backward
one to the pass whose operation it differentiates (by sequence numbers). What the backward pass computes again counts as
backward. The passes of a compiled block are "op" together.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import DeviceType, ProfilerActivity, profile, record_function
from transformers import TrainerCallback

from halflife.decay import Decay
from halflife.files import PROFILE_CSV, TRACE_JSON, write_csv
from halflife.layers import Mixer
from halflife.layers.design.gates import GATES
from halflife.layers.parts import OUTPUT_NORMS, DecayProjection, ShortConv

SKIPPED, PROFILED = 2, 3  # steps; the first ones allocate and compile
NORMS = (nn.RMSNorm, nn.LayerNorm, *OUTPUT_NORMS.values(), *GATES.values())
PASSES = ("convolution", "norms and gates", "decays", "op", "projections", "loss", "optimiser", "other")
_PREFIX, _BACKWARD, _OPTIMISER = "pass: ", "autograd::engine::evaluate_function", "Optimizer."


class Profile(TrainerCallback):
    """Profiles a few steps of a training of `objective`, and writes `TRACE_JSON` and `PROFILE_CSV` into a folder."""

    def __init__(self, objective: nn.Module, folder: Path, device: torch.device) -> None:
        self.objective, self.folder = objective, folder
        self._on_device = device.type == "cuda"
        self._hooks: list[Any] = []
        self._profiler: profile | None = None
        self._steps = self._seen = 0

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        self._seen += 1
        if self._profiler is None and self._seen == min(SKIPPED, state.max_steps - 1) + 1:
            self._hooks = ranges(self.objective)
            activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * self._on_device]
            self._profiler = profile(activities=activities, acc_events=True)
            self._profiler.start()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if self._hooks:
            self._steps += 1
            if self._steps == PROFILED or state.global_step == state.max_steps:
                self._finish(state.is_world_process_zero)

    def _finish(self, writes: bool) -> None:
        assert self._profiler is not None
        self._profiler.stop()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if writes:
            self._profiler.export_chrome_trace(str(self.folder / TRACE_JSON))
            write_table(times(self._profiler.events(), self._on_device), self._steps, self.folder / PROFILE_CSV)


def ranges(objective: nn.Module) -> list[Any]:
    """Hooks that name the pass of each module while it runs. Removing them ends this."""
    hooks = []
    for module in objective.modules():
        if (name := pass_of(module, objective)) is not None:
            entered: list[Any] = []

            def enter(*_: Any, name: str = name, entered: list[Any] = entered) -> None:
                entered.append(record_function(_PREFIX + name))
                entered[-1].__enter__()

            def leave(*_: Any, entered: list[Any] = entered) -> None:
                entered.pop().__exit__(None, None, None)

            hooks += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
    return hooks


def pass_of(module: nn.Module, objective: nn.Module) -> str | None:
    """The pass that a module is, where it runs nothing but its own; None for one that has no name."""
    kinds = (
        ("projections", nn.Linear), ("convolution", ShortConv), ("decays", (Decay, DecayProjection)), ("op", Mixer),
        ("other", nn.Embedding), ("norms and gates", NORMS),
    )  # fmt: skip
    if module is objective:
        return "loss"
    if type(module).__name__ in ("SwiGLU", "KoopmanMLP"):
        return "norms and gates"
    if type(module).__name__ == "Block":
        return "other"
    return next((name for name, kind in kinds if isinstance(module, kind)), None)


def times(events: Any, on_device: bool) -> dict[str, list[float]]:
    """The seconds of each pass, forward and backward, from the events of a profiler."""
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    numbered, backward = [], []
    for event in events:
        if event.device_type != DeviceType.CPU:  # a kernel, whose time is also that of the operation that launched it
            continue
        name, differentiates = _place(event)
        seconds = (event.self_device_time_total if on_device else event.self_cpu_time_total) / 1e6
        if differentiates is not None:
            backward.append((differentiates, name, seconds))
            continue
        if name is not None and event.sequence_nr >= 0:
            numbered.append((event.sequence_nr, name))
        found[name or "other"][0] += seconds
    numbered.sort()
    for number, name, seconds in backward:
        at = bisect_right(numbered, number, key=lambda pair: pair[0]) - 1
        found[name or (numbered[at][1] if at >= 0 and number >= 0 else "other")][1] += seconds
    return found


def _place(event: Any) -> tuple[str | None, int | None]:
    """The pass whose range an event lies in, and what it differentiates, if it belongs to a backward pass."""
    while event is not None:
        if event.name.startswith(_PREFIX):
            return event.name.removeprefix(_PREFIX), None
        if event.name.startswith(_OPTIMISER):
            return "optimiser", None
        if event.name.startswith(_BACKWARD):
            return None, -1 if "AccumulateGrad" in event.name else event.sequence_nr
        event = event.cpu_parent
    return None, None


def write_table(found: dict[str, list[float]], steps: int, path: Path) -> None:
    """Write the milliseconds a step of each pass, and its share."""
    total, rows = sum(map(sum, found.values())) or 1.0, []
    for name in PASSES:
        forward, backward = (1e3 * x / steps for x in found.get(name, [0.0, 0.0]))
        share = (forward + backward) * steps / 1e3 / total
        rows.append((name, f"{forward:.3f}", f"{backward:.3f}", f"{share:.4f}"))
    write_csv(path, ("pass", "forward_ms", "backward_ms", "share"), rows)
