"""RULER's scores of a model: the fraction of reference strings in the model's continuations of the prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from halflife.evaluation import evaluating
from halflife.evaluation.batched import generate
from halflife.evaluation.harness import Tokenizer
from halflife.models import LanguageModel
from halflife.tasks import ruler


class Ruler(NamedTuple):
    """RULER's scores of a model.

    Attributes:
        rows: `{"task", "length", "haystack", "score", "stderr", "examples"}` for each task and length; score is the
            mean.
        details: `{"task", "length", "depth", "score"}` for each example; depth as in `tasks.ruler.Example`.
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
    """Return the fraction of reference strings in the model's greedy continuation of each prompt.

    No prompt is truncated. Prompts are made so long that prompt and continuation fill the length, and are read in
    pieces. A model whose state has a fixed size needs the same memory for every length.

    Args:
        model: the model, on its device; it is in evaluation mode during the call.
        tasks: names of tasks, see `tasks.ruler.names`.
        lengths: numbers of tokens of a prompt with its continuation.
        examples: number of examples of each task and length. A multiple of ten has each tenth of depths
            equally often.
        seed: seed of the examples.
        essay: text in which needles are hidden, for the tasks that need one.
        batch_size: prompts in a batch.

    Raises:
        ValueError: no task or length is given, a number is below 1, or no example exists for a task and a length (see
            `tasks.ruler.example`); this is checked before the model reads.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    if not tasks or not lengths:
        raise ValueError("name at least one task and one length in tokens")
    if min(examples, batch_size) < 1:
        raise ValueError(f"examples and batch_size must be at least 1; got {examples} and {batch_size}")

    def make(task: str, length: int, index: int) -> ruler.Example:
        return ruler.example(
            task, length, lambda text: len(tokenizer.encode(text)), seed=seed, index=index, essay=essay
        )

    cells = dict.fromkeys((task, length) for task in tasks for length in lengths)
    haystacks = {(task, length): make(task, length, 0).haystack for task, length in cells}
    columns = (TextColumn("{task.description}"), BarColumn(20), TimeRemainingColumn(compact=True))
    result = Ruler([], [])
    with evaluating(model), Progress(*columns, transient=True, disable=not show) as progress:
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
            found = {"score": sum(scores) / examples, "stderr": standard_error(sum(scores), examples)}
            result.rows.append({**row, **found, "examples": examples})
    return result


def _scores(model: LanguageModel, tokenizer: Tokenizer, batch: Sequence[ruler.Example]) -> list[float]:
    """Return the fraction of each example's references in its continuation, ignoring case. All are of one task."""
    prompts = [tokenizer.encode(example.prompt).tolist() for example in batch]
    written = generate(
        model, prompts, batch[0].new_tokens, lambda ids: ids[-1] == tokenizer.eos, vocab_size=tokenizer.vocab_size
    )
    texts = [tokenizer.decode(ids).lower() for ids in written]
    return [
        sum(reference.lower() in text for reference in example.references) / len(example.references)
        for example, text in zip(batch, texts, strict=True)
    ]


def standard_error(total: float, count: int) -> float:
    """The standard error of a mean of `count` scores in [0, 1], also where none or all are right (Agresti, Coull)."""
    mean = (total + 2) / (count + 4)
    return math.sqrt(mean * (1 - mean) / (count + 4))
