"""Synthetic tasks of recall and state tracking. A task maps its settings and a seed to inputs, labels and slices."""

from halflife.tasks import ascii, economy, groups, mqar, recall  # noqa: F401 (register themselves)
from halflife.tasks.base import IGNORED, TASKS, Task, TaskBatch, build, stream_seed, with_tier

__all__ = ["IGNORED", "TASKS", "Task", "TaskBatch", "build", "stream_seed", "with_tier"]
