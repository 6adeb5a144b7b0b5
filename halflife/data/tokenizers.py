"""Tokenizers with one small protocol: bytes, or any tokenizer of Hugging Face."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from halflife.data.byte_tokenizer import END, ByteTokenizer, Ids, utf8
from halflife.data.documents import documents
from halflife.data.hub import model_name, unreachable
from halflife.files import read_bytes
from halflife.registry import check_choice

BYTE_VOCABULARY = 256  # vocabulary size of a model of bytes
OF_BYTES = ("bytes", "bytes+eos")  # names of tokenizers whose ids are bytes
KINDS = ("byte-level", "bpe")  # of tokenizers that `train_tokenizer` trains


def unit_of(name: str) -> str:
    """What a token of the tokenizer `name` is, in words: "byte" or "token"."""
    return "byte" if name in OF_BYTES else "token"


@runtime_checkable
class Tokenizer(Protocol):
    """The interface of a tokenizer that a corpus needs."""

    name: str  # argument of `load_tokenizer`
    vocab_size: int  # ids lie in [0, vocab_size)
    eos: int | None  # the id that ends a document, or None
    reads_text: bool  # whether it reads characters, so that bytes that are not UTF-8 are lost

    def encode(self, text: str | bytes) -> np.ndarray:
        """Token ids `[T]` of a text, int64. Special tokens are neither added nor recognised in the text."""
        ...

    def encode_batch(self, texts: Sequence[str | bytes]) -> list[np.ndarray]:
        """`encode` of each text."""
        ...

    def decode(self, ids: Ids) -> str:
        """The text of token ids, without special tokens. Bytes that are not UTF-8 become U+FFFD.

        A later token must not change the text of earlier ones, but for characters and bytes that are incomplete.
        """
        ...

    def fingerprint(self) -> str:
        """A hash of everything that determines the ids."""
        ...

    def save(self, folder: str | Path) -> None:
        """Write the files that `AutoTokenizer` of transformers loads. The folder is made if there is none."""
        ...


class HuggingFaceTokenizer:
    """A tokenizer of transformers, the result of `AutoTokenizer.from_pretrained(name)`."""

    reads_text = True

    def __init__(self, tokenizer: Any, name: str) -> None:
        self.tokenizer, self.name = tokenizer, name
        self.eos: int | None = tokenizer.eos_token_id
        # Ids can have gaps, so the vocabulary may have fewer entries than the largest id plus one.
        self.vocab_size = max(tokenizer.get_vocab().values()) + 1

    def encode(self, text: str | bytes) -> np.ndarray:
        return self.encode_batch([text])[0]

    @cached_property
    def _parallel(self) -> Any:
        """A copy of the Rust tokenizer without truncation, which several threads may call."""
        backend = self.tokenizer.backend_tokenizer
        copy = type(backend).from_str(backend.to_str())
        copy.no_truncation()
        copy.no_padding()
        copy.encode_special_tokens = True  # "<|endoftext|>" in a document is ordinary text
        return copy

    def encode_batch(self, texts: Sequence[str | bytes]) -> list[np.ndarray]:
        if not texts:
            return []
        strings = [utf8(text).decode("utf-8", "replace") for text in texts]
        if self.tokenizer.is_fast:
            encodings = self._parallel.encode_batch_fast(strings, add_special_tokens=False)
            return [np.asarray(encoding.ids, dtype=np.int64) for encoding in encodings]
        encoded = self.tokenizer(
            strings,
            add_special_tokens=False,
            split_special_tokens=True,  # "<|endoftext|>" in a document is ordinary text
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # no warning of texts longer than the context of its model
        )
        return [np.asarray(ids, dtype=np.int64) for ids in encoded["input_ids"]]

    def decode(self, ids: Ids) -> str:
        # Ids that a model has to spare have no text in Rust, and are an error in Python.
        known = [i for i in map(int, ids) if i < self.vocab_size]
        # A clean-up would take spaces out of code, and out of text that a stream has shown already.
        return self.tokenizer.decode(known, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def fingerprint(self) -> str:
        if self.tokenizer.is_fast:
            parts = [self.tokenizer.backend_tokenizer.to_str().encode()]
        else:
            with tempfile.TemporaryDirectory() as folder:
                files = sorted(Path(name) for name in self.tokenizer.save_pretrained(folder))
                parts = [file.read_bytes() for file in files if file.is_file()]
        return hashlib.sha256(b"\0".join([*parts, str(self.eos).encode()])).hexdigest()

    def save(self, folder: str | Path) -> None:
        self.tokenizer.save_pretrained(folder)


Batch = TypeVar("Batch")


def encode_ahead(
    tokenizer: Tokenizer, batches: Iterable[Batch], texts: Callable[[Batch], Sequence[str | bytes]]
) -> Generator[tuple[Batch, list[np.ndarray]]]:
    """Yield each batch with the ids of its texts, in order. Threads encode the next batches, one for each core.

    Rust tokenizers release Python's lock while they encode, so all cores work, also where each text is a long one. A
    few more batches than are used may be read.
    """
    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    waiting: deque[tuple[Batch, Future[list[np.ndarray]]]] = deque()
    pool = ThreadPoolExecutor(workers)
    try:
        for batch in batches:
            waiting.append((batch, pool.submit(tokenizer.encode_batch, texts(batch))))
            if len(waiting) > workers:
                first, ids = waiting.popleft()
                yield first, ids.result()
        while waiting:
            first, ids = waiting.popleft()
            yield first, ids.result()
    finally:
        pool.shutdown(cancel_futures=True)


def load_tokenizer(name_or_path: str | Path, model_vocab_size: int | None = None, *, local: bool = False) -> Tokenizer:
    """Load a tokenizer by name.

    Args:
        name_or_path: "bytes", "bytes+eos" (bytes, and id 256 after each document), a folder with the files of a
            tokenizer, or a name on the Hugging Face Hub. Code from the hub is not run.
        model_vocab_size: vocabulary size of the model that will read the ids; None to skip the check.
        local: whether to take only what is on this machine.

    Raises:
        FileNotFoundError: there is no such tokenizer, neither here nor on the hub.
        ValueError: the tokenizer has more ids than the model.
    """
    name = str(name_or_path)
    of_bytes = name in OF_BYTES
    tokenizer = ByteTokenizer(name == "bytes+eos") if of_bytes else HuggingFaceTokenizer(pretrained(name, local), name)
    if model_vocab_size is not None:
        check_vocabulary(tokenizer, model_vocab_size)
    return tokenizer


def pretrained(name: str, local: bool = False) -> Any:
    """Load a tokenizer of transformers from a folder, or as `owner/name[@revision]` from the hub or the hub's cache.

    The cache alone is read where the hub cannot be reached, or with `local`.
    """
    from transformers import AutoTokenizer
    from transformers.utils import logging

    source, revision = model_name(name) or (name, None)
    reason = None if Path(name).is_dir() else "not on this machine" if local else unreachable(source, revision)
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # no warning that the model beside it is none of transformers
    try:
        return AutoTokenizer.from_pretrained(
            source, revision=revision or "main", trust_remote_code=False, local_files_only=reason is not None
        )
    except (OSError, ValueError) as error:
        reason = reason or str(error).strip().split("\n")[0]
        raise FileNotFoundError(f"there is no tokenizer {name!r}, neither a folder nor on the hub: {reason}") from error
    finally:
        logging.set_verbosity(level)


def train_tokenizer(sources: Sequence[str | Path], kind: str, vocab_size: int, field: str = "text") -> Tokenizer:
    """Train a tokenizer on documents, with the library `tokenizers`.

    Args:
        sources: files, folders, globs or data sets, as of a corpus (`halflife.data.documents`).
        kind: "byte-level", pairs of bytes are merged within words (as in GPT-2), or "bpe", pairs of characters (as in
            Llama), where characters that the texts hardly have are written as bytes. Both write every text.
        vocab_size: most tokens. Texts with few different words give fewer.
        field: the field of the text in records of `.jsonl`, `.parquet` and data sets of the hub.

    Returns:
        The tokenizer; its first token ends a document.
    """
    from tokenizers import Tokenizer as Rust
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    check_choice("kind of tokenizer", kind, KINDS)
    if vocab_size <= BYTE_VOCABULARY:
        raise ValueError(f"a tokenizer has a token for each of {BYTE_VOCABULARY} bytes and one more; got {vocab_size}")
    if kind == "byte-level":
        rust, start = Rust(models.BPE()), pre_tokenizers.ByteLevel.alphabet()
        rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        rust.decoder, special = decoders.ByteLevel(), []
    else:
        rust, start = Rust(models.BPE(byte_fallback=True)), []
        # Not Llama's Metaspace, which writes "▁" for a space, and then reads every "▁" as one.
        rust.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_next")
        rust.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
        special = [f"<0x{byte:02X}>" for byte in range(BYTE_VOCABULARY)]
    room = {"vocab_size": vocab_size, "special_tokens": [END, *special], "initial_alphabet": start}
    characters = max(BYTE_VOCABULARY, vocab_size // 2)
    texts = (text.decode("utf-8", "replace") for text in documents(sources, field))
    rust.train_from_iterator(texts, trainers.BpeTrainer(**room, show_progress=False, limit_alphabet=characters))
    # The trainer takes the tokens of bytes as special ones alone, and those would not be written when ids are decoded.
    whole = json.loads(rust.to_str())
    whole["added_tokens"] = [token for token in whole["added_tokens"] if token["content"] == END]
    rust = Rust.from_str(json.dumps(whole))
    return HuggingFaceTokenizer(PreTrainedTokenizerFast(tokenizer_object=rust, eos_token=END), kind)


def check_vocabulary(tokenizer: Tokenizer, model_vocab_size: int) -> None:
    """Raise a ValueError if the tokenizer has more ids than the model."""
    if tokenizer.vocab_size > model_vocab_size:
        raise ValueError(
            f"the tokenizer {tokenizer.name!r} has {tokenizer.vocab_size} ids, more than the model's vocab_size "
            f"{model_vocab_size}"
        )


def read_ids(files: Sequence[Path], tokenizer: str | None = None) -> Tensor:
    """The token ids `[N]` of the joined text of files; `.gz` files are decompressed.

    Those of a tokenizer of transformers, by its name or folder, are int64. None or "bytes" gives bytes, uint8.

    Raises:
        FileNotFoundError: a file is missing, or there is no such tokenizer.
        ValueError: a file is empty or truncated.
    """
    if not files:
        raise ValueError("name a text to read: --text FILE")
    data = b"".join(read_bytes(file) for file in files)
    if tokenizer is None or tokenizer in OF_BYTES:
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return torch.from_numpy(load_tokenizer(tokenizer).encode(data))


def pieces(ids: Tensor, length: int, sequences: int) -> Tensor:
    """Evenly spaced pieces of a text `ids [N]` that do not overlap: `[B, T]`, B ≤ `sequences`, T = min(length, N)."""
    if length < 2 or sequences < 1:
        raise ValueError(f"need a length of 2 tokens or more and at least 1 sequence; got {length} and {sequences}")
    if len(ids) < 2:
        raise ValueError(f"the text is too short: {len(ids)} token, and there is a past to forget from 2 on")
    length = min(length, len(ids))
    count = min(sequences, len(ids) // length)
    starts = torch.linspace(0, len(ids) - length, count, dtype=torch.float64).long()
    return ids[starts.unsqueeze(1) + torch.arange(length)].long()


def check_ids(config: Any, ids: Tensor, tokenizer: str | None) -> None:
    """Check that a model whose configuration has this `name` and `vocab_size` can read these ids.

    Raises:
        ValueError: the ids are bytes and the model is not of bytes, or an id lies beyond its vocabulary.
    """
    if tokenizer in (None, "bytes") and config.vocab_size != BYTE_VOCABULARY:
        raise ValueError(
            f"{config.name} has a vocabulary of {config.vocab_size:,}, and bytes are {BYTE_VOCABULARY}: "
            "put its tokenizer into its folder, or name it with --tokenizer where the command has this option"
        )
    if (largest := int(ids.max())) >= config.vocab_size:
        raise ValueError(
            f"{tokenizer!r} gives token {largest:,}; {config.name} has a vocabulary of {config.vocab_size:,}"
        )
