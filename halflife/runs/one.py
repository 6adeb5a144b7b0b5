"""One run: claim a folder, fit a model, measure it, and write the result. Every kind of run shares this skeleton."""

from __future__ import annotations

import math
import shutil
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from halflife.files import CHECKPOINTS, RESULT_JSON, write_json
from halflife.models import LanguageModel, checkpoint
from halflife.models.lm import on_meta
from halflife.models.timescales import granularity, timescales
from halflife.runs.folder import SPECTRUM_JSON, read_result
from halflife.training.checkpoints import CheckpointStore, UnreadableCheckpoint
from halflife.training.config import ExecutionConfig, TrainConfig, rank
from halflife.training.fit import check_run_folder, claim_run_folder, fit
from halflife.training.speed import Speed


@dataclass(frozen=True, kw_only=True)
class CellConfig(TrainConfig):
    """A `TrainConfig` together with the data: everything that determines the numbers of one run."""

    measure: ClassVar[str]  # the validated quantity, "accuracy" (higher is better) or "loss" (lower is better)

    def sequences(self) -> dict[int, float]:
        """Length in tokens → how many sequences of this length the training reads."""
        raise NotImplementedError

    def open(self, show: bool = False) -> ModelRun:
        """The run of this configuration, with its data opened; `show` allows progress bars."""
        raise NotImplementedError


class ModelRun(ABC):
    """The parts in which kinds of runs differ: their data and measurements. `run_one` calls the methods in order."""

    def __init__(self, config: CellConfig) -> None:
        self.config: Any = config

    def new_model(self, resumed: bool) -> LanguageModel:
        """The model before training, or before the weights of a checkpoint if the run is `resumed`."""
        return LanguageModel(self.config.model)

    @property
    @abstractmethod
    def length(self) -> int:
        """Tokens of a sequence, for the size of the state."""

    @property
    @abstractmethod
    def positions(self) -> list[int]:
        """The positions of the time-scales in `spectrum.json`, ascending from 1; none if the model starts trained."""

    @abstractmethod
    def data(self, execution: ExecutionConfig) -> Dataset[dict[str, Tensor]]:
        """The micro-batches of training; see `training.fit.fit`."""

    @abstractmethod
    def validation(self) -> Callable[[nn.Module], float]:
        """A function that takes the `Objective` in training and returns the validated quantity."""

    def before_training(self) -> Speed | None:
        """Measure the machine before the first step. The result, if any, counts tokens per second during training."""
        return None

    @abstractmethod
    def throughput(self, seconds: Mapping[int, float]) -> dict[str, float]:
        """Tokens per second, and related rates, from the seconds of each step by its number; NaN without steps."""

    def save(self, model: LanguageModel, folder: Path) -> None:
        """Write the trained model and its other files into `folder`."""
        checkpoint.save(model, folder)

    @abstractmethod
    def evaluate(self, model: LanguageModel, diverged: bool) -> dict[str, Any]:
        """The measurements after training. `model` is on its device and in evaluation mode."""


def run_one(
    run: ModelRun,
    folder: Path,
    *,
    name: str,
    execution: ExecutionConfig | None = None,
    claimed: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Train, measure and write one model into `folder`. A folder with checkpoints continues from the last whole one.

    A folder that has a result is not trained again; its result is returned. Under torchrun, all processes train one
    model, and the first process writes. `runs.folder` documents the files.

    Args:
        run: the configuration and its data.
        folder: the folder of this run alone.
        name: label of the progress bar.
        execution: memory, processes and display; None for the defaults.
        claimed: called when `run.json` is written, after all settings were checked.

    Returns:
        `{"parameters", "state_size", "tokens_per_second", "validation", …}` and the entries of `run.evaluate`. After a
        divergence "validation" is NaN and "diverged" gives the reason. Processes other than the first return `{}`.

    Raises:
        ValueError: the folder belongs to a run with another configuration, or `run.json` was edited.
        StoppedBySignal: the process received a signal to end and has saved a checkpoint.
    """
    execution, config = execution or ExecutionConfig(), run.config
    data, validate = run.data(execution), run.validation()
    if check_run_folder(config, folder):
        if rank() == 0:
            shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)  # of a process that was killed before it could
        return read_result(folder)
    diverged = metrics = None
    while metrics is None:
        torch.manual_seed(config.seed)
        model = run.new_model(CheckpointStore(folder / CHECKPOINTS).newest is not None)
        initial = timescales(model, run.positions)
        claim_run_folder(config, folder)
        claimed()
        try:
            diverged, metrics = fit(
                model, config, data, folder, validate=validate, measure=config.measure, name=name, execution=execution,
                speed=run.before_training(),
            )  # fmt: skip
        except UnreadableCheckpoint as error:
            warnings.warn(f"{error}; the run continues from an older checkpoint, or from its start", stacklevel=2)
    if execution.fsdp:
        model = _gather_shards(model, config)
    if rank() != 0:
        return {}
    if run.positions:
        pairs = zip(initial, timescales(model.eval(), run.positions), strict=True)
        layers = [{"layer": before.layer, "init": asdict(before), "trained": asdict(after)} for before, after in pairs]
        write_json(folder / SPECTRUM_JSON, {"channels": granularity(model), "layers": layers})
    run.save(model, folder)
    model.to(training_device()).eval()
    result = {
        "parameters": model.num_parameters(),
        "state_size": model.state_size(run.length),
        **run.throughput(metrics.seconds_of_steps()),
        "validation": math.nan if diverged else metrics.validation,
        **run.evaluate(model, diverged is not None),
        **({"diverged": diverged} if diverged else {}),
    }
    write_json(folder / RESULT_JSON, result)
    shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
    return result


def training_device() -> torch.device:
    """The accelerator of this process, or the CPU if there is none."""
    # A build of torch with CUDA names its accelerator on machines without a GPU, too, unless it is asked to check.
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def _gather_shards(model: LanguageModel, config: TrainConfig) -> LanguageModel:
    """An unsharded copy of a model whose parameters are shards. Only the first process gets values."""
    from halflife.training.sharding import gather

    whole = on_meta(config.model)
    if parameters := gather(model):
        whole.load_state_dict(parameters, assign=True)
    return whole
