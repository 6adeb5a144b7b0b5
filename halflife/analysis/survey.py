"""Several trained models, and the text that they may read: checkpoints, spectra, decay values, and their data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halflife.analysis.model_spectrum import model_spectrum, post_length, standard_positions
from halflife.analysis.operators import koopman_survey, ska_layers
from halflife.analysis.spectrum import granularity, layer_decays
from halflife.data.tokenizers import check_ids, pieces, read_ids
from halflife.files import read_json_object
from halflife.models import LanguageModel
from halflife.models.load import checkpoints, load_any


def survey(
    folders: Sequence[Path],
    text: Sequence[Path] = (),
    *,
    length: int = 2048,
    sequences: int = 8,
    train_length: int | None = None,
    tokenizer: str | None = None,
    device: torch.device | str = "cpu",
    show: bool = False,
) -> dict[str, Any]:
    """Looks at every model below the folders, and lets it read a text if there is one.

    Args:
        folders: checkpoints, or runs with checkpoints below them.
        text: files, gzip or plain, read one after the other; none: base spectra alone.
        length, sequences: of the pieces that are read, evenly spread over the text.
        train_length: T of the positions 1, T, 4T and 16T; None means what the model's `run.json` or its PoST say, or
            else the length that is read.
        tokenizer: name or folder of a tokenizer of transformers; None reads bytes.
        device: where the models run.
        show: whether to draw a progress bar.

    Returns:
        `{"text", "tokenizer", "length", "sequences", "models": […]}`, a dict a model: "model", "checkpoint",
        "channels", "train_length" (None: unknown), "positions" and "layers" of `model_spectrum`, empty for a model
        without a decay, and "operators", what `koopman_survey` gives, empty without a text.

    Raises:
        FileNotFoundError: no checkpoint in a folder, or no such file.
        ValueError: a damaged checkpoint or text, a vocabulary that does not fit, or no model with a decay or with
            operators, which `koopman_report` shows.
    """
    from rich.console import Console
    from rich.progress import track

    if train_length is not None and train_length < 1:
        raise ValueError(f"a training length has at least 1 token; got {train_length}")
    found = checkpoints(folders)
    ids = pieces(read_ids(text, tokenizer), length, sequences) if text else None
    models = []
    console = Console(stderr=True)
    hidden = not (show and console.is_terminal)
    for label, folder in track(found.items(), "reading", console=console, transient=True, disable=hidden):
        model = load_any(folder, device)
        known = train_length or _train_length(folder) or post_length(model)
        models.append({"model": label, "checkpoint": str(folder), **_findings(model, ids, tokenizer, known)})
    if not any(model["layers"] or model["operators"] for model in models):
        raise ValueError(f"there is no decay to show: {', '.join(found)} without one")
    read = {} if ids is None else {"length": ids.shape[1], "sequences": len(ids)}
    return {
        "text": [str(file) for file in text], "tokenizer": tokenizer, "length": None, "sequences": 0, **read,
        "models": models,
    }  # fmt: skip


def _findings(
    model: LanguageModel, ids: Tensor | None, tokenizer: str | None, train_length: int | None
) -> dict[str, Any]:
    """All analyses of one model; each reads the text by itself."""
    if ids is not None and (layer_decays(model) or ska_layers(model)):
        check_ids(model.config, ids, tokenizer)
    positions = None if train_length is None else standard_positions(train_length)
    operators = [] if ids is None or not ska_layers(model) else koopman_survey(model, ids)
    shown = model_spectrum(model, ids if layer_decays(model) else None, positions)
    return {"channels": granularity(model), "train_length": train_length, **shown, "operators": operators}


def _train_length(folder: Path) -> int | None:
    """The tokens of the longest sequence that the run in this folder trained on, if its `run.json` says so."""
    run = read_json_object(folder / "run.json", optional=True)
    tasks = [task for stage in run.get("stages", []) for task in stage]
    lengths = [run.get("context"), *(task.get("length") for task in tasks)]
    return max((length for length in lengths if isinstance(length, int)), default=None)


# ------------------------------------------------------------------------------------------------ data
