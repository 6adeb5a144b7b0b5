"""Task examples as a data set whose items are whole batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset

from halflife.tasks import Task, stream_seed


class TaskStream(Dataset[dict[str, Tensor]]):
    """Fresh examples for every step; item i is the batch of step i, whoever asks and whenever.

    A batch is made in one vectorised call a task, and a resumed run finds the batches it has not seen by their index.
    All examples of a batch have one length: the tasks of a mixture that have it share the batch equally (the examples
    that are left over go to each in turn), and where a mixture has several lengths, they take turns.

    Args:
        stages: the curriculum; each mixture of tasks has an equal share of the steps, in this order.
        steps: batches in all.
        batch_size: examples a batch.
        seed: of the run.
    """

    def __init__(self, stages: Sequence[Sequence[Task]], steps: int, batch_size: int, seed: int) -> None:
        self.stages, self.steps, self.batch_size, self.seed = list(stages), steps, batch_size, seed

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> dict[str, Tensor]:
        stage = self.stages[step * len(self.stages) // self.steps]
        lengths = list(dict.fromkeys(task.length for task in stage))
        turn, length = step // len(lengths), lengths[step % len(lengths)]
        tasks = [task for task in stage if task.length == length]
        share, left = divmod(self.batch_size, len(tasks))
        batches = [
            task.generate(count, stream_seed("train", self.seed, step * len(tasks) + i))
            for i, task in enumerate(tasks)
            if (count := share + ((i - turn * left) % len(tasks) < left))
        ]
        return {
            "input_ids": torch.cat([batch.inputs for batch in batches]),
            "labels": torch.cat([batch.labels for batch in batches]),
        }


def only(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Collates a list of one batch: that batch."""
    (batch,) = items
    return batch
