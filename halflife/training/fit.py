"""Fitting one model with `transformers.Trainer` and our optimiser groups, metrics, progress bar and checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

from halflife.files import CHECKPOINTS, RESULT_JSON, RUN_JSON, read_json, write_json
from halflife.models import LanguageModel
from halflife.models.loss import mean_loss
from halflife.tasks import IGNORED
from halflife.training.config import ExecutionConfig, TrainConfig, as_json, defaults, rank, world_size

if TYPE_CHECKING:
    from halflife.training.callbacks import Metrics
    from halflife.training.speed import Speed


class Objective(nn.Module):
    """The module that the Trainer trains: a model with the cross-entropy at the scored positions.

    Args:
        model: the language model.
        recompute: whether to recompute the activations of each block in the backward pass.
    """

    accepts_loss_kwargs = True  # the Trainer then passes num_items_in_batch

    def __init__(self, model: LanguageModel, recompute: bool = False) -> None:
        super().__init__()
        self.model = model
        self.recompute = recompute

    def forward(
        self, input_ids: Tensor, labels: Tensor, cu_seqlens: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
    ) -> dict[str, Tensor]:  # fmt: skip
        """The mean loss in nats over the scored positions, as `{"loss": …}`.

        Args:
            input_ids: `[B, T]`.
            labels: `[B, T]`; positions with −100 are not scored.
            cu_seqlens: boundaries of packed sequences, `[N + 1]`.
            num_items_in_batch: for a micro-batch, the scored positions of the whole batch. The losses of its
                micro-batches then add up to the loss of the batch.
        """
        call = partial(checkpoint, use_reentrant=False) if self.recompute and self.training else None
        hidden, _ = self.model.hidden(input_ids, cu_seqlens=cu_seqlens, call=call)
        scored = labels != IGNORED
        loss = mean_loss(hidden[scored], self.model.head_weight, labels[scored])
        return {"loss": loss if num_items_in_batch is None else loss * (scored.sum() / num_items_in_batch)}


def claim_run_folder(config: TrainConfig, folder: Path) -> bool:
    """Claim `folder` for a run of this configuration: write `run.json`. Returns whether the run is finished already.

    Raises:
        ValueError: the folder belongs to a run with another configuration.
    """
    settings = as_json(config.to_dict())
    if (folder / RUN_JSON).exists() and _with_defaults(read_json(folder / RUN_JSON), config) != settings:
        raise ValueError(f"{folder} belongs to a run with another configuration; choose another folder")
    if (folder / RESULT_JSON).exists():
        return True
    if rank() == 0:
        write_json(folder / RUN_JSON, settings)
    return False


def _with_defaults(saved: dict[str, Any], config: TrainConfig) -> dict[str, Any]:
    """A saved configuration, completed with the defaults of fields that newer versions have added."""
    model = {**defaults(config.model), **saved.get("model", {})}
    return as_json({**defaults(config), **saved, "model": model})


def fit(
    model: LanguageModel,
    config: TrainConfig,
    data: Dataset[dict[str, Tensor]],
    folder: Path,
    *,
    validate: Callable[[nn.Module], float],
    measure: str,
    name: str,
    execution: ExecutionConfig,
    speed: Speed | None = None,
) -> tuple[str | None, Metrics]:
    """Train `model` in place, starting from the last complete checkpoint in `folder` if there is one.

    With `execution.fsdp` the parameters of `model` are shards afterwards (see `sharding.gather`).

    Args:
        model: freshly initialised.
        config: optimiser and schedule.
        data: item i is micro-batch i, which belongs to step `i // execution.num_micro_batches(config.batch_size)`.
        folder: the folder of the run.
        validate: takes the `Objective` and returns the validated quantity.
        measure: the name of that quantity, "accuracy" or "loss".
        name: label of the progress bar.
        execution: memory, processes and display.
        speed: computes tokens per second; None to leave them out.

    Returns:
        The reason of a divergence (None if the run did not diverge), and the metrics callback.

    Raises:
        StoppedBySignal: the process received SIGTERM and has saved a checkpoint.
    """
    from transformers.trainer_callback import PrinterCallback, ProgressCallback

    from halflife.training import sharding
    from halflife.training.callbacks import Diverged, Metrics, ProgressBar, StopOnSignal
    from halflife.training.checkpoints import MarkComplete, last_checkpoint
    from halflife.training.trainer import FSDPTrainer, HalflifeTrainer

    metrics = Metrics(folder, validate, measure, config.validate_every, speed, execution.tensorboard)
    bar, stop = ProgressBar(name, metrics), StopOnSignal()
    objective, arguments = Objective(model, execution.gradient_checkpointing), _arguments(config, folder, execution)
    if execution.fsdp:
        sharding.shard(objective, model, arguments.device)
    trainer = (FSDPTrainer if execution.fsdp else HalflifeTrainer)(
        config,
        model=objective,
        args=arguments,
        train_dataset=data,
        callbacks=[metrics, stop, MarkComplete(), *([bar] if execution.show and rank() == 0 else [])],
    )
    for default in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(default)
    resumed = last_checkpoint(folder / CHECKPOINTS)
    try:
        trainer.train(resume_from_checkpoint=None if resumed is None else str(resumed))
    except Diverged as error:
        return str(error), metrics
    finally:
        bar.close()
        stop.restore()
    if trainer.state.global_step < config.steps:
        raise StoppedBySignal(f"stopped after step {trainer.state.global_step} of {config.steps}")
    return None, metrics


class StoppedBySignal(Exception):
    """A run that received SIGTERM has saved a checkpoint and stopped. It can be resumed."""


def _arguments(config: TrainConfig, folder: Path, execution: ExecutionConfig) -> Any:
    from transformers import TrainingArguments

    log_every = math.gcd(config.save_every, 20)  # divides save_every, so that a resumed run logs the same averages
    return TrainingArguments(
        output_dir=str(folder / CHECKPOINTS),
        max_steps=config.steps,
        per_device_train_batch_size=1,  # an item of the data set is a whole micro-batch
        gradient_accumulation_steps=execution.num_micro_batches(config.batch_size) // world_size(),
        train_sampling_strategy="sequential",
        learning_rate=config.learning_rate,
        lr_scheduler_type=config.schedule,
        lr_scheduler_kwargs=config.schedule_options,
        warmup_steps=round(config.warmup * config.steps),
        max_grad_norm=config.clip,
        bf16=config.bf16,
        use_cpu=not torch.accelerator.is_available(),  # otherwise transformers refuses bf16 without a GPU
        seed=config.seed,
        logging_steps=log_every,
        logging_nan_inf_filter=False,
        save_steps=config.save_every,
        save_total_limit=2,
        remove_unused_columns=False,
        dataloader_pin_memory=torch.cuda.is_available(),
        ddp_find_unused_parameters=False,
        report_to=[],
        disable_tqdm=True,
    )
