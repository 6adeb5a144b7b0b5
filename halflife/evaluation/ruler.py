"""RULER's scores of a model: prompts are read and continued with the model's own state, references are looked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from halflife.evaluation.batched import generate
from halflife.evaluation.harness import Tokenizer
from halflife.models import LanguageModel
from halflife.tasks import ruler


class Ruler(NamedTuple):
    """Scores.

    Attributes:
        rows: one a task and length, `{"task", "length", "haystack", "score", "examples"}`; score is the mean.
        details: one an example, `{"task", "length", "depth", "score"}`; depth as in `tasks.ruler.Example`.
    """

    rows: list[dict[str, Any]]
    details: list[dict[str, Any]]


def evaluate(
    model: LanguageModel,
    tokenizer: Tokenizer,
    tasks: Sequence[str],
    lengths: Sequence[int],
    *,
    examples: int = 20,
    seed: int = 0,
    essay: str | None = None,
    batch_size: int = 4,
    show: bool = False,
) -> Ruler:
    """The fraction of reference strings in what the model writes after each prompt, the likeliest token at a time.

    Nothing is cut: prompts are made so long that they and what is written after them fill the length, and are read
    whole, in pieces. A model whose state has a fixed size takes the same memory for every length.

    Args:
        model: put into evaluation mode for the call; it is used on the device where it is.
        tokenizer: of the model.
        tasks: see `tasks.ruler.names`.
        lengths: tokens of a prompt and its continuation.
        examples: of each task and length; multiples of ten have every depth of a needle equally often.
        seed: of the examples.
        essay: a text to hide needles in, for the tasks that need one.
        batch_size: prompts at once.
        show: draw a progress bar.

    Raises:
        ValueError: no task or length, a number below 1, or, before anything is read, a task and length for which there
            is no example; see `tasks.ruler.example`.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    if not tasks or not lengths:
        raise ValueError("name at least one task and one length in tokens")
    if min(examples, batch_size) < 1:
        raise ValueError(f"examples and batch_size must be at least 1; got {examples} and {batch_size}")

    def make(task: str, length: int, index: int) -> ruler.Example:
        def count(text: str) -> int:
            return len(tokenizer.encode(text))

        return ruler.example(task, length, count, seed=seed, index=index, essay=essay)

    cells = dict.fromkeys((task, length) for task in tasks for length in lengths)
    haystacks = {(task, length): make(task, length, 0).haystack for task, length in cells}
    columns = (TextColumn("{task.description}"), BarColumn(20), TimeRemainingColumn(compact=True))
    result, training = Ruler([], []), model.training
    model.eval()
    try:
        with Progress(*columns, transient=True, disable=not show) as progress:
            bar = progress.add_task("", total=examples * sum(length for _, length in cells))
            for (task, length), haystack in haystacks.items():
                progress.update(bar, description=f"{task} {length}")
                scores = []
                for start in range(0, examples, batch_size):
                    batch = [make(task, length, i) for i in range(start, min(start + batch_size, examples))]
                    scores += _scores(model, tokenizer, batch)
                    result.details.extend(
                        {"task": task, "length": length, "depth": example.depth, "score": score}
                        for example, score in zip(batch, scores[start:], strict=True)
                    )
                    progress.advance(bar, length * len(batch))
                row = {"task": task, "length": length, "haystack": haystack}
                result.rows.append({**row, "score": sum(scores) / examples, "examples": examples})
    finally:
        model.train(training)
    return result


def _scores(model: LanguageModel, tokenizer: Tokenizer, batch: Sequence[ruler.Example]) -> list[float]:
    """Of examples of one task: the fraction of each one's references that its continuation has, whatever their case."""
    prompts = [tokenizer.encode(example.prompt).tolist() for example in batch]
    written = generate(
        model, prompts, batch[0].new_tokens, lambda ids: ids[-1] == tokenizer.eos, vocab_size=tokenizer.vocab_size
    )
    texts = [tokenizer.decode(ids).lower() for ids in written]
    return [
        sum(reference.lower() in text for reference in example.references) / len(example.references)
        for example, text in zip(batch, texts, strict=True)
    ]
