"""Several trained models, and the text that they may read: checkpoints, spectra, decay values, and their data."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halflife.analysis.decay_values import QUANTILES
from halflife.analysis.koopman_survey import koopman_survey, ska_layers
from halflife.analysis.model_spectrum import model_spectrum, post_length, standard_positions, training_position
from halflife.analysis.spectrum import granularity, layer_decays
from halflife.files import read_bytes, read_json, write_json, write_text
from halflife.models import LanguageModel, ModelConfig, io
from halflife.models.convert import SOURCES

BYTES = 256  # the vocabulary of a model that reads bytes
SAVED = ("model", "checkpoint", "channels", "train_length", "positions", "layers")  # of what `survey` gives
COLUMNS = (
    "model", "layer", "state", "mean", *QUANTILES, "half_life", "slowest_half_life", "erased", "horizon", "position",
    "fastest", "slowest", "modes", "too_slow", "too_fast",
)  # fmt: skip


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
        model = io.load_any(folder, device)
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
        check_vocabulary(model.config, ids, tokenizer)
    positions = None if train_length is None else standard_positions(train_length)
    operators = [] if ids is None or not ska_layers(model) else koopman_survey(model, ids)
    shown = model_spectrum(model, ids if layer_decays(model) else None, positions)
    return {"channels": granularity(model), "train_length": train_length, **shown, "operators": operators}


def _train_length(folder: Path) -> int | None:
    """The tokens of the longest sequence that the run in this folder trained on, if its `run.json` says so."""
    run = _object(folder / "run.json")
    tasks = [task for stage in run.get("stages", []) for task in stage]
    lengths = [run.get("context"), *(task.get("length") for task in tasks)]
    return max((length for length in lengths if isinstance(length, int)), default=None)


def checkpoints(folders: Sequence[Path]) -> dict[str, Path]:
    """label → folder of every checkpoint in or below the folders, sorted within each, none twice.

    Checkpoints are those that `models.io.load_any` reads; others below a folder are passed over. Labels are the models'
    names; where two agree, all get their folder's name too, or else are their folders.

    Raises:
        FileNotFoundError: a folder is missing, or there is no checkpoint in it.
        ValueError: a damaged `config.json`.
    """
    names: dict[Path, str] = {}
    for root in folders:
        if not root.is_dir():
            raise FileNotFoundError(f"there is no folder {root}")
        below = {folder: name for folder in _folders(root) if (name := _model_name(folder)) is not None}
        if not below and "model_type" in _config(root):
            below = {root: str(_config(root)["model_type"])}  # loading it says why it cannot be read
        if not below:
            raise FileNotFoundError(
                f"{root} holds no checkpoint (config.json and model.safetensors), nor do its folders"
            )
        known = {folder.resolve() for folder in names}
        names |= {folder: name for folder, name in below.items() if folder.resolve() not in known}
    if not names:
        raise ValueError("name at least one checkpoint or run")
    for labels in (list(names.values()), [f"{name} {folder.name}" for folder, name in names.items()]):
        if len(set(labels)) == len(names):
            return dict(zip(labels, names, strict=True))
    return {str(folder): folder for folder in names}


def _folders(root: Path) -> Iterator[Path]:
    """The folders with weights in or below a folder, and that itself if it says to be a model's."""
    if {"format", "model_type"} & _config(root).keys():
        yield root
    for pattern in ("model.safetensors", "model.safetensors.index.json"):
        yield from (path.parent for path in sorted(root.rglob(pattern)))


def _config(folder: Path) -> dict[str, Any]:
    return _object(folder / "config.json")


