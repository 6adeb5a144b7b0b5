"""Reports a run to wandb, trackio, MLflow or TensorBoard, through the Trainer's own callbacks (`report_to`).

The Trainer's callbacks report what the Trainer logs: loss, learning rate, norm of the gradient. `Tracking` gives the
same callbacks the other entries of `metrics.jsonl`, and gives their libraries the settings of the run and figures.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from secrets import token_hex
from typing import Any

from transformers import TrainerCallback
from transformers.integrations import integration_utils as known

from halflife.files import flatten, read_json_object, write_json
from halflife.models import LanguageModel
from halflife.training.config import ExecutionConfig, TrainConfig, rank

TRACK_JSON = "track.json"  # in a run's folder: the run's names in wandb and MLflow, for a resumed run
PROJECT = "halflife"
CALLBACKS: dict[str, type[TrainerCallback]] = {
    "wandb": known.WandbCallback, "trackio": known.TrackioCallback, "mlflow": known.MLflowCallback,
    "tensorboard": known.TensorBoardCallback,
}  # fmt: skip
LOGGED = ("loss", "learning_rate", "grad_norm")  # the Trainer reports these itself


def run_name(folder: Path, execution: ExecutionConfig) -> str:
    """The name of a run in a tracker: its folder, with the folder of the sweep that it belongs to."""
    above = execution.sweep or folder
    return folder.absolute().relative_to(above.absolute().parent).as_posix()


@contextmanager
def tracker_environment(folder: Path, execution: ExecutionConfig) -> Iterator[None]:
    """Set environment variables of the trackers that the user has not set, until the end of the block.

    The files of wandb and MLflow go into the folder of the run, or of the sweep. trackio has a place of its own.
    """
    place = (execution.sweep or folder).absolute()
    saved = read_json_object(folder / TRACK_JSON, optional=True)
    defaults = {
        "WANDB_PROJECT": PROJECT, "WANDB_DIR": str(place), "WANDB_RUN_ID": saved.get("wandb", token_hex(6)),
        "WANDB_RESUME": "allow", "MLFLOW_EXPERIMENT_NAME": PROJECT,
        "MLFLOW_TRACKING_URI": f"sqlite:///{place / 'mlflow.db'}",
        "MLFLOW_MAX_LOG_PARAMS": "0",  # of the Trainer's arguments, which may differ when a run is resumed
        **({"MLFLOW_RUN_ID": saved["mlflow"]} if "mlflow" in saved else {}),
    }  # fmt: skip
    if execution.sweep is not None:
        defaults["WANDB_RUN_GROUP"] = place.name
    added = {name: value for name, value in defaults.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


class Tracking(TrainerCallback):
    """Reports settings, metrics, gates, spectra and figures of a run, beside what the Trainer reports.

    `execution` has the trackers, and the function that measures spectra and draws figures.
    """

    def __init__(self, trainer: Any, config: TrainConfig, folder: Path, execution: ExecutionConfig) -> None:
        self.config, self.folder, self.execution = config, folder, execution
        callbacks = trainer.callback_handler.callbacks
        self.reporters: dict[str, Any] = {
            name: next(c for c in callbacks if type(c) is CALLBACKS[name]) for name in execution.track
        }
        self._event: tuple[Any, ...] = ()  # args, state and control of the training
        self._wandb_is_ours = "wandb" in self.reporters and import_module("wandb").run is None

    @contextmanager
    def open(self, step: int) -> Iterator[None]:
        """Open the places where the trackers write, for a training that continues after `step`, and close them."""
        with tracker_environment(self.folder, self.execution):
            if rank() == 0:
                self._open_places(step)
            try:
                yield
            finally:
                self.close()

    def _open_places(self, step: int) -> None:
        if "tensorboard" in self.reporters:
            from torch.utils.tensorboard import SummaryWriter

            place = os.environ.get("TENSORBOARD_LOGGING_DIR")
            path = Path(place, run_name(self.folder, self.execution)) if place else self.folder / "tensorboard"
            self.reporters["tensorboard"].tb_writer = SummaryWriter(str(path), purge_step=step + 1)
        if "mlflow" in self.reporters:
            _create_experiment((self.execution.sweep or self.folder).absolute())

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        self._event = (args, state, control)
        if not state.is_world_process_zero:
            return
        settings = flatten(self.config.to_dict(), "/")
        names: dict[str, str] = {}
        for name, callback in self.reporters.items():
            library = import_module(name)
            if name == "mlflow":
                library.log_params(settings)
                names[name] = library.active_run().info.run_id
            elif name == "tensorboard":
                callback.tb_writer.add_text("run", f"```json\n{json.dumps(settings, indent=1)}\n```")
            else:
                library.config.update(settings, allow_val_change=True)
            if name == "wandb":
                names[name] = library.run.id
        if names:
            write_json(self.folder / TRACK_JSON, names)
        if state.global_step == 0:
            self.observe(kwargs["model"].model, 0)

    def report(self, line: Mapping[str, Any]) -> None:
        """Report the entries of a line of `metrics.jsonl` that the Trainer does not report itself."""
        values = {
            name.replace("validation_", "eval_"): float(value)
            for name, value in flatten(line, "/").items()
            if name not in LOGGED and isinstance(value, (int, float))
        }
        args, state, control = self._event
        for callback in self.reporters.values() if values else ():
            callback.on_log(args, state, control, logs=dict(values))

    def observe(self, model: LanguageModel, step: int) -> None:
        """Report the spectra of the model and their figures. Shards (FSDP) cannot be measured, and are left out."""
        measure: Callable[[LanguageModel], tuple[dict[str, float], dict[str, Any]]] | None = self.execution.observe
        if measure is None or self.execution.fsdp or rank() != 0:
            return
        values, figures = measure(model)
        self.report(values)
        for name, figure in figures.items():
            for tracker, callback in self.reporters.items():
                _send_figure(tracker, callback, name, figure, step)

    def close(self) -> None:
        """End the reports, also after an error. The callbacks ignore a second end."""
        if not self._event:
            return
        for name, callback in self.reporters.items():
            if name != "wandb":
                callback.on_train_end(*self._event)
            elif self._wandb_is_ours and import_module("wandb").run is not None:
                import_module("wandb").finish()


def _send_figure(tracker: str, callback: Any, name: str, figure: Any, step: int) -> None:
    if tracker == "tensorboard":
        callback.tb_writer.add_figure(name, figure, step, close=False)
    elif tracker == "mlflow":
        import_module("mlflow").log_figure(figure, f"{name}/step{step:07d}.png")
    else:
        library = import_module(tracker)
        library.log({name: library.Image(_pixels(figure)), "train/global_step": step})


def _pixels(figure: Any) -> Any:
    """The figure as pixels `[height, width, 3]`, which every library takes."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3]


def _create_experiment(place: Path) -> None:
    """Create the experiment of MLflow's local database, with its figures in `place` and not in the current folder."""
    mlflow = import_module("mlflow")
    if os.environ.get("MLFLOW_TRACKING_URI") != f"sqlite:///{place / 'mlflow.db'}":
        return  # a place of the user's
    name = os.environ["MLFLOW_EXPERIMENT_NAME"]
    if mlflow.get_experiment_by_name(name) is None:
        mlflow.create_experiment(name, artifact_location=(place / "mlartifacts").as_uri())
