"""Text that a trained model generates."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch

from halflife.data.corpus import Corpus
from halflife.files import write_text
from halflife.models import checkpoint
from halflife.models.session import Session
from halflife.runs.folder import SAMPLES_TXT

SAMPLE_TOKENS, TEMPERATURE = 400, 0.8  # tokens of a continuation, and the temperature of sampling
PROMPT_TOKENS = 200  # tokens of a prompt from a document


def write_samples(folder: Path, corpus: Corpus, prompts: Sequence[str] = ()) -> Path:
    """Continue prompts with the model in `folder`, and write the texts to its `samples.txt`; returns the file.

    Without prompts, the starts of the first three validation documents are continued.
    """
    model, tokenizer = checkpoint.load(folder).eval(), corpus.tokenizer
    encoded = [tokenizer.encode(prompt) for prompt in prompts] or document_starts(corpus)
    text = []
    for i, ids in enumerate(encoded):
        session = Session(model, encode=lambda s: tokenizer.encode(s).tolist(), decode=tokenizer.decode)
        stop = () if tokenizer.eos is None else (tokenizer.eos,)
        generator = torch.Generator().manual_seed(i)
        session.feed(torch.from_numpy(ids))
        pieces = session.write(SAMPLE_TOKENS, stop=stop, temperature=TEMPERATURE, generator=generator)
        text.append(f"{tokenizer.decode(ids)}⟨here the model begins⟩{''.join(pieces)}\n")
    rule = "-" * 80
    return write_text(folder / SAMPLES_TXT, f"{rule}\n".join(text))


def document_starts(corpus: Corpus) -> list:
    """The first `PROMPT_TOKENS` tokens of up to three validation documents."""
    files = corpus.split("validation").files
    ends = pairwise(files.offsets[:4].tolist())
    return [files.tokens[start : min(end, start + PROMPT_TOKENS)].astype("int64") for start, end in ends]
