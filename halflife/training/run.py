"""One run: a model trained on a task, evaluated, and written down."""

from __future__ import annotations

import dataclasses
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halflife.analysis.spectrum import granularity, timescales
from halflife.evaluation.recall import accuracy
from halflife.files import read_json, write_json
from halflife.models import LanguageModel, ModelConfig, io, param_groups
from halflife.tasks import IGNORED, Task
from halflife.tasks import build as build_task


@dataclass(frozen=True, kw_only=True)
class TestSpec:
    """One test: a name and the settings of its task."""

    __test__ = False  # no test case, whatever pytest makes of the name

    name: str
    task: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that determines a run's numbers.

    Attributes:
        model: what is trained.
        task: name of the task.
        stages: the curriculum, settings of the task for each stage; steps are shared equally.
        validation: settings of the task on which the learning rate is chosen.
        tests: what is measured after training.
        steps, batch_size: of training.
        learning_rate, weight_decay, warmup, schedule, clip: of AdamW; `warmup` is a fraction of the steps,
            `schedule` a name of transformers' schedulers.
        betas: AdamW's.
        bf16: mixed precision.
        seed: of weights and data.
        validation_examples, test_examples: examples of a validation and of a test.
        validate_every, save_every: steps.
    """

    model: ModelConfig
    task: str
    stages: tuple[dict[str, Any], ...]
    validation: dict[str, Any]
    tests: tuple[TestSpec, ...]
    steps: int
    batch_size: int
    learning_rate: float
    weight_decay: float = 0.1
    warmup: float = 0.1
    schedule: str = "linear"
    clip: float = 1.0
    betas: tuple[float, float] = (0.9, 0.95)
    bf16: bool = False
    seed: int = 0
    validation_examples: int = 256
    test_examples: int = 256
    validate_every: int = 100
    save_every: int = 200

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "validation_examples", "test_examples", "validate_every", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate must be positive; got {self.learning_rate}")
        for settings in (*self.stages, self.validation, *(test.task for test in self.tests)):
            build_task(self.task, **settings)  # sizes that do not fit are errors now, not after training

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


def run(config: RunConfig, folder: Path, *, name: str, show: bool = True) -> dict[str, Any]:
    """Trains, tests and writes into `folder`; continues from its last checkpoint if it holds one.

    Writes `config.json` and `model.safetensors` (see `models.io`), `run.json`, `metrics.jsonl`, `spectrum.json` and
    `result.json`. A folder that has a result is not run again: its result is returned.

    Args:
        config: what to run.
        folder: its own folder.
        name: for the progress bar.
        show: whether to draw one.

    Returns:
        `{"parameters", "state_floats", "tokens_per_second", "validation", "tests": [{"test", "length", "num_pairs",
        "accuracy", "chance", "guess"}]}`; after a divergence the accuracies are NaN and "diverged" says why.

    Raises:
        ValueError: the folder belongs to a run with another configuration.
    """
    if (folder / "run.json").exists() and read_json(folder / "run.json") != _plain(config):
        raise ValueError(f"{folder} belongs to a run with another configuration; choose another folder")
    if (folder / "result.json").exists():
        return read_json(folder / "result.json")
    write_json(folder / "run.json", _plain(config))
    torch.manual_seed(config.seed)
    model = LanguageModel(config.model)
    positions = sorted({1, *(test.task["length"] for test in config.tests)})
    before = timescales(model, positions)
    diverged, metrics = _train(model, config, folder, name, show)
    model.eval()
    after = timescales(model, positions)
    spectrum = [{"layer": b["layer"], "init": b, "trained": a} for b, a in zip(before, after, strict=True)]
    write_json(folder / "spectrum.json", {"channels": granularity(model), "layers": spectrum})
    length = config.validation["length"]
    result = {
        "parameters": model.num_parameters(),
        "state_floats": model.state_floats(length),
        "tokens_per_second": config.batch_size * length / metrics.seconds_per_step(),
        "validation": float("nan") if diverged else metrics.validation,
        "tests": [_test(model, config, test, diverged is not None) for test in config.tests],
        **({"diverged": diverged} if diverged else {}),
    }
    io.save(model, folder)
    write_json(folder / "result.json", result)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return result


def _plain(config: RunConfig) -> Any:
    """The configuration as JSON gives it back: lists for tuples."""
    import json

    return json.loads(json.dumps(config.to_dict()))


def _test(model: LanguageModel, config: RunConfig, test: TestSpec, diverged: bool) -> dict[str, Any]:
    task = build_task(config.task, **test.task)
    measured = float("nan") if diverged else accuracy(
        model, task, split="test", seed=config.seed, num_examples=config.test_examples
    )  # fmt: skip
    settings = {"length": task.length, "num_pairs": test.task.get("num_pairs")}
    return {"test": test.name, **settings, "accuracy": measured, "chance": task.chance, "guess": task.guess}


def _train(model: LanguageModel, config: RunConfig, folder: Path, name: str, show: bool) -> tuple[str | None, Any]:
    """Trains in place; returns why it diverged (None: it did not) and the metrics callback."""
    from transformers import Trainer
    from transformers.trainer_callback import PrinterCallback, ProgressCallback

    from halflife.training.callbacks import Bar, Diverged, MarkComplete, Metrics, last_checkpoint
    from halflife.training.data import TaskStream, only

    validation: Task = build_task(config.task, **config.validation)

    def validate() -> float:
        return accuracy(
            model, validation, split="validation", seed=config.seed, num_examples=config.validation_examples
        )

    metrics = Metrics(folder / "metrics.jsonl", validate, config.validate_every)
    bar = Bar(name, metrics)
    stages = [build_task(config.task, **stage) for stage in config.stages]
    optimizer = torch.optim.AdamW(param_groups(model, config.weight_decay), lr=config.learning_rate, betas=config.betas)
    trainer = Trainer(
        model=Objective(model),
        args=_arguments(config, folder),
        train_dataset=TaskStream(stages, config.steps, config.batch_size, config.seed),
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


def _arguments(config: RunConfig, folder: Path) -> Any:
    from transformers import TrainingArguments

    log_every = math.gcd(config.save_every, 20)  # a resumed run must log the same averages
    return TrainingArguments(
        output_dir=str(folder / "checkpoints"),
        max_steps=config.steps,
        per_device_train_batch_size=1,  # an item is a whole batch
        train_sampling_strategy="sequential",
        learning_rate=config.learning_rate,
        lr_scheduler_type=config.schedule,
        warmup_steps=round(config.warmup * config.steps),
        max_grad_norm=config.clip,
        bf16=config.bf16,
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
