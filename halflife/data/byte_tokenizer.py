"""The tokenizer whose ids are the bytes of a text, and its files for transformers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from halflife.files import write_json

END = "<|endoftext|>"  # the text of id 256, for transformers
UNKNOWN = "\ufffd".encode()  # what stands for an id without a byte
Ids = Iterable[int] | np.ndarray | Tensor  # token ids of one text, `[T]`


def utf8(text: str | bytes) -> bytes:
    """Return the text as bytes. Half a surrogate pair, which JSON can contain but UTF-8 cannot, becomes three bytes."""
    return text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text


class ByteTokenizer:
    """Ids 0 … 255 are the bytes. With `end_of_document`, id 256 ends a document."""

    reads_text = False

    def __init__(self, end_of_document: bool = False) -> None:
        self.eos = 256 if end_of_document else None
        self.vocab_size = 256 + end_of_document
        self.name = "bytes+eos" if end_of_document else "bytes"

    def encode(self, text: str | bytes) -> np.ndarray:
        return np.frombuffer(utf8(text), dtype=np.uint8).astype(np.int64)

    def encode_batch(self, texts: Sequence[str | bytes]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Ids) -> str:
        return self.to_bytes(ids).decode("utf-8", "replace")

    def to_bytes(self, ids: Ids) -> bytes:
        """The bytes of token ids; ids that end documents are skipped.

        Ids beyond the vocabulary, which a model may have to spare, are written as U+FFFD.

        Raises:
            ValueError: an id is negative.
        """
        values = [i for i in map(int, ids) if i != self.eos]
        if min(values, default=0) < 0:
            raise ValueError(f"a token id is at least 0; got {min(values)}")
        return b"".join(bytes([i]) if i < 256 else UNKNOWN for i in values)

    def fingerprint(self) -> str:
        return self.name

    def save(self, folder: str | Path) -> None:
        """Write the files that `AutoTokenizer` of transformers loads, into a folder that is made if there is none."""
        folder = Path(folder)
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        vocabulary = {mark: i for i, mark in enumerate(_byte_marks())}
        model: dict[str, Any] = {"type": "BPE", "vocab": vocabulary, "merges": []}
        settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        added = []
        if self.eos is not None:
            flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            added = [{"id": self.eos, "content": END, "special": True, **flags}]
            settings["eos_token"] = END
        parts = {"pre_tokenizer": level, "decoder": level, "normalizer": None, "post_processor": None}
        lengths = {"truncation": None, "padding": None}
        whole = {"version": "1.0", **lengths, "added_tokens": added, **parts, "model": model}
        write_json(folder / "tokenizer.json", whole)
        write_json(folder / "tokenizer_config.json", settings)


def _byte_marks() -> list[str]:
    """The characters of the 256 bytes in byte-level BPE. Printable bytes stand for themselves."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(i if i in printable else next(others)) for i in range(256)]
