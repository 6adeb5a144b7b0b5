"""A model and its tokenizer in a folder, for the commands that take one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from halflife.data import tokenizers
from halflife.files import CONFIG_JSON, RUN_JSON, read_json
from halflife.models import LanguageModel
from halflife.models.convert import TOKENIZER
from halflife.models.load import check_finite, load_any
from halflife.runs.folder import FolderKind, folder_kind


def load_model(folder: Path, quantize: str = "none") -> LanguageModel:
    """Return the model in a folder of halflife, transformers or fla, on the CPU; see `models.load.load_any`.

    With `quantize` "int8" its weights are int8. A weight that is not finite is a ValueError.
    """
    model = load_any(folder)
    check_finite(model, folder)
    if quantize == "int8":
        from halflife.export import int8

        int8.quantize(model)
    return model


def load_tokenizer(folder: Path, vocab_size: int) -> tokenizers.Tokenizer:
    """Return the tokenizer in a folder, or raise a ValueError that says why there is none for the model.

    It is the bytes that `config.json` names, or one of transformers, or the bytes that a vocabulary of 256 implies.
    """
    name = read_json(folder / CONFIG_JSON).get("tokenizer")
    if name not in tokenizers.OF_BYTES and any((folder / file).exists() for file in TOKENIZER):
        import halflife.hf  # noqa: F401 (AutoTokenizer asks for the model's configuration)

        try:
            tokenizer = tokenizers.load_tokenizer(folder)
        except Exception as error:  # a damaged file can raise anything
            raise ValueError(f"the tokenizer in {folder} cannot be read: {' '.join(str(error).split())}") from error
    else:
        if name is None and (folder / RUN_JSON).is_file() and folder_kind(folder) is FolderKind.TASK_RUN:
            raise ValueError(f"the model in {folder} was trained on a task, whose tokens are numbers and not text")
        name = name or ("bytes" if vocab_size == tokenizers.BYTE_VOCABULARY else None)
        if name not in tokenizers.OF_BYTES:
            raise ValueError(f"{folder} holds no tokenizer, and the model's {vocab_size} tokens are not bytes")
        tokenizer = tokenizers.load_tokenizer(name)
    tokenizers.check_vocabulary(tokenizer, vocab_size)
    return tokenizer


def special_tokens(folder: Path, tokenizer: tokenizers.Tokenizer) -> dict[str, Any]:
    """Return `add_bos_token` and `prefix_token_id` of `evaluation.harness` for the model in a folder.

    The documents of `halflife train` follow an end token, and no other special token precedes them. Other models have
    what their tokenizers add.
    """
    if (folder / RUN_JSON).is_file() and folder_kind(folder) is FolderKind.LANGUAGE_RUN:
        return {"add_bos_token": False, "prefix_token_id": tokenizer.eos}
    return {}
