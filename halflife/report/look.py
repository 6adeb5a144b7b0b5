"""The memory lens with its page: `halflife.look`, and what `halflife look` reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halflife.analysis.look import Lens
from halflife.analysis.look import look as measure
from halflife.analysis.look.lens import Head
from halflife.analysis.readable import Progress, Readable, ignore
from halflife.evaluation import evaluating
from halflife.extras import require
from halflife.files import RUN_JSON, read_bytes, read_json_object, write_text
from halflife.models import LanguageModel
from halflife.report.page.look import BUDGET, Pair, look_data, look_page, typical_heads
from halflife.runs.folder import REPORT_HTML
from halflife.tasks import build, stream_seed

REPORT = f'<p class="hint">The curves of all models are in <a href="{REPORT_HTML}">the report</a>.</p>\n'


@dataclass(frozen=True)
class Look(Lens):
    """A lens that shows itself in notebooks, and that `save` writes as a page."""

    tokens: tuple[str, ...] = ()  # what is written for each token
    title: str = "Memory lens"  # the title of the page
    pairs: tuple[Pair, ...] = ()  # the pairs of a recall task in the text
    numbers: bool = field(default=False, repr=False)  # whether tokens are shown as their ids

    def html(self, chosen: Sequence[Head] = (), progress: Progress = ignore, above: str = "") -> str:
        """The page, with the numbers of the `chosen` heads in any case, and with the HTML `above` the lens.

        `progress` is called with 1 for each head.
        """
        return look_page(self.title, self.data(chosen, progress), above)

    def data(self, chosen: Sequence[Head] = (), progress: Progress = ignore, budget: int = BUDGET) -> dict[str, Any]:
        """What the page draws, as JSON, in about `budget` bytes."""
        return look_data(
            self, self.tokens, ids=self.numbers, chosen=chosen, pairs=self.pairs, budget=budget, progress=progress
        )

    def save(self, path: str | Path, chosen: Sequence[Head] = (), progress: Progress = ignore) -> Path:
        """Write the page of `html`, and return its path. It links to the report of a run in the same folder."""
        report = REPORT * (Path(path).parent / REPORT_HTML).is_file()
        return write_text(Path(path), self.html(chosen, progress, report))

    def picture(self, path: str | Path) -> Path:
        """Write what is left at the last token, in the slowest, the median and the fastest head, as .png or .svg."""
        require("a picture of a lens", "matplotlib", "PIL")
        from halflife.report.look_picture import write_picture

        write_picture(next(self._scenes(1)), Path(path))
        return Path(path)

    def film(self, path: str | Path) -> Path:
        """Write an animation of ten seconds in which the cursor moves across the text, as .webp, .png or .gif."""
        require("a film of a lens", "matplotlib", "PIL")
        from halflife.report.look_picture import FRAMES, write_film

        write_film(self._scenes(FRAMES), Path(path))
        return Path(path)

    def _scenes(self, count: int) -> Iterator[Any]:
        from halflife.report.look_picture import scenes

        return scenes(self, self.tokens, self.title, self.numbers, typical_heads(self), count)

    def _repr_html_(self) -> str:
        return (
            f'<iframe title="{escape(self.title)}" srcdoc="{escape(self.html())}" '
            'style="width:100%;height:640px;border:1px solid #8888"></iframe>'
        )


def look(
    model: Readable, ids: Tensor | Sequence[int], *, tokenizer: Any = None, documents: Sequence[int] | None = None,
    title: str = "Memory lens", pairs: Sequence[Pair] = (), progress: Progress = ignore,
) -> Look:  # fmt: skip
    """Let a model read a text, and show what its state keeps of every token and what every token reads.

    Args:
        model: a language model of halflife, or one of others that `analysis.look.load_for_lens` loads.
        ids: the tokens of the text, `[T]`.
        tokenizer: what has `decode`, for the page. None shows the ids.
        documents: the number of tokens of each document in the text, each of which is read without memory of the
            others. None is a single document.
        title: the title of the page.
        pairs: the pairs of a recall task, which the page marks.
        progress: is called with 1 for each layer of each document that is read.

    Returns:
        The lens. `lens[layer, head]` has all numbers of a head, and `lens.save("look.html")` writes the page.
    """
    ids = torch.as_tensor(ids).reshape(-1)
    lens = measure(model, ids, documents=documents, progress=progress)
    written = [str(i) for i in ids.tolist()] if tokenizer is None else [decoded(tokenizer, i) for i in ids.tolist()]
    return Look(
        lens.model, lens.ids, lens.documents, lens.heads, lens.refused, tokens=tuple(written), title=title,
        pairs=tuple(pairs), numbers=tokenizer is None,
    )  # fmt: skip


LIVE_BYTES = 400_000  # of the numbers of heads, at every change of a text that is typed


def looker(model: Readable, tokenizer: Any) -> Callable[[Sequence[int]], dict[str, Any]]:
    """A function that returns what the page of a lens draws of token ids, small enough for a text that is typed."""
    return lambda ids: look(model, ids, tokenizer=tokenizer).data(budget=LIVE_BYTES)


def decoded(tokenizer: Any, token: int) -> str:
    """The text of one token. A part of a character is a dot."""
    text = tokenizer.decode([token])
    return "·" if "\ufffd" in text else text


def read_text(files: Sequence[Path], tokenizer: Any, tokens: int) -> tuple[Tensor, list[int]]:
    """The first ids of files, at most `tokens`, and the number of tokens of each file. Each file is a document."""
    documents: list[Tensor] = []
    for file in files:
        ids = torch.from_numpy(tokenizer.encode(read_bytes(file))[: tokens - sum(map(len, documents))])
        if len(ids):
            documents.append(ids)
    if not documents:
        raise ValueError(f"there is no token to read in {', '.join(map(str, files))}")
    return torch.cat(documents).long(), [len(one) for one in documents]


def read_task(model: Readable, folder: Path, tokens: int | None = None) -> tuple[Tensor, list[Pair], str]:
    """A sequence of the task that a run was validated on, its pairs with the model's answers, and the task's name.

    `tokens` is the length of the sequence; None means that of the validation. Other folders are a FileNotFoundError.
    """
    run = read_json_object(folder / RUN_JSON, optional=True)
    tasks = run.get("validation")
    if not tasks or "name" not in tasks[0] or not isinstance(model, LanguageModel):
        raise FileNotFoundError(f"{folder} does not say what its model was trained on; give --text FILE")
    length = {"length": tokens} if tokens is not None and "length" in tasks[0] else {}
    batch = build(**{**tasks[0], **length}).generate(1, stream_seed("test", 0))
    with torch.no_grad(), evaluating(model):
        logits, _ = model(batch.inputs.to(model.embedding.weight.device))
    return batch.inputs[0], find_pairs(batch.inputs[0], batch.labels[0], logits[0].float().cpu()), tasks[0]["name"]


def find_pairs(inputs: Tensor, labels: Tensor, logits: Tensor) -> list[Pair]:
    """The questions of a sequence whose key and value stand next to each other before it.

    `inputs [T]` are token ids, `labels [T]` the right answers, negative where nothing is asked, and `logits` those of
    the model, `[T, vocabulary]`.
    """
    pairs, chances = [], logits.softmax(-1)
    for asked in (labels >= 0).nonzero().flatten().tolist():
        value, before = int(labels[asked]), inputs[:asked]
        there = (before[:-1] == inputs[asked]) & (before[1:] == value)
        if there.any():
            written = int(there.nonzero().max()) + 1
            known = int(logits[asked].argmax()) == value
            pairs.append(Pair(written, asked, str(value), round(float(chances[asked, value]), 4), known))
    return pairs
