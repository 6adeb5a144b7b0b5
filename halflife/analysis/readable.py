"""The models that the analyses read, ours and those of transformers, and the text for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from halflife.analysis.foreign.model import ForeignModel
from halflife.data.tokenizers import BYTE_VOCABULARY, pieces, read_ids
from halflife.models import LanguageModel
from halflife.models.convert import TOKENIZER

Readable = LanguageModel | ForeignModel
Progress = Callable[[int], object]


def ignore(tokens: int) -> None:
    """Do nothing with the progress of a reading."""


def on_terminal(show: bool) -> dict[str, Any]:
    """The options of a progress bar of rich that draws on stderr, if that is a terminal and `show` is true."""
    from rich.console import Console

    console = Console(stderr=True)
    return {"console": console, "transient": True, "disable": not (show and console.is_terminal)}


def read_text(model: Readable, ids: Tensor, progress: Progress = ignore) -> None:
    """Read ids `[B, T]` from the start of a text, for the hooks that `capture` opened; `progress` counts tokens."""
    ids = ids.to(model.embedding.weight.device)
    if isinstance(model, ForeignModel):
        model.hidden(ids, progress=progress)
    else:
        model.hidden(ids)
        progress(ids.numel())


def layer_kinds(model: Readable) -> list[str]:
    """Say what mixes the tokens of each layer."""
    if isinstance(model, ForeignModel):
        return [" + ".join(block.mixer.kinds) or "no mixer" for block in model.blocks]
    config, layers = model.config, range(len(model.blocks))
    parts = [filter(None, (config.mixer_of(layer), config.beside_of(layer))) for layer in layers]
    return [" + ".join(name for name, _ in mixers) for mixers in parts]


class TextIds:
    """A text as token ids, in `sequences` of `length` tokens that are evenly spread over it.

    Without files there are no ids. The tokenizer, by its name or folder, is that of all models. None takes the one
    beside each model, and bytes where there is none.
    """

    def __init__(self, files: Sequence[Path], tokenizer: str | None, length: int, sequences: int) -> None:
        self.files, self.tokenizer, self.length, self.sequences = files, tokenizer, length, sequences
        self.used: dict[str | None, Tensor] = {}  # tokenizer (None for bytes) → the sequences `[B, T]` for models
        self.first = self._read(tokenizer) if files else None  # errors of the text come before a model is loaded

    def ids_for(self, model: Readable, folder: Path) -> tuple[Tensor | None, str | None]:
        """Return the sequences `[B, T]` for a model, None without a text, and the name of the tokenizer.

        `folder` is the model's folder, or its name on the hub.
        """
        tokenizer = self.tokenizer or _tokenizer_of(model, folder)
        if self.first is None:
            return None, tokenizer
        if tokenizer not in self.used:
            self.used[tokenizer] = self.first if tokenizer == self.tokenizer else self._read(tokenizer)
        return self.used[tokenizer], tokenizer

    def _read(self, tokenizer: str | None) -> Tensor:
        return pieces(read_ids(self.files, tokenizer), self.length, self.sequences)

    @property
    def longest(self) -> int | None:
        """The length of the longest sequences that were read, or None without a text."""
        return max((ids.shape[1] for ids in self.used.values()), default=None)

    @property
    def most(self) -> int:
        """The largest number of sequences that were read."""
        return max((len(ids) for ids in self.used.values()), default=0)


def _tokenizer_of(model: Readable, folder: Path) -> str | None:
    """The tokenizer in the folder of a model, or None for bytes."""
    if model.config.vocab_size == BYTE_VOCABULARY:
        return None
    on_hub = not folder.exists()
    return str(folder) if on_hub or any((folder / name).is_file() for name in TOKENIZER) else None
