"""Tokenizers behind one small protocol: the bytes themselves, or any tokenizer of Hugging Face."""

from __future__ import annotations

import codecs
import hashlib
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from halflife.files import read_bytes
from halflife.models import ModelConfig

BYTES = 256  # the vocabulary of a model that reads bytes
Ids = Iterable[int] | np.ndarray | Tensor  # of one text, `[T]`


@runtime_checkable
class Tokenizer(Protocol):
    """What a corpus needs of a tokenizer.

    Attributes:
        name: by which `load_tokenizer` finds it.
        vocab_size: ids lie in [0, vocab_size).
        eos: the id that ends a document, None if there is none.
        reads_text: whether it takes characters, so that bytes which are no UTF-8 are lost.
    """

    name: str
    vocab_size: int
    eos: int | None
    reads_text: bool

    def encode(self, text: str | bytes) -> np.ndarray:
        """Token ids `[T]` of a text, int64; no special tokens are added, and none is read out of the text."""
        ...

    def encode_batch(self, texts: Sequence[str | bytes]) -> list[np.ndarray]:
        """`encode` of each."""
        ...

    def decode(self, ids: Ids) -> str:
        """The text of token ids, without special tokens; bytes that are no UTF-8 become U+FFFD."""
        ...

    def fingerprint(self) -> str:
        """A hash of all that determines its ids."""
        ...


class ByteTokenizer:
    """Ids 0 … 255 are the bytes; with `end_of_document`, id 256 ends a document."""

    reads_text = False

    def __init__(self, end_of_document: bool = False) -> None:
        self.eos = 256 if end_of_document else None
        self.vocab_size = 256 + end_of_document
        self.name = "bytes+eos" if end_of_document else "bytes"

    def encode(self, text: str | bytes) -> np.ndarray:
        data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        return np.frombuffer(data, dtype=np.uint8).astype(np.int64)

    def encode_batch(self, texts: Sequence[str | bytes]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Ids) -> str:
        return self.to_bytes(ids).decode("utf-8", "replace")

    def to_bytes(self, ids: Ids) -> bytes:
        """The bytes of token ids, without the ends of documents.

        Raises:
            ValueError: an id outside the vocabulary.
        """
        kept = [i for i in map(int, ids) if i != self.eos]
        if wrong := [i for i in kept if not 0 <= i < 256]:
            raise ValueError(f"{wrong[0]} is no id of the tokenizer {self.name!r}, which has {self.vocab_size}")
        return bytes(kept)

    def stream(self) -> ByteStream:
        """A decoder for ids that come one by one."""
        return ByteStream(self)

    def fingerprint(self) -> str:
        return self.name


class ByteStream:
    """Decodes bytes as they come: a character appears when its last byte is here."""

    def __init__(self, tokenizer: ByteTokenizer) -> None:
        self.tokenizer = tokenizer
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Ids) -> str:
        """The characters that are whole after these ids."""
        return self.decoder.decode(self.tokenizer.to_bytes(ids))

    def finish(self) -> str:
        """What is left: U+FFFD for half a character."""
        return self.decoder.decode(b"", final=True)


class HuggingFaceTokenizer:
    """A tokenizer of transformers.

    Args:
        tokenizer: what `AutoTokenizer.from_pretrained` returned.
        name: of the hub, or a folder.
    """

    reads_text = True

    def __init__(self, tokenizer: Any, name: str) -> None:
        self.tokenizer, self.name = tokenizer, name
        self.eos: int | None = tokenizer.eos_token_id
        # Ids may have gaps: their number is then not one more than the largest.
        self.vocab_size = max(tokenizer.get_vocab().values()) + 1

    def encode(self, text: str | bytes) -> np.ndarray:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str | bytes]) -> list[np.ndarray]:
        if not texts:
            return []
        strings = [text.decode("utf-8", "replace") if isinstance(text, bytes) else text for text in texts]
        found = self.tokenizer(
            strings,
            add_special_tokens=False,
            split_special_tokens=True,  # "<|endoftext|>" in a document is text, and ends nothing
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # about texts longer than the context of its model
        )
        return [np.asarray(ids, dtype=np.int64) for ids in found["input_ids"]]

    def decode(self, ids: Ids) -> str:
        return self.tokenizer.decode(list(map(int, ids)), skip_special_tokens=True)

    def fingerprint(self) -> str:
        if self.tokenizer.is_fast:
            parts = [self.tokenizer.backend_tokenizer.to_str().encode()]
        else:
            with tempfile.TemporaryDirectory() as folder:
                files = sorted(Path(name) for name in self.tokenizer.save_pretrained(folder))
                parts = [file.read_bytes() for file in files if file.is_file()]
        return hashlib.sha256(b"\0".join([*parts, str(self.eos).encode()])).hexdigest()


def load_tokenizer(name_or_path: str | Path, model_vocab_size: int | None = None) -> Tokenizer:
    """The tokenizer of this name.

    Args:
        name_or_path: "bytes", "bytes+eos" (bytes, and id 256 after each document), a folder with a tokenizer's files,
            or a name on the Hugging Face Hub; code of the hub is not run.
        model_vocab_size: of the model that will read the ids, None to leave that open.

    Raises:
        FileNotFoundError: there is no such tokenizer here, nor on the hub if it can be reached.
        ValueError: it has more ids than the model.
    """
    name = str(name_or_path)
    tokenizer = ByteTokenizer(name == "bytes+eos") if name in ("bytes", "bytes+eos") else _from_pretrained(name)
    if model_vocab_size is not None:
        check_vocabulary(tokenizer, model_vocab_size)
    return tokenizer


def _from_pretrained(name: str) -> HuggingFaceTokenizer:
    from transformers import AutoTokenizer

    try:
        return HuggingFaceTokenizer(AutoTokenizer.from_pretrained(name, trust_remote_code=False), name)
    except OSError as error:
        reason = str(error).strip().split("\n")[0]
        raise FileNotFoundError(f"there is no tokenizer {name!r}, neither a folder nor on the hub: {reason}") from error


def check_vocabulary(tokenizer: Tokenizer, model_vocab_size: int) -> None:
    """Raises a ValueError if the tokenizer has ids that the model has not."""
    if tokenizer.vocab_size > model_vocab_size:
        raise ValueError(
            f"the tokenizer {tokenizer.name!r} has {tokenizer.vocab_size} ids, more than the model's vocab_size "
            f"{model_vocab_size}"
        )


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


def check_ids(config: ModelConfig, ids: Tensor, tokenizer: str | None) -> None:
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