def _object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; an empty one if there is no such file, or it holds no object."""
    data = read_json(path) if path.is_file() else None
    return data if isinstance(data, dict) else {}


def _model_name(folder: Path) -> str | None:
    """The name of the model in a checkpoint; None for other folders."""
    config = _config(folder)
    model, kind = config.get("model"), config.get("model_type")
    if "format" in config or kind == "halflife":
        return model.get("name", "custom") if isinstance(model, dict) else "custom"
    return kind if kind in SOURCES else None


def read_ids(files: Sequence[Path], tokenizer: str | None = None) -> Tensor:
    """The token ids `[N]` of a text: its bytes (uint8), or what a tokenizer of transformers makes of it (int64).

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is empty or truncated, or there is no such tokenizer.
    """
    if not files:
        raise ValueError("name a text to read: --text FILE")
    data = b"".join(read_bytes(file) for file in files)
    if tokenizer is None:
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)
    from transformers import AutoTokenizer

    try:
        encoder = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"no tokenizer {tokenizer!r}: it is no folder with one, and cannot be fetched ({reason})"
        ) from error
    text = data.decode("utf-8", errors="replace")
    return torch.tensor(encoder.encode(text, add_special_tokens=False, verbose=False), dtype=torch.long)


def pieces(ids: Tensor, length: int, sequences: int) -> Tensor:
    """At most `sequences` pieces of `ids [N]`, evenly spread, that do not overlap: `[B, T]`, T = min(length, N).

    Raises:
        ValueError: a text or a length below 2 tokens, or fewer than one sequence.
    """
    if length < 2 or sequences < 1:
        raise ValueError(f"need a length of 2 tokens or more and at least 1 sequence; got {length} and {sequences}")
    if len(ids) < 2:
        raise ValueError(f"the text is too short: {len(ids)} token, and there is a past to forget from 2 on")
    length = min(length, len(ids))
    count = min(sequences, len(ids) // length)
    starts = torch.linspace(0, len(ids) - length, count, dtype=torch.float64).long()
    return ids[starts.unsqueeze(1) + torch.arange(length)].long()


def check_vocabulary(config: ModelConfig, ids: Tensor, tokenizer: str | None) -> None:
    """Whether a model can read these ids.

    Raises:
        ValueError: bytes for a model that is not of bytes, or ids beyond its vocabulary.
    """
    if tokenizer is None and config.vocab_size != BYTES:
        raise ValueError(
            f"{config.name} has a vocabulary of {config.vocab_size:,}, and bytes are {BYTES}: "
            "give its tokenizer with --tokenizer NAME_OR_PATH"
        )
    if (largest := int(ids.max())) >= config.vocab_size:
        raise ValueError(
            f"{tokenizer!r} gives token {largest:,}; {config.name} has a vocabulary of {config.vocab_size:,}"
        )


# ------------------------------------------------------------------------------------------------ data


def print_wide(table: Any) -> None:
    """Prints a table of rich; a pipe has no width of its own: there it is as wide as it needs to be."""
    from rich.console import Console

    console = Console()
    (console if console.is_terminal else Console(width=200)).print(table)


def write_tables(result: dict[str, Any], folder: Path) -> list[Path]:
    """Writes what `survey` gives, without operators, as `decays.json` (null: not finite) and, a row a layer and a
    state, `decays.csv`; its spectrum is the base one at T."""
    models = [{key: model[key] for key in SAVED} for model in result["models"]]
    table = StringIO()
    writer = csv.DictWriter(table, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows({"model": model["model"], **row} for model in models for row in table_rows(model))
    files = [folder / "decays.json", folder / "decays.csv"]
    write_json(files[0], finite({**result, "models": models}))
    write_text(files[1], table.getvalue())
    return files


def table_rows(model: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Flat numbers of each layer of one model, and under GateRank those of its slow state as well."""
    position = training_position(model)
    for layer in model["layers"]:
        spectrum = layer["spectra"][str(position)]
        ends = {"position": position, "fastest": min(spectrum["timescales"]), "slowest": max(spectrum["timescales"])}
        yield {**layer, "state": "fast" if "slow" in layer else "", **spectrum, **ends}
        if "slow" in layer:
            yield {"layer": layer["layer"], "state": "slow", **layer["slow"]}


def finite(data: Any) -> Any:
    """The same data with None for numbers that JSON has no word for."""
    if isinstance(data, dict):
        return {key: finite(value) for key, value in data.items()}
    if isinstance(data, list):
        return [finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
