"""What a trained model writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from halflife.data.corpus import Corpus
from halflife.files import write_text
from halflife.models import checkpoint
from halflife.models.session import Session

LENGTH = 400  # tokens
PROMPT = 200


def write_samples(folder: Path, corpus: Corpus, prompts: Sequence[str] = (), temperature: float = 0.8) -> Path:
    """Continues prompts with the model in `folder`, into its `samples.txt`; returns the file.

    Without prompts, the starts of the first three validation documents are continued.
    """
    model, tokenizer = checkpoint.load(folder).eval(), corpus.tokenizer
    given = [tokenizer.encode(prompt) for prompt in prompts] or _starts(corpus)
    text = []
    for i, ids in enumerate(given):
        session = Session(model, encode=lambda s: tokenizer.encode(s).tolist(), decode=tokenizer.decode)
        stop = () if tokenizer.eos is None else (tokenizer.eos,)
        generator = torch.Generator().manual_seed(i)
        pieces = session.feed(torch.from_numpy(ids)).write(
            LENGTH, stop=stop, temperature=temperature, generator=generator
        )
        text.append(f"{tokenizer.decode(ids)}⟨here the model begins⟩{''.join(pieces)}\n")
    rule = "-" * 80
    path = folder / "samples.txt"
    write_text(path, f"{rule}\n".join(text))
    return path


def _starts(corpus: Corpus) -> list:
    files = corpus.split("validation").files
    starts = files.offsets[: min(3, len(files.offsets) - 1)]
    return [files.tokens[start : start + PROMPT].astype("int64") for start in starts.tolist()]
