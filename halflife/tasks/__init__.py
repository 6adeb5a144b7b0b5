"""Recall tasks: configuration and seed → inputs, labels, slices."""

from halflife.tasks import mqar  # noqa: F401 (registers itself)
from halflife.tasks.base import IGNORED, TASKS, Task, TaskBatch, build, stream_seed

__all__ = ["IGNORED", "TASKS", "Task", "TaskBatch", "build", "stream_seed"]
