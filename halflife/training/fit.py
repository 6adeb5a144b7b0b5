"""Fitting one model: `transformers.Trainer` with our optimiser groups, metrics, bar and checkpoints."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from halflife.files import read_json, write_json
from halflife.models import LanguageModel, ModelConfig, param_groups
from halflife.tasks import IGNORED


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How a model is fitted; what to is a subclass's.

    Attributes:
        model: what is trained.
        steps, batch_size: of training.
        learning_rate, weight_decay, warmup, schedule, clip: of AdamW; `warmup` is a fraction of the steps,
            `schedule` a name of transformers' schedulers, `schedule_options` its own settings.
        betas: AdamW's.
        bf16: mixed precision.
        seed: of weights and data.
        validate_every, save_every: steps.
    """

    model: ModelConfig
    steps: int
    batch_size: int
    learning_rate: float
    weight_decay: float = 0.1
    warmup: float = 0.1
    schedule: str = "linear"
    schedule_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    clip: float = 1.0
    betas: tuple[float, float] = (0.9, 0.95)
    bf16: bool = False
    seed: int = 0
    validate_every: int = 100
    save_every: int = 200

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "validate_every", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate must be positive; got {self.learning_rate}")

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


class Objective(nn.Module):
    """What the Trainer trains: the model, and the cross-entropy at the scored positions."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden, _ = self.model.hidden(input_ids)
        scored = labels != IGNORED
        logits = self.model.logits(hidden[scored])
        return {"loss": nn.functional.cross_entropy(logits.float(), labels[scored])}


def begin(config: TrainConfig, folder: Path) -> dict[str, Any] | None:
    """Claims `folder` for a run of this configuration; the result, if the run is finished already.

    Raises:
        ValueError: the folder belongs to a run with another configuration.
    """
    plain = _plain(config.to_dict())
    if (folder / "run.json").exists() and _completed(read_json(folder / "run.json"), config) != plain:
        raise ValueError(f"{folder} belongs to a run with another configuration; choose another folder")
    if (folder / "result.json").exists():
        return read_json(folder / "result.json")
    write_json(folder / "run.json", plain)
    return None


def _plain(data: dict[str, Any]) -> dict[str, Any]:
    """Data as JSON gives them back: lists for tuples."""
    return json.loads(json.dumps(data))


def _completed(saved: dict[str, Any], config: TrainConfig) -> dict[str, Any]:
    """What a run wrote, with the defaults of the fields that have come to the configuration since."""
    model = {**_defaults(config.model), **saved.get("model", {})}
    return _plain({**_defaults(config), **saved, "model": model})


def _defaults(config: TrainConfig | ModelConfig) -> dict[str, Any]:
    missing = dataclasses.MISSING
    given = {f.name: f.default for f in dataclasses.fields(config) if f.default is not missing}
    return given | {f.name: f.default_factory() for f in dataclasses.fields(config) if f.default_factory is not missing}


def fit(
    model: LanguageModel,
    config: TrainConfig,
    data: Dataset[dict[str, Tensor]],
    folder: Path,
    *,
    validate: Callable[[], float],
    measure: str,
    name: str,
    show: bool,
) -> tuple[str | None, Any]:
    """Trains in place, from the last checkpoint in `folder` if there is one.

    Args:
        data: item i is the batch of step i.
        validate: returns the number called `validation_<measure>` ("accuracy" or "loss").
        name, show: of the progress bar.

    Returns:
        Why it diverged (None: it did not), and the metrics callback.
    """
    from transformers import Trainer
    from transformers.trainer_callback import PrinterCallback, ProgressCallback

    from halflife.training.callbacks import Bar, Diverged, MarkComplete, Metrics, last_checkpoint
    from halflife.training.data import only

    metrics = Metrics(folder / "metrics.jsonl", validate, measure, config.validate_every)
    bar = Bar(name, metrics)
    optimizer = torch.optim.AdamW(param_groups(model, config.weight_decay), lr=config.learning_rate, betas=config.betas)
    trainer = Trainer(
        model=Objective(model),
        args=_arguments(config, folder),
        train_dataset=data,
        data_collator=only,
        optimizers=(optimizer, None),
        callbacks=[metrics, MarkComplete(), *([bar] if show else [])],
    )
    for default in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(default)
    checkpoint = last_checkpoint(folder / "checkpoints")
    try:
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    except Diverged as error:
        return str(error), metrics
    finally:
        bar.close()
    return None, metrics


def _arguments(config: TrainConfig, folder: Path) -> Any:
    from transformers import TrainingArguments

    log_every = math.gcd(config.save_every, 20)  # a resumed run must log the same averages
    return TrainingArguments(
        output_dir=str(folder / "checkpoints"),
        max_steps=config.steps,
        per_device_train_batch_size=1,  # an item is a whole batch
        train_sampling_strategy="sequential",
        learning_rate=config.learning_rate,
        lr_scheduler_type=config.schedule,
        lr_scheduler_kwargs=config.schedule_options,
        warmup_steps=round(config.warmup * config.steps),
        max_grad_norm=config.clip,
        bf16=config.bf16,
        use_cpu=not torch.accelerator.is_available(),  # else transformers takes bf16 to mean a GPU
        seed=config.seed,
        logging_steps=log_every,
        logging_nan_inf_filter=False,
        save_steps=config.save_every,
        save_total_limit=2,
        remove_unused_columns=False,
        dataloader_pin_memory=torch.cuda.is_available(),
        report_to=[],
        disable_tqdm=True,
    )
