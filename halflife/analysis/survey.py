"""All analyses of `halflife spectrum` on several trained models: spectra, decay values and operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from halflife.analysis.capture import ska_layers
from halflife.analysis.model_spectrum import LayerSpectrum, model_spectrum, post_length, standard_positions
from halflife.analysis.operators import LayerOperators, measure_operators
from halflife.analysis.records import Record
from halflife.analysis.spectrum import granularity, layer_decays
from halflife.data.tokenizers import check_ids, pieces, read_ids
from halflife.files import RUN_JSON, read_json_object
from halflife.models.load import checkpoints, load_any


@dataclass(frozen=True)
class ModelMeasurement(Record):
    """The measurements inside one model.

    Attributes:
        model: the model's label.
        checkpoint: its folder.
        channels: what a channel of its decay is, see `granularity`.
        train_length: T in tokens, or None if it is unknown.
        positions: the positions of the base spectra.
        layers: the spectra of its layers. It is empty for a model without a decay.
        operators: the operators of its SKA layers. It is empty without a text.
    """

    model: str
    checkpoint: str
    channels: str
    train_length: int | None
    positions: list[int]
    layers: list[LayerSpectrum]
    operators: list[LayerOperators]


@dataclass(frozen=True)
class ModelMeasurements(Record):
    """The measurements inside several models.

    Attributes:
        text: the files that were read.
        tokenizer: the name or folder of the tokenizer. None means bytes.
        length: the length of a sequence that was read, in tokens. None without a text.
        sequences: the number of sequences that were read.
        models: one entry for each model.
    """

    text: list[str]
    tokenizer: str | None
    length: int | None
    sequences: int
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
        folders: checkpoints, or runs with checkpoints below them.
        text: files, gzip or plain, which are read one after the other. Without files, only base spectra are measured.
        length: the length of a sequence that is read, in tokens.
        sequences: the number of sequences, evenly spread over the text.
        train_length: T of the positions 1, T, 4T and 16T. None means the length in the model's `run.json` or PoST, or
            else the length that is read.
        tokenizer: the name or folder of a tokenizer of transformers. None reads bytes.
        device: where the models run.
        show: whether to draw a progress bar.

    Raises:
        FileNotFoundError: if a folder has no checkpoint, or a file is missing.
        ValueError: if a checkpoint or a text is damaged, if a vocabulary does not fit, or if no model has a decay or an
            operator to show.
    """
    from rich.console import Console
    from rich.progress import track

    if train_length is not None and train_length < 1:
        raise ValueError(f"a training length has at least 1 token; got {train_length}")
    folder_of = checkpoints(folders)
    ids = pieces(read_ids(text, tokenizer), length, sequences) if text else None
    models = []
    console = Console(stderr=True)
    hidden = not (show and console.is_terminal)
    for label, folder in track(folder_of.items(), "reading", console=console, transient=True, disable=hidden):
        models.append(_measure(label, folder, ids, tokenizer, train_length, device))
    if not any(model.layers or model.operators for model in models):
        raise ValueError(f"there is no decay to show: {', '.join(folder_of)} without one")
    return ModelMeasurements(
        text=[str(file) for file in text], tokenizer=tokenizer, length=None if ids is None else ids.shape[1],
        sequences=0 if ids is None else len(ids), models=models,
    )  # fmt: skip


def _measure(
    label: str,
    folder: Path,
    ids: Tensor | None,
    tokenizer: str | None,
    train_length: int | None,
    device: torch.device | str,
) -> ModelMeasurement:
    """Load one model and run all analyses, each of which reads the text by itself."""
    model = load_any(folder, device)
    if ids is not None and (layer_decays(model) or ska_layers(model)):
        check_ids(model.config, ids, tokenizer)
    train_length = train_length or _train_length(folder) or post_length(model)
    positions = None if train_length is None else standard_positions(train_length)
    operators = [] if ids is None or not ska_layers(model) else measure_operators(model, ids)
    spectrum = model_spectrum(model, ids if layer_decays(model) else None, positions)
    return ModelMeasurement(
        model=label, checkpoint=str(folder), channels=granularity(model), train_length=train_length,
        positions=spectrum.positions, layers=spectrum.layers, operators=operators,
    )  # fmt: skip


def _train_length(folder: Path) -> int | None:
    """The length of the longest sequence that the run in this folder trained on, if its `run.json` contains one."""
    run = read_json_object(folder / RUN_JSON, optional=True)
    tasks = [task for stage in run.get("stages", []) for task in stage]
    lengths = [run.get("context"), *(task.get("length") for task in tasks)]
    return max((length for length in lengths if isinstance(length, int)), default=None)
