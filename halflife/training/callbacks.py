"""What a run shows and writes while it trains."""

from __future__ import annotations

import json
import math
import signal
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from torch import nn
from transformers import TrainerCallback

from halflife.files import write_text
from halflife.layers import gate_statistics
from halflife.training.speed import Speed


class Diverged(RuntimeError):
    """The loss is no longer a number."""


class Metrics(TrainerCallback):
    """Writes `metrics.jsonl`, one line a log; validates now and then; stops a run that diverged.

    Of several processes, the first one writes.

    Args:
        folder: of the file. A resumed run first drops the lines after its checkpoint, so that none stands twice.
        validate: takes the model, returns the number that is written as `validation_<measure>`.
        measure: "accuracy" or "loss".
        every: steps between validations.
        speed: what tokens a second are counted with; None for no such numbers.
        tensorboard: whether to write the numbers to `tensorboard/` too.
    """

    def __init__(
        self, folder: Path, validate: Callable[[nn.Module], float], measure: str, every: int,
        speed: Speed | None = None, tensorboard: bool = False,
    ) -> None:  # fmt: skip
        self.path, self.validate, self.measure, self.every = folder / "metrics.jsonl", validate, measure, every
        self.speed, self.tensorboard = speed, tensorboard
        self.step_seconds: list[float] = []
        self.validation: float | None = None
        self._began = 0.0
        self._logged = 0  # steps of this process when the line before was written
        self._board: Any = None
        self.warned: set[str] = set()

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        kept = [line for line in _whole_lines(self.path) if line["step"] <= state.global_step]
        if state.is_world_process_zero:
            write_text(self.path, "".join(json.dumps(line) + "\n" for line in kept))
            if self.tensorboard:
                from torch.utils.tensorboard import SummaryWriter

                self._board = SummaryWriter(str(self.path.parent / "tensorboard"), purge_step=state.global_step + 1)
        # A run that was killed after its last step has nothing left to validate.
        measured = [line[key] for line in kept if (key := f"validation_{self.measure}") in line]
        self.validation = measured[-1] if measured else None

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.step_seconds.append(time.perf_counter() - self._began)
        if state.global_step % self.every == 0 or state.global_step == state.max_steps:
            self.validation = self.validate(kwargs["model"])
            self._write(state, {f"validation_{self.measure}": self.validation})

    def on_train_end(self, args, state, control, **kwargs) -> None:
        if self._board is not None:
            self._board.close()

    def on_log(self, args, state, control, logs: dict[str, Any] | None = None, **kwargs) -> None:
        logs = logs or {}
        if "loss" not in logs:
            return
        names = ("loss", "learning_rate", "grad_norm")
        line: dict[str, Any] = {name: logs[name] for name in names if name in logs}
        if self.speed is not None and (fresh := self.step_seconds[self._logged :]):
            line |= self.speed.of(median(fresh))
        self._logged = len(self.step_seconds)
        gates = gate_statistics(kwargs["model"])
        self._write(state, {**line, "gates": gates} if gates else line)
        self._warn(gates, state.global_step)
        if not math.isfinite(logs["loss"]):
            raise Diverged(f"the loss is {logs['loss']} at step {state.global_step}")

    def _warn(self, gates: dict[str, dict[str, float]], step: int) -> None:
        """Says once of each layer that it never or always resets: then it has one state, not two."""
        for name, found in gates.items():
            if found["reset_rate"] in (0.0, 1.0) and name not in self.warned:
                self.warned.add(name)
                never = found["reset_rate"] == 0
                warnings.warn(
                    f"{name} {'never' if never else 'always'} resets (by step {step}): its "
                    f"{'slow state stays empty' if never else 'fast state never lasts'}; start it with a "
                    f"{'higher' if never else 'lower'} reset_rate",
                    stacklevel=2,
                )

    def seconds_per_step(self) -> float:
        """The median over the steps of this process; NaN if all were done before it began."""
        return median(self.step_seconds) if self.step_seconds else math.nan

    def _write(self, state, line: dict[str, Any]) -> None:
        if not state.is_world_process_zero:
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": state.global_step, **line}) + "\n")
        for name, value in line.items():
            if self._board is not None and isinstance(value, float):
                self._board.add_scalar(name, value, state.global_step)


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file; a killed process may have left half of the last one, which is dropped."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return lines


class Bar(TrainerCallback):
    """A progress bar: steps, loss, validation, time spent and left."""

    def __init__(self, name: str, metrics: Metrics) -> None:
        self.name, self.metrics = name, metrics
        # Within 80 columns, which is also what a pipe has.
        self.progress = Progress(
            TextColumn("{task.description}"), BarColumn(6), MofNCompleteColumn(), TextColumn("{task.fields[info]}"),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True), TextColumn("{task.fields[clock]}"),
            refresh_per_second=2,
        )  # fmt: skip
        self.task: TaskID | None = None
        self.loss = float("nan")

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
        speed, seconds = self.metrics.speed, self.metrics.step_seconds[-20:]
        rate = "" if speed is None else f" {speed.of(median(seconds))['tokens_per_second']:,.0f} tokens/s"
        self.progress.update(
            self.task,
            completed=state.global_step,
            info=f"loss {self.loss:.2f}{shown}{rate}",
            clock="in all" if state.global_step == state.max_steps else "left",
        )

    def close(self) -> None:
        """Ends the bar, whatever happened to the run."""
        self.progress.stop()


class Stop(TrainerCallback):
    """On SIGTERM, saves after the step and ends the training; a job manager kills the process some seconds later.

    All processes of a run stop after the same step: whichever was told tells the others.
    """

    def __init__(self) -> None:
        self.asked = False
        self.before = None
        if threading.current_thread() is threading.main_thread():  # elsewhere, signals are not ours
            self.before = signal.signal(signal.SIGTERM, self._ask)

    def _ask(self, *_: object) -> None:
        self.asked = True

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if torch.distributed.is_initialized():
            told = torch.tensor(float(self.asked), device=args.device)
            torch.distributed.all_reduce(told, torch.distributed.ReduceOp.MAX)
            self.asked = bool(told)
        if self.asked:
            control.should_save = control.should_training_stop = True

    def restore(self) -> None:
        """Gives the signal back to whoever had it."""
        if self.before is not None:
            signal.signal(signal.SIGTERM, self.before)
