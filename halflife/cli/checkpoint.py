"""A model and its tokenizer in a folder, for the commands that take one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from halflife.files import read_json
from halflife.models.load import load_any

if TYPE_CHECKING:
    from halflife.data.tokenizers import Tokenizer
    from halflife.models import LanguageModel

# Any of these beside the weights is a tokenizer of transformers.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
BYTES = 256


def load_model(folder: Path) -> LanguageModel:
    """The model in a folder, whoever wrote it, on the CPU; errors as `models.io.load_any`."""

    return load_any(folder)


def load_tokenizer(folder: Path, vocab_size: int) -> Tokenizer:
    """The tokenizer in a folder: one of transformers, or the bytes that `config.json` names or 256 tokens stand for.

    Raises:
        ValueError: there is none though the vocabulary is not of bytes, it cannot be read, or has more ids than the
            model.
    """
    from halflife.data import tokenizers as tokens

    if any((folder / name).exists() for name in TOKENIZER_FILES):
        import halflife.hf  # noqa: F401 (AutoTokenizer asks for the model's configuration)

        try:
            found = tokens.load_tokenizer(folder)
        except Exception as error:  # whatever a damaged file leads to in there
            raise ValueError(f"the tokenizer in {folder} cannot be read: {' '.join(str(error).split())}") from error
    else:
        config = read_json(folder / "config.json")
        name = config.get("tokenizer", "bytes" if vocab_size == BYTES else None)
        if name not in ("bytes", "bytes+eos"):
            raise ValueError(f"{folder} holds no tokenizer, and the model's {vocab_size} tokens are no bytes")
        found = tokens.load_tokenizer(name)
    tokens.check_vocabulary(found, vocab_size)
    return found
