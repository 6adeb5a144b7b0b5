"""Callbacks of training: metrics, the progress bar, and a stop on SIGTERM."""

from __future__ import annotations

import json
import math
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from halflife.files import METRICS_JSONL, finite, naming, read_metrics, write_text
from halflife.layers import gate_statistics
from halflife.training.speed import Speed, StepTimes

if TYPE_CHECKING:
    from halflife.training.trackers import Tracking


class Diverged(RuntimeError):
    """The loss, the norm of the gradient or a weight is not finite."""


def check_weights(model: nn.Module, step: int) -> None:
    """Raise `Diverged` if a weight is not finite after the last step, whose gradient no later loss shows."""
    local = (x.to_local() if isinstance(x, DTensor) else x for x in (p.detach() for p in model.parameters()))
    bad = torch.tensor(float(any(not x.isfinite().all() for x in local)))
    if torch.distributed.is_initialized():
        bad = bad.to(next(model.parameters()).device)
        torch.distributed.all_reduce(bad)
    if bad:
        raise Diverged(f"a weight is not finite after step {step}")


class Metrics(TrainerCallback):
    """Writes a line of `metrics.jsonl` per log, validates at intervals, and stops a run that diverged.

    With several processes, only the first one writes. A resumed run first removes the lines after its checkpoint, so
    that no step is logged twice.

    Args:
        validate: takes the model and returns the value of `validation_<measure>`.
        measure: "accuracy" or "loss".
        every: steps between validations.
        speed: computes tokens per second; None to leave them out.

    Attributes:
        tracking: also gets every line and the model at validations; None without trackers.
        graphs: returns how many graphs were compiled so far, for every line; None without `torch.compile`.
    """

    def __init__(
        self, folder: Path, validate: Callable[[nn.Module], float], measure: str, every: int,
        speed: Speed | None = None,
    ) -> None:  # fmt: skip
        self.path, self.validate, self.measure, self.every = folder / METRICS_JSONL, validate, measure, every
        self.speed = speed
        self.tracking: Tracking | None = None
        self.graphs: Callable[[], int] | None = None
        self.times = StepTimes()
        self.validation: float | None = None
        self._logged = 0  # number of steps at the previous log
        self._begun = 0  # steps before this process
        self.warned: set[str] = set()

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self._begun = state.global_step
        lines = [line for line in read_metrics(self.path) if line["step"] <= state.global_step]
        if state.is_world_process_zero:
            write_text(self.path, "".join(map(_line, lines)))
        # A run that was killed after its last step validates no more, so its last validation is read from the file.
        validations = [line[key] for line in lines if (key := f"validation_{self.measure}") in line]
        self.validation = validations[-1] if validations else None

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        self.times.begin(args.device)

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.times.end()
        last = state.global_step == state.max_steps
        control.should_log |= last  # so that the loss of every step is part of a line, and a divergence is seen
        if state.global_step % self.every == 0 or last:
            self.validation = self.validate(kwargs["model"])
            self._write(state, {f"validation_{self.measure}": self.validation})
            if self.tracking is not None:
                self.tracking.observe(kwargs["model"].model, state.global_step)

    def on_train_end(self, args, state, control, **kwargs) -> None:
        if self.validation is None and state.global_step == state.max_steps:  # its line was lost after the checkpoint
            self.validation = self.validate(kwargs["model"])
            self._write(state, {f"validation_{self.measure}": self.validation})

    def on_log(self, args, state, control, logs: dict[str, Any] | None = None, **kwargs) -> None:
        logs = logs or {}
        if "loss" not in logs:
            return
        names = ("loss", "learning_rate", "grad_norm")
        line: dict[str, Any] = {name: logs[name] for name in names if name in logs}
        seconds = self.times.seconds()  # of all steps, for the loss has been read
        if self.speed is not None and (recent := seconds[self._logged :]):
            line |= self.speed.of(median(recent))
        self._logged = len(seconds)
        if self.graphs is not None:
            line["compiled_graphs"] = self.graphs()
        gates = gate_statistics(kwargs["model"])
        self._write(state, {**line, "gates": gates} if gates else line)
        self._warn_of_idle_states(gates, state.global_step)
        for name, key in (("loss", "loss"), ("norm of the gradient", "grad_norm")):
            if not math.isfinite(logs.get(key, 0.0)):
                raise Diverged(f"the {name} is {logs[key]} at step {state.global_step}")

    def _warn_of_idle_states(self, gates: dict[str, dict[str, float]], step: int) -> None:
        """Warn once per layer if it never or always resets. Such a layer uses one of its two states only."""
        for name, statistics in gates.items():
            if statistics["reset_rate"] in (0.0, 1.0) and name not in self.warned:
                self.warned.add(name)
                never = statistics["reset_rate"] == 0
                warnings.warn(
                    f"{name} {'never' if never else 'always'} resets (by step {step}): its "
                    f"{'slow state stays empty' if never else 'fast state never lasts'}; start it with a "
                    f"{'higher' if never else 'lower'} reset_rate",
                    stacklevel=2,
                )

    def seconds_of_steps(self) -> dict[int, float]:
        """The duration of each step of this process, by its number from 0."""
        return dict(enumerate(self.times.seconds(), self._begun))

    def _write(self, state, line: dict[str, Any]) -> None:
        if not state.is_world_process_zero:
            return
        with naming(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(_line({"step": state.global_step, **line}))
        if self.tracking is not None:
            self.tracking.report(line)


def _line(values: dict[str, Any]) -> str:
    return json.dumps(finite(values), allow_nan=False) + "\n"


class ProgressBar(TrainerCallback):
    """A progress bar with steps, loss, validation, speed and remaining time."""

    def __init__(self, name: str, metrics: Metrics) -> None:
        self.name, self.metrics = name, metrics
        # The bar fits 80 columns, which is also the width of a pipe.
        self.progress = Progress(
            TextColumn("{task.description}"), BarColumn(6), MofNCompleteColumn(), TextColumn("{task.fields[info]}"),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True), TextColumn("{task.fields[clock]}"),
            refresh_per_second=2,
        )  # fmt: skip
        self.task: TaskID | None = None
        self.loss: float | None = None  # none is logged yet

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.progress.start()
        self.task = self.progress.add_task(
            self.name, total=state.max_steps, completed=state.global_step, info="", clock="left"
        )

    def on_log(self, args, state, control, logs: dict[str, Any] | None = None, **kwargs) -> None:
        self.loss = (logs or {}).get("loss", self.loss)

    def on_step_end(self, args, state, control, **kwargs) -> None:
        value = self.metrics.validation
        form = {"accuracy": "4.0%", "loss": ".3f"}[self.metrics.measure]
        shown = "" if value is None else f" val {value:{form}}"
        assert self.task is not None
        speed, seconds = self.metrics.speed, self.metrics.times.seconds()[-20:]
        rate = ""
        if speed is not None and seconds:
            rate = f" {speed.of(median(seconds))['tokens_per_second']:,.0f} tokens/s"
        self.progress.update(
            self.task,
            completed=state.global_step,
            info=f"loss {'–' if self.loss is None else f'{self.loss:.2f}'}{shown}{rate}",
            clock="in all" if state.global_step == state.max_steps else "left",
        )

    def close(self) -> None:
        """Remove the bar, also after an error."""
        self.progress.stop()


class StopOnSignal(TrainerCallback):
    """On a signal to end that `note` is given, saves a checkpoint after the current step and ends the training.

    Job managers send such a signal some seconds before they kill a process. A second Ctrl-C ends it at once. All
    processes of a run stop after the same step, even if only one of them received it.

    Attributes:
        received: the number of the signal, or None.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.hosts: Any = None  # the group of the processes, in which a host does not wait for its device

    def note(self, number: int, _: object) -> None:
        """Handle a signal, see `on_signals`."""
        if number == signal.SIGINT:
            if self.received == number:
                raise KeyboardInterrupt
            print("\nsaving a checkpoint after this step; press Ctrl-C again to stop at once", file=sys.stderr)
        self.received = number

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        if torch.distributed.is_initialized():
            self.hosts = torch.distributed.new_group(backend="gloo")

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if self.hosts is not None:
            received = torch.tensor(self.received or 0)
            torch.distributed.all_reduce(received, torch.distributed.ReduceOp.MAX, self.hosts)
            self.received = int(received) or None
        if self.received is not None:
            control.should_save = control.should_training_stop = True
