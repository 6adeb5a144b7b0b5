"""Examples of tasks as a data set whose items are whole batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset

from halflife.tasks import Task, stream_seed


class TaskStream(Dataset[dict[str, Tensor]]):
    """New examples for every step. Item i is the batch of step i, a pure function of the settings and i.

    A batch takes one vectorised call per task, and a resumed run continues with the index of its next step. All
    examples of a batch have the same length. If a mixture has tasks of several lengths, the lengths take turns. The
    tasks of one length share a batch equally, and examples that are left over go to each task in turn.

    Args:
        stages: the curriculum, one mixture of tasks per stage; all stages have equally many steps.
        steps: number of batches.
        batch_size: examples of a batch.
        seed: the seed of the run.
        action_mask: whether batches hold the `action_mask` of their examples.
    """

    def __init__(
        self, stages: Sequence[Sequence[Task]], steps: int, batch_size: int, seed: int, action_mask: bool = False
    ) -> None:
        self.stages, self.steps, self.batch_size, self.seed = list(stages), steps, batch_size, seed
        self.action_mask = action_mask

    def __len__(self) -> int:
        return self.steps

    def _stage(self, step: int) -> Sequence[Task]:
        return self.stages[step * len(self.stages) // self.steps]

    def tasks(self, step: int) -> list[Task]:
        """The tasks of one length that share the batch of a step."""
        lengths = list(dict.fromkeys(task.length for task in self._stage(step)))
        return [task for task in self._stage(step) if task.length == lengths[step % len(lengths)]]

    def __getitem__(self, step: int) -> dict[str, Tensor]:
        tasks = self.tasks(step)
        turn = step // len({task.length for task in self._stage(step)})
        share, left = divmod(self.batch_size, len(tasks))
        batches = [
            task.generate(count, stream_seed("train", self.seed, step * len(tasks) + i))
            for i, task in enumerate(tasks)
            if (count := share + ((i - turn * left) % len(tasks) < left))
        ]
        mask = {"action_mask": torch.cat([batch.action_mask() for batch in batches])} if self.action_mask else {}
        return {
            "input_ids": torch.cat([batch.inputs for batch in batches]),
            "labels": torch.cat([batch.labels for batch in batches]),
            **mask,
        }
