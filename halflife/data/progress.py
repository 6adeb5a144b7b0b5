"""Progress bars of reading: bytes of files, and tokens of a data set of the hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from halflife.data import store
from halflife.data.splits import Advance
from halflife.data.stream import Report, Stream


@contextmanager
def byte_progress(name: str, size: int | None, show: bool) -> Iterator[Advance]:
    """A progress bar of bytes with the remaining time; yields a function that advances it."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(20), DownloadColumn(), TimeRemainingColumn(compact=True))
    with Progress(*columns, transient=True, disable=not show) as progress:
        task = progress.add_task(name, total=size)
        yield lambda done: progress.advance(task, done)


@contextmanager
def token_progress(stream: Stream, show: bool) -> Iterator[Report]:
    """A progress bar of training tokens with the remaining time. The first record also prints an estimate of sizes."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, transient=True, disable=not show) as progress:
        task = progress.add_task("tokens", total=None)

        def report(record: dict[str, Any], tokens: int) -> None:
            counts = record["splits"]["train"]
            if show and progress.tasks[0].total is None and counts["tokens"]:
                ratio, item = counts["bytes"] / counts["tokens"], store.dtype_of(stream.settings.tokenizer.vocab_size)
                progress.print(
                    f"hf:{stream.source.name}: {tokens:,} training tokens are about {tokens * ratio / 1e6:,.0f} MB of "
                    f"text ({ratio:.2f} bytes a token), and {tokens * item.itemsize / 1e6:,.0f} MB in {stream.folder}"
                )
            progress.update(task, total=tokens, completed=min(counts["tokens"], tokens))

        yield report
