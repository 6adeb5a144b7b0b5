"""`transformers.Trainer` with our parameter groups, and with FSDP2 on any device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import Trainer

from halflife.data.task_stream import unwrap_batch
from halflife.models import param_groups
from halflife.training import sharding
from halflife.training.config import TrainConfig

SCHEDULER = "scheduler.pt"


class HalflifeTrainer(Trainer):
    """A Trainer with AdamW on `param_groups`. Each item of its data set is a whole micro-batch."""

    def __init__(self, config: TrainConfig, **settings: Any) -> None:
        self.config = config
        super().__init__(data_collator=unwrap_batch, **settings)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            trained: Any = self.model if model is None else model
            groups = param_groups(trained, self.config.weight_decay)
            self.optimizer = torch.optim.AdamW(groups, lr=self.config.learning_rate, betas=self.config.betas)
        return self.optimizer


class FSDPTrainer(HalflifeTrainer):
    """A `HalflifeTrainer` for a model that `sharding.shard` has sharded.

    accelerate shards on GPUs only; on CPUs it silently uses DDP instead. The model is therefore sharded before, and the
    Trainer is told to leave it alone. Every process writes and reads checkpoints.
    """

    def __init__(self, config: TrainConfig, **settings: Any) -> None:
        super().__init__(config, **settings)
        self.is_distributed_loading_by_transformers = True  # the Trainer then neither wraps nor gathers the model

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Separate sharded from unsharded parameters, because no kernel accepts both."""
        optimizer = super().create_optimizer(model)
        for group in [*optimizer.param_groups]:
            unsharded = [x for x in group["params"] if not isinstance(x, DTensor)]
            if unsharded and len(unsharded) < len(group["params"]):
                group["params"] = [x for x in group["params"] if isinstance(x, DTensor)]
                optimizer.add_param_group({**group, "params": unsharded})
        return optimizer

    @contextlib.contextmanager
    def _defer_fsdp_gradient_reduction(self) -> Iterator[None]:
        model: Any = self.model
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Do nothing; `_save_optimizer_and_scheduler` saves the weights too."""

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        sharding.save(self.model, self._inner(), Path(output_dir))
        if self.args.should_save:
            torch.save(self._schedule().state_dict(), Path(output_dir) / SCHEDULER)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Do nothing; `_load_optimizer_and_scheduler` loads the weights too."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            sharding.load(self.model, self._inner(), Path(checkpoint))
            self._schedule().load_state_dict(torch.load(Path(checkpoint) / SCHEDULER, weights_only=True))
            for group, rate in zip(self._inner().param_groups, self._schedule().get_last_lr(), strict=True):
                group["lr"] = rate  # of the next step; a sharded checkpoint does not hold it

    def _schedule(self) -> Any:
        return self.lr_scheduler

    def _inner(self) -> torch.optim.Optimizer:
        """The optimiser without the wrapper of accelerate."""
        return getattr(self.optimizer, "optimizer", self.optimizer)
