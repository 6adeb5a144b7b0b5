"""Several trained models read one text: their checkpoints, the text, and the tables of their decay values."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halflife.analysis.decay_values import QUANTILES, decay_values
from halflife.analysis.koopman_survey import ska_layers
from halflife.analysis.spectrum import granularity, layer_decays
from halflife.files import read_bytes, read_json, write_json, write_text
from halflife.models import ModelConfig, io

BYTES = 256  # the vocabulary of a model that reads bytes
COLUMNS = ("model", "layer", "mean", *QUANTILES, "half_life", "slowest_half_life")


def survey(
    folders: Sequence[Path],
    text: Sequence[Path],
    *,
    length: int = 2048,
    sequences: int = 8,
    tokenizer: str | None = None,
    device: torch.device | str = "cpu",
    show: bool = False,
) -> dict[str, Any]:
    """Reads a text with every model below the folders.

    Args:
        folders: checkpoints, or runs with checkpoints below them.
        text: files, gzip or plain, read one after the other.
        length, sequences: of the pieces that are read, evenly spread over the text.
        tokenizer: name or folder of a tokenizer of transformers; None reads bytes.
        device: where the models run.
        show: whether to draw a progress bar.

    Returns:
        `{"text", "tokenizer", "length", "sequences", "models": [{"model", "checkpoint", "channels", "layers"}]}`;
        "layers" is what `decay_values` gives, empty for a model without a decay.

    Raises:
        FileNotFoundError: no checkpoint in a folder, or no such file.
        ValueError: a damaged checkpoint or text, a vocabulary that does not fit, or no model with a decay or with
            operators, which `koopman_report` shows.
    """
    from rich.console import Console
    from rich.progress import track

    found = checkpoints(folders)
    ids = pieces(read_ids(text, tokenizer), length, sequences)
    models, operators = [], False
    console = Console(stderr=True)
    hidden = not (show and console.is_terminal)
    for label, folder in track(found.items(), "reading", console=console, transient=True, disable=hidden):
        model = io.load(folder, device)
        layers, operators = [], operators or bool(ska_layers(model))
        if layer_decays(model):
            check_vocabulary(model.config, ids, tokenizer)
            layers = decay_values(model, ids)
        models.append({"model": label, "checkpoint": str(folder), "channels": granularity(model), "layers": layers})
    if not operators and not any(model["layers"] for model in models):
        raise ValueError(f"there is no decay to show: {', '.join(found)} without one")
    return {
        "text": [str(file) for file in text], "tokenizer": tokenizer, "length": ids.shape[1], "sequences": len(ids),
        "models": models,
    }  # fmt: skip


def checkpoints(folders: Sequence[Path]) -> dict[str, Path]:
    """label → folder of every checkpoint in or below the folders, sorted within each, none twice.

    Labels are the models' names; where two agree, all get their folder's name too, or else are their folders.

    Raises:
        FileNotFoundError: a folder is missing, or there is no checkpoint in it.
        ValueError: a damaged `config.json`.
    """
    names: dict[Path, str] = {}
    for root in folders:
        if not root.is_dir():
            raise FileNotFoundError(f"there is no folder {root}")
        below = {path.parent: _model_name(path.parent) for path in sorted(root.rglob("model.safetensors"))}
        below = {folder: name for folder, name in below.items() if name is not None}
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


def _model_name(folder: Path) -> str | None:
    """The name of the model in a checkpoint of ours; None for other folders with weights."""
    if not (folder / "config.json").is_file():
        return None
    config = read_json(folder / "config.json")
    if not isinstance(config, dict) or "format" not in config:
        return None
    model = config.get("model")
    return model.get("name", "custom") if isinstance(model, dict) else "custom"


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


# ---------------------------------------------------------------------------------------------- tables


def print_table(result: dict[str, Any]) -> None:
    """Prints what `survey` gives as a table that fits 80 columns, a row a layer."""
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title="decay λ", title_justify="left")
    for heading in ("model", "layer", "median", "quartiles", "half-life", "slowest"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for model in result["models"]:
        label = escape(model["model"])
        for i, layer in enumerate(model["layers"]):
            table.add_row(
                "" if i else label, str(layer["layer"]), f"{layer['median']:.4f}",
                f"{layer['q25']:.4f}–{layer['q75']:.4f}", _tokens(layer["half_life"]),
                _tokens(layer["slowest_half_life"]), end_section=i + 1 == len(model["layers"]),
            )  # fmt: skip
        if not model["layers"]:
            table.add_row(label, "", "no decay", end_section=True)
    print_wide(table)
    print(f"read: {result['sequences']} × {result['length']:,} tokens. half-life: tokens, at the median.")
    print("slowest: half-life of the channel that keeps longest, by its mean log-decay over time.")


def print_wide(table: Any) -> None:
    """Prints a table of rich; a pipe has no width of its own: there it is as wide as it needs to be."""
    from rich.console import Console

    console = Console()
    (console if console.is_terminal else Console(width=200)).print(table)


def _tokens(number: float) -> str:
    if math.isinf(number):
        return "∞"
    return f"{number:,.0f}" if 100 <= number < 1e6 else f"{number:.3g}"


def write_tables(result: dict[str, Any], folder: Path) -> list[Path]:
    """Writes what `survey` gives as `decays.json` (null: not finite) and, without heads, `decays.csv`."""
    table = StringIO()
    writer = csv.DictWriter(table, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows({"model": model["model"], **layer} for model in result["models"] for layer in model["layers"])
    files = [folder / "decays.json", folder / "decays.csv"]
    write_json(files[0], finite(result))
    write_text(files[1], table.getvalue())
    return files


def finite(data: Any) -> Any:
    """The same data with None for numbers that JSON has no word for."""
    if isinstance(data, dict):
        return {key: finite(value) for key, value in data.items()}
    if isinstance(data, list):
        return [finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
