"""Progress bars for many runs at once, from what the runs write into their folders."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from halflife.files import METRICS_JSONL, RUN_JSON
from halflife.runs.sweep import Job


class ProgressBoard:
    """One progress bar for all runs together, and one for each running run. A finished run leaves a line.

    The board reads the folders of the runs: a run writes `run.json` when it starts, and its steps to `metrics.jsonl`.
    """

    def __init__(self, jobs: Sequence[Job], show: bool) -> None:
        self.progress = Progress(
            TextColumn("{task.description}", markup=False), BarColumn(6), MofNCompleteColumn(),
            TextColumn("{task.fields[info]}"), TimeRemainingColumn(compact=True), TextColumn("left"),
            refresh_per_second=2, speed_estimate_period=3600, disable=not show,
        )  # fmt: skip
        self.unfinished = list(jobs)
        self.steps = {job.name: last_step(job.folder) for job in jobs}
        self.started = {job.name: _start_time(job.folder) for job in jobs}
        self.bars: dict[str, TaskID] = {}
        total = sum(job.config.steps for job in jobs)
        self.all = self.progress.add_task("all runs", total=total, completed=sum(self.steps.values()), info="")

    def update(self) -> None:
        """Read the folders and redraw the bars."""
        for job in self.unfinished:
            if (started := _start_time(job.folder)) != self.started[job.name]:
                self.started[job.name] = started
                if job.name in self.bars:
                    self.note(job, "its worker died; the run continues from its last checkpoint")
                    self.progress.remove_task(self.bars.pop(job.name))
                self.bars[job.name] = self.progress.add_task(job.name, total=job.config.steps, info="")
            if job.name in self.bars:
                self.steps[job.name] = last_step(job.folder)
                self.progress.update(self.bars[job.name], completed=self.steps[job.name])
        running, done = len(self.bars), len(self.steps) - len(self.unfinished)
        info = f"{running} running, {len(self.unfinished) - running} queued, {done} done"
        self.progress.update(self.all, completed=sum(self.steps.values()), info=info)

    def finish(self, job: Job, message: str) -> None:
        """Remove the bar of a run that ended, and print a line about it."""
        self.unfinished.remove(job)
        self.steps[job.name] = job.config.steps
        if job.name in self.bars:
            self.progress.remove_task(self.bars.pop(job.name))
        self.note(job, message)

    def note(self, job: Job, message: str) -> None:
        """Print a line about a run above the bars."""
        if not self.progress.disable:
            self.progress.console.print(f"{job.name}: {message}", markup=False, highlight=False, soft_wrap=True)


def _start_time(folder: Path) -> int:
    """The time at which the run in `folder` last started, in nanoseconds; 0 if it has not started."""
    try:
        return (folder / RUN_JSON).stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def outcome(job: Job, result: dict[str, Any]) -> str:
    """The line that a finished run leaves."""
    form = {"accuracy": ".1%", "loss": ".3f"}[job.config.measure]
    return result.get("diverged") or f"validation {result['validation']:{form}}"


def last_step(folder: Path) -> int:
    """The last step that the run in `folder` has logged; 0 if there is none. Only the end of the file is read."""
    try:
        with (folder / METRICS_JSONL).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - (1 << 16)))
            steps = re.findall(rb'"step": (\d+)', file.read())
    except FileNotFoundError:
        return 0
    return int(steps[-1]) if steps else 0
