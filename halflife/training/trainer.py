"""`transformers.Trainer` with our parameter groups, and with FSDP2 on any device."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from halflife.files import RUN_JSON, read_json_object, write_json
from halflife.layers.memory.gate_rank import GateRank
from halflife.models import param_groups
from halflife.packing import Packing
from halflife.training import sharding
from halflife.training.carried import CarriedStates
from halflife.training.checkpoints import CheckpointStore, loading
from halflife.training.config import TrainConfig
from halflife.training.schedules import BY_EPOCH, rate_by_epoch

SCHEDULER = "scheduler.pt"
WINDOW = "window.json"  # in a checkpoint: the sums of the steps that are not logged yet


def collate(items: list[dict[str, Any]]) -> dict[str, Any]:
    """The only element of `items`, a whole micro-batch. What the host must know stays there, so that it never waits.

    Boundaries become a `Packing`, and the `part` of rows that continue others becomes numbers.
    """
    (only,) = items
    batch = dict(only)
    if "cu_seqlens" in batch:
        batch["cu_seqlens"] = Packing.of(batch["cu_seqlens"], *batch["input_ids"].shape[:2])
    if "part" in batch:
        batch["part"] = batch["part"].tolist()
    return batch


class HalflifeTrainer(Trainer):
    """A Trainer with AdamW on `param_groups` and checkpoints in a `CheckpointStore`.

    Each item of its data set is a whole micro-batch. `settings` are arguments of the Trainer.
    """

    def __init__(self, config: TrainConfig, store: CheckpointStore, **settings: Any) -> None:
        self.config, self.store = config, store
        self.resumed: Path | None = None
        self._written_to: str | None = None  # the folder of the checkpoint that is being written
        super().__init__(data_collator=collate, **settings)
        self.add_callback(_Window(self))

    def train(self, resume_from_checkpoint: str | bool | None = None, **settings: Any) -> Any:
        self.resumed = Path(resume_from_checkpoint) if isinstance(resume_from_checkpoint, str) else None
        if self.resumed is not None:
            with loading(self.resumed):  # the Trainer reads this file among other work
                TrainerState.load_from_json(str(self.resumed / TRAINER_STATE_NAME))
        return super().train(resume_from_checkpoint, **settings)

    def _get_output_dir(self, trial: Any) -> str:
        return self._written_to or super()._get_output_dir(trial)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        step = self.state.global_step
        counts = {name: module.counts for name, module in self._gate_modules().items()}
        gates = {name: None if sums is None else torch.stack(sums).tolist() for name, sums in counts.items()}
        window = {"loss": self._mean(self._tr_loss), "logged": self._globalstep_last_logged, "gates": gates}
        with self.store.write(step) as folder:
            self._written_to = str(folder)
            try:
                super()._save_checkpoint(model, trial)
                if (carried := self._carried()) is not None and carried.parts:
                    carried.save(folder / f"checkpoint-{step}", self.args.process_index)
                if self.args.should_save:
                    write_json(folder / f"checkpoint-{step}" / WINDOW, window)
                    write_json(folder / f"checkpoint-{step}" / RUN_JSON, self.config.saved_in(self.store.folder.parent))
            finally:
                self._written_to = None

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        with loading(Path(resume_from_checkpoint)):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            with loading(Path(checkpoint)):
                super()._load_optimizer_and_scheduler(checkpoint)

    def restore_window(self) -> None:
        """Continue the averages that the next line of `metrics.jsonl` shows; older checkpoints do not have them."""
        if self.resumed is not None and (carried := self._carried()) is not None:
            carried.load(self.resumed)
        if self.resumed is None or not (self.resumed / WINDOW).exists():
            return
        window = read_json_object(self.resumed / WINDOW)
        self._tr_loss += math.nan if window["loss"] is None else window["loss"]  # null: it was not finite
        self._globalstep_last_logged = window["logged"]
        for name, module in self._gate_modules().items():
            if (sums := window["gates"].get(name)) is not None:
                module.counts = torch.tensor(sums, device=self.args.device).unbind()

    def _carried(self) -> CarriedStates | None:
        return getattr(self.model, "carried", None)

    def _gate_modules(self) -> dict[str, GateRank]:
        model: Any = self.model
        return {name: module for name, module in model.named_modules() if isinstance(module, GateRank)}

    def _mean(self, value: torch.Tensor) -> float:
        if torch.distributed.is_initialized():
            value = value.clone()
            torch.distributed.all_reduce(value)
            value /= torch.distributed.get_world_size()
        return value.item()

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            trained: Any = self.model if model is None else model
            groups = param_groups(trained, self.config.weight_decay, self.config.learning_rate)
            self.optimizer = torch.optim.AdamW(
                groups, lr=self.config.learning_rate, betas=self.config.betas, eps=self.config.epsilon,
                fused=self.args.device.type == "cuda" or None,
            )  # fmt: skip
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.config.schedule == BY_EPOCH and self.lr_scheduler is None:
            factor = partial(rate_by_epoch, steps=self.config.steps, **self.config.schedule_options)
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, factor)
        return super().create_scheduler(num_training_steps, optimizer)


class _Window(TrainerCallback):
    """Restores the averages of a resumed run after the Trainer has set them to zero."""

    def __init__(self, trainer: HalflifeTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self.trainer.restore_window()


class FSDPTrainer(HalflifeTrainer):
    """A `HalflifeTrainer` for a model that `sharding.fully_shard` has sharded.

    accelerate shards on GPUs only; on CPUs it silently uses DDP instead. The model is therefore sharded before, and the
    Trainer is told to leave it alone. Every process writes and reads checkpoints.
    """

    def __init__(self, config: TrainConfig, store: CheckpointStore, **settings: Any) -> None:
        super().__init__(config, store, **settings)
        self.is_distributed_loading_by_transformers = True  # the Trainer then neither wraps nor gathers the model

    @contextlib.contextmanager
    def _defer_fsdp_gradient_reduction(self) -> Iterator[None]:
        model: Any = self.model
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)

    def _clip_grad_norm(self, model: Any) -> Any:
        """Take the mean of the gradients over the pieces of a row, as FSDP does over rows; then clip."""
        objective: Any = self.model
        if objective.context is not None:
            objective.context.add_gradients(model)
            for x in model.parameters():
                if x.grad is not None:
                    x.grad /= objective.context.size
        return super()._clip_grad_norm(model)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Do nothing; `_save_optimizer_and_scheduler` saves the weights too."""

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        sharding.save(self.model, self._inner(), Path(output_dir))
        if self.args.should_save:
            schedule: Any = self.lr_scheduler
            torch.save(schedule.state_dict(), Path(output_dir) / SCHEDULER)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Do nothing; `_load_optimizer_and_scheduler` loads the weights too."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            schedule: Any = self.lr_scheduler
            with loading(Path(checkpoint)):
                sharding.load(self.model, self._inner(), Path(checkpoint))
                schedule.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER, weights_only=True))
            for group, rate in zip(self._inner().param_groups, schedule.get_last_lr(), strict=True):
                group["lr"] = rate  # of the next step; a sharded checkpoint does not hold it

    def _inner(self) -> torch.optim.Optimizer:
        """The optimiser without the wrapper of accelerate."""
        return getattr(self.optimizer, "optimizer", self.optimizer)
