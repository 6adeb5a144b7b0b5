"""All analyses of `halflife spectrum` on several trained models: spectra, decay values and operators."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from halflife.analysis.capture import ska_layers
from halflife.analysis.foreign.load import has_mixers, is_hub_name, is_known, load_foreign
from halflife.analysis.model_spectrum import LayerSpectrum, model_spectrum, post_length, standard_positions
from halflife.analysis.operators import LayerOperators, measure_operators
from halflife.analysis.readable import Progress, Readable, TextIds, layer_kinds, on_terminal
from halflife.analysis.records import Record
from halflife.data.tokenizers import check_ids
from halflife.files import CONFIG_JSON, RUN_JSON, read_json_object
from halflife.models import LanguageModel
from halflife.models.checkpoint import is_ours
from halflife.models.load import checkpoints, convertible, load_any, without_diverged
from halflife.models.timescales import granularity, layer_decays


class NothingToShow(ValueError):
    """No model has a decay or an operator."""


@dataclass(frozen=True)
class ModelMeasurement(Record):
    """The measurements inside one model."""

    model: str  # its label
    checkpoint: str  # its folder
    channels: str  # what a channel of its decay is, see `granularity`
    train_length: int | None  # T in tokens, or None if it is unknown
    positions: list[int]  # of the base spectra
    layers: list[LayerSpectrum]  # empty for a model without a decay
    operators: list[LayerOperators]  # of its SKA layers; empty without a text
    mixers: list[str]  # what mixes the tokens of each layer, such as "Gated DeltaNet" or "softmax attention"


@dataclass(frozen=True)
class ModelMeasurements(Record):
    """The measurements inside several models."""

    text: list[str]  # the files that were read
    tokenizer: str | None  # its name or folder; None means bytes
    length: int | None  # of a sequence that was read, in tokens; None without a text
    sequences: int  # the number of sequences that were read
    models: list[ModelMeasurement]


def measure_models(
    folders: Sequence[Path],
    text: Sequence[Path] = (),
    *,
    length: int = 2048,
    sequences: int = 8,
    train_length: int | None = None,
    tokenizer: str | None = None,
    device: torch.device | str = "cpu",
    show: bool = False,
) -> ModelMeasurements:
    """Measure every model below the folders, from its weights and, if there is a text, while it reads the text.

    Args:
        folders: checkpoints, runs with checkpoints below them, or names of models on the hub.
        text: files, gzip or plain, which are read one after the other. Without files, only base spectra are measured.
        length: the length of a sequence that is read, in tokens.
        sequences: the number of sequences, evenly spread over the text.
        train_length: T of the positions 1, T, 4T and 16T. None means the length in the model's `run.json` or PoST, or
            else the length that is read.
        tokenizer: the name or folder of a tokenizer of transformers. None takes the tokenizer in the folder of
            each model, and reads bytes where there is none.

    Raises:
        FileNotFoundError: if a folder has no checkpoint, or a file is missing.
        ConnectionError: if the hub cannot be reached.
        ValueError: if a checkpoint or a text is damaged, or if a vocabulary does not fit.
        NothingToShow: if no model has a decay or an operator to show.
    """
    if train_length is not None and train_length < 1:
        raise ValueError(f"a training length has at least 1 token; got {train_length}")
    source = TextIds(text, tokenizer, length, sequences)
    folder_of = find_models(folders)
    models = [_measure(label, folder, source, train_length, device, progress)
              for label, folder, progress in _shown(folder_of, show)]  # fmt: skip
    if not any(model.layers or model.operators for model in models):
        raise NothingToShow(f"there is no decay to show: {', '.join(folder_of)} without one")
    return ModelMeasurements(
        text=[str(file) for file in text], tokenizer=tokenizer, length=source.longest,
        sequences=source.most, models=models,
    )  # fmt: skip


def find_models(folders: Sequence[Path]) -> dict[str, Path]:
    """Return label → folder or name of the models in and below the folders, and of those on the hub.

    The errors are those of `checkpoints` and `without_diverged`.
    """
    hub = [folder for folder in folders if is_hub_name(folder)]
    here = [folder for folder in folders if folder not in hub]
    found = checkpoints(here, lambda kind: convertible(kind) or has_mixers(kind)) if here or not hub else {}
    return without_diverged(found) | {str(name): name for name in hub}


def is_foreign(folder: Path) -> bool:
    """Whether a folder, or a name on the hub, is a model of transformers that is read in place."""
    if is_hub_name(folder):
        return True
    config = read_json_object(folder / CONFIG_JSON)
    return not is_ours(config) and is_known(str(config.get("model_type")))


def load_readable(folder: Path, device: torch.device | str = "cpu") -> Readable:
    """Load a model that the analyses can read: ours, one of transformers in place, or another one that is converted.

    The errors are those of `load_any` and `load_foreign`.
    """
    return load_foreign(folder, device) if is_foreign(folder) else load_any(folder, device)


def _shown(folder_of: dict[str, Path], show: bool) -> Iterator[tuple[str, Path, Progress]]:
    """Yield each model with a function that shows how many tokens it has read."""
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    count = TextColumn("{task.completed:,} tokens")
    columns = (TextColumn("{task.description}"), BarColumn(), count, TimeElapsedColumn())
    with Bars(*columns, **on_terminal(show)) as bars:
        for number, (label, folder) in enumerate(folder_of.items(), 1):
            task = bars.add_task(f"{label} ({number} of {len(folder_of)})", total=None)
            yield label, folder, partial(bars.advance, task)
            bars.remove_task(task)


def _measure(
    label: str, folder: Path, text: TextIds, train_length: int | None, device: torch.device | str, progress: Progress
) -> ModelMeasurement:
    """Load one model and run all analyses, each of which reads the text by itself."""
    model = load_readable(folder, device)
    ids, tokenizer = text.ids_for(model, folder)
    if ids is not None and (layer_decays(model) or ska_layers(model)):
        check_ids(model.config, ids, tokenizer)
    train_length = train_length or _train_length(folder) or post_length(model)
    positions = None if train_length is None else standard_positions(train_length)
    operators: list[LayerOperators] = []
    if ids is not None and isinstance(model, LanguageModel) and ska_layers(model):
        operators = measure_operators(model, ids)
    spectrum = model_spectrum(model, ids if layer_decays(model) else None, positions, progress)
    return ModelMeasurement(
        model=label, checkpoint=str(folder), channels=granularity(model), train_length=train_length,
        positions=spectrum.positions, layers=spectrum.layers, operators=operators, mixers=layer_kinds(model),
    )  # fmt: skip


def _train_length(folder: Path) -> int | None:
    """The length of the longest sequence that the run in this folder trained on, if its `run.json` contains one."""
    run = read_json_object(folder / RUN_JSON, optional=True)
    tasks = [task for stage in run.get("stages", []) for task in stage]
    lengths = [run.get("context"), *(task.get("length") for task in tasks)]
    return max((length for length in lengths if isinstance(length, int)), default=None)
