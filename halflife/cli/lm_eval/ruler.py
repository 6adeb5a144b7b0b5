"""RULER's tasks of `halflife.tasks.ruler` as data and scores of lm-evaluation-harness; `tasks/*.yaml` name them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from halflife.cli.checkpoint import load_tokenizer
from halflife.files import CONFIG_JSON
from halflife.models.load import load_any
from halflife.tasks import ruler

LENGTHS = [1024]
SCORE = "found"  # the share of references in the text, over all lengths
BY_LENGTH = tuple(1 << power for power in range(8, 18))  # metrics of single lengths in tokens


def documents(*, name: str, **metadata: Any) -> dict[str, Any]:
    """The examples of a task, as the harness's `custom_dataset`.

    Args:
        name: the task in `halflife.tasks.ruler`.
        **metadata: what `--metadata` and `--model_args` give: "tokenizer" or "pretrained" (a folder, or a tokenizer of
            Hugging Face), "max_seq_lengths", "examples" of each length (20), "seed" (0), and "essay", a text file.

    Raises:
        ValueError: there is no tokenizer to count tokens with, or no example fits a length.
    """
    from datasets import Dataset

    tokenizer = _tokenizer(metadata.get("tokenizer") or metadata.get("pretrained"))
    essay = Path(metadata["essay"]).read_text(encoding="utf-8", errors="replace") if "essay" in metadata else None
    lengths = metadata.get("max_seq_lengths", LENGTHS)
    rows = []
    for length in lengths if isinstance(lengths, list | tuple) else [int(lengths)]:
        for index in range(int(metadata.get("examples", 20))):
            example = ruler.example(
                name, length, lambda text: len(tokenizer.encode(text)), seed=int(metadata.get("seed", 0)), index=index,
                essay=essay,
            )  # fmt: skip
            rows.append({"input": example.prompt, "outputs": list(example.references), "length": length})
    return {"test": Dataset.from_list(rows)}


def _tokenizer(name: Any) -> Any:
    from halflife.data import tokenizers

    if not name:
        raise ValueError("RULER's lengths count tokens: give --model_args pretrained=… or tokenizer=…")
    if (Path(str(name)) / CONFIG_JSON).exists():
        return load_tokenizer(Path(str(name)), load_any(str(name)).config.vocab_size)
    return tokenizers.load_tokenizer(str(name))


def score(document: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
    """The share of the references in a text, ignoring case. Metrics of other lengths are −1."""
    text = results[0].lower()
    value = fmean(reference.lower() in text for reference in document["outputs"])
    return {SCORE: value, **{str(length): value if length == document["length"] else -1.0 for length in BY_LENGTH}}


def mean(values: Sequence[float]) -> float:
    """The mean of the scores, without the −1 of other lengths; −1 if there are none."""
    return fmean(scores) if (scores := [value for value in values if value != -1]) else -1.0
