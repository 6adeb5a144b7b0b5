"""Task examples as a data set whose items are whole batches."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.utils.data import Dataset

from halflife.tasks import Task, stream_seed


class TaskStream(Dataset[dict[str, Tensor]]):
    """Fresh examples for every step; item i is the batch of step i, whoever asks and whenever.

    A batch is made in one vectorised call, and a resumed run finds the batches that it has not seen by their index.

    Args:
        stages: the curriculum; each task has an equal share of the steps, in this order.
        steps: batches in all.
        batch_size: examples a batch.
        seed: of the run.
    """

    def __init__(self, stages: Sequence[Task], steps: int, batch_size: int, seed: int) -> None:
        self.stages, self.steps, self.batch_size, self.seed = list(stages), steps, batch_size, seed

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> dict[str, Tensor]:
        stage = self.stages[step * len(self.stages) // self.steps]
        batch = stage.generate(self.batch_size, stream_seed("train", self.seed, step))
        return {"input_ids": batch.inputs, "labels": batch.labels}


def only(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Collates a list of one batch: that batch."""
    (batch,) = items
    return batch
