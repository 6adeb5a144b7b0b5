"""`halflife tokenizer`."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional


@dataclass(frozen=True)
class Tokenizer:
    """Train a tokenizer on your texts, for `halflife train --tokenizer FOLDER`.

    Models read bytes without one. A tokenizer makes a text three to five times as short, and the model larger. Training
    puts it beside the model, where every command finds it. Files: tokenizer.json and tokenizer_config.json.

    examples:
      halflife tokenizer "docs/**/*.md"
      halflife tokenizer book.txt --kind bpe --vocab-size 2000 --output my-tokenizer
      halflife train mamba2 --data "docs/**/*.md" --tokenizer tokenizer --tokens 300K
    """

    texts: Positional[tuple[str, ...]]
    """Files (.txt .md .jsonl .parquet, any of them .gz), folders, globs in quotes, or hf:owner/name."""
    output: Path = Path("tokenizer")
    """The folder to write, which must be empty or new."""
    kind: str = "byte-level"
    """byte-level: pairs of bytes are merged within words, as in GPT-2; or bpe: pairs of characters, as in Llama."""
    vocab_size: int = 8192
    """Most tokens. Each adds a row to the embedding of the model."""
    field: str = "text"
    """The field of the text in .jsonl, .parquet and data sets."""

    def run(self) -> None:
        from halflife.data.documents import documents
        from halflife.data.tokenizers import train_tokenizer
        from halflife.files import writable

        if self.output.is_dir() and any(self.output.iterdir()):
            raise FileExistsError(f"{self.output} is not empty; choose another --output")
        with writable(self.output):
            tokenizer = train_tokenizer(self.texts, self.kind, self.vocab_size, self.field)
            tokenizer.save(self.output)
        sample = next(documents(self.texts, self.field))[:100_000]
        length = len(sample) / max(1, len(tokenizer.encode(sample)))
        print(f"{tokenizer.vocab_size:,} tokens; one holds {length:.2f} bytes of the first text")
        if tokenizer.vocab_size < self.vocab_size:
            print(f"The texts have no more pairs to merge, so these are fewer than {self.vocab_size:,}.")
        next_command = ["halflife", "train", "mamba2", "--data", *self.texts, "--tokenizer", str(self.output)]
        print(f"written to {self.output}; next: {shlex.join([*next_command, '--tokens', '300K'])}")
