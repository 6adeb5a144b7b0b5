"""`halflife eval`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tyro.conf import Positional

HEADINGS = ("task", "metric", "value", "± stderr")


@dataclass(frozen=True)
class Eval:
    """Evaluate a trained model: tasks of lm-evaluation-harness, and RULER's at any length, made without a network.

    The checkpoint is a folder of halflife or of transformers' save_pretrained, as for `halflife generate`. No text
    is cut unless --max-length says so: a recurrent model takes constant memory. Files: results.json, table.md, and for
    RULER's tasks a heat map, ruler.png.

    examples:
      halflife eval my-checkpoint --tasks wikitext,lambada_openai,hellaswag --limit 200
      halflife eval my-checkpoint --tasks niah vt cwe --lengths 1024 4096 16384 --essay essays.txt
      halflife eval my-checkpoint --tasks my_task --include my-tasks --num-fewshot 2
    """

    checkpoint: Positional[Path]
    """The folder of the model."""
    tasks: tuple[str, ...] = ()
    """Names, separated by commas or spaces. niah_single_1 … vt, cwe, fwe are made here at --lengths (niah: all needles
    for which there is a text); any other is a task, group or tag of lm-evaluation-harness."""
    include: Path | None = None
    """A folder with YAML files of the harness, for tasks of your own."""
    limit: float | None = None
    """Examples a task of the harness at most; below 1, a fraction. Default: all."""
    num_fewshot: int | None = None
    """Examples before the question. Default: the task's own number."""
    max_length: int | None = None
    """Cut texts of the harness to their last tokens, so many. Default: nothing is cut."""
    lengths: tuple[int, ...] = ()
    """Of RULER's tasks: tokens of the prompt and of what is written after it."""
    examples: int | None = None
    """Of RULER's tasks: examples a length. Default: 20."""
    essay: Path | None = None
    """Of RULER's tasks: a text file that needles are hidden in."""
    batch_size: int = 8
    """Texts at once."""
    seed: int | None = None
    """Of the examples. Default: 0 for RULER's tasks, the harness's own, those of published numbers, for others."""
    bf16: bool = False
    """Mixed precision, for a model that was trained in it."""
    device: str | None = None
    """Where to run; by default the GPU if there is one, else the CPU."""
    output: Path | None = None
    """The folder to write. Default: <checkpoint>/eval/<time>."""
    quiet: bool = False
    """No progress bars."""

    OF_RULER = ("lengths", "examples", "essay")
    OF_HARNESS = ("include", "limit", "num_fewshot", "max_length")

    def run(self) -> None:
        import torch

        from halflife.cli.checkpoint import load_model, load_tokenizer

        needles, others = self.split()
        essay = self.essay.read_text(encoding="utf-8", errors="replace") if self.essay else None
        device = torch.device(self.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        model = load_model(self.checkpoint).to(device).eval()
        tokenizer = load_tokenizer(self.checkpoint, model.config.vocab_size)
        output = self.output or self.checkpoint / "eval" / time.strftime("%Y%m%d-%H%M%S")
        found = {**self.about(), "model": model.config.name, "parameters": model.num_parameters(), "rows": []}
        with torch.autocast(device.type, torch.bfloat16, enabled=self.bf16):
            # Written after either part: what one has measured is not lost when the other fails.
            if needles:
                self.needles(found, output, model, tokenizer, needles, essay)
                write(found, output)
            if others:
                self.harness(found, model, tokenizer, others)
                write(found, output)
        print_table(found["rows"])
        if cut := found.get("harness", {}).get("truncated"):
            print(f"{cut} texts were longer than {self.max_length} tokens and have lost their beginning")
        print(f"written to {output}: {', '.join(sorted(file.name for file in output.iterdir()))}")

    def split(self) -> tuple[list[str], list[str]]:
        """Names of RULER's tasks, and of the harness's.

        Raises:
            ValueError: no task, no lengths for RULER's, or a setting that none of the tasks would read.
        """
        from halflife.tasks import ruler

        names = [name for part in self.tasks for name in part.split(",") if name]
        if not names:
            raise ValueError("name at least one task: --tasks wikitext,lambada_openai, or --tasks niah --lengths 1024")
        made = ruler.names(essay=self.essay is not None)
        all_needles = [name for name in made if name.startswith("niah_")]
        names = list(dict.fromkeys(n for name in names for n in (all_needles if name == "niah" else [name])))
        needles = [name for name in names if name in ruler.names()]
        if missing := [name for name in needles if name not in made]:
            raise ValueError(f"{', '.join(missing)}: hidden in a text of yours, --essay FILE")
        others = [name for name in names if name not in needles]
        if needles and not self.lengths:
            raise ValueError(f"{', '.join(needles)}: name at least one length in tokens: --lengths 1024 4096")
        for part, kind, settings in ((needles, "RULER", self.OF_RULER), (others, "the harness", self.OF_HARNESS)):
            unread = [f"--{n.replace('_', '-')}" for n in settings if getattr(self, n) not in (None, ())]
            if unread and not part:
                raise ValueError(f"{', '.join(unread)}: for tasks of {kind}, and none is named")
        return needles, others

    def about(self) -> dict[str, Any]:
        """The settings, and the versions that the numbers depend on."""
        from halflife.runs.sweep import versions

        settings = {name: str(v) if isinstance(v, Path) else v for name, v in dataclasses.asdict(self).items()}
        return {"settings": settings, "versions": versions()}

    def needles(
        self, found: dict[str, Any], output: Path, model: Any, tokenizer: Any, tasks: Sequence[str], essay: str | None
    ) -> None:
        """RULER's tasks: adds "ruler" and rows to `found`, and draws them."""
        from halflife.evaluation import ruler
        from halflife.report.figures.ruler import write_figure

        result = ruler.evaluate(
            model, tokenizer, tasks, self.lengths, examples=20 if self.examples is None else self.examples,
            seed=self.seed or 0, essay=essay, batch_size=self.batch_size, show=not self.quiet,
        )  # fmt: skip
        found["ruler"] = {"rows": result.rows, "details": result.details}
        for row in result.rows:
            where = f"found in {row['length']:,} tokens ({row['haystack']})"
            found["rows"].append({"task": row["task"], "metric": where, "value": row["score"], "stderr": None})
        write_figure(result.details, output)

    def harness(self, found: dict[str, Any], model: Any, tokenizer: Any, tasks: Sequence[str]) -> None:
        """The harness's tasks: adds "harness" and rows to `found`."""
        from halflife.evaluation import harness

        result = harness.evaluate(
            model, tokenizer, tasks, batch_size=self.batch_size, limit=self.limit, num_fewshot=self.num_fewshot,
            include_path=self.include, seed=self.seed, max_length=self.max_length, show=not self.quiet,
        )  # fmt: skip
        kept = ("config", "versions", "n-shot", "n-samples", "truncated", "lm_eval_version")
        found["harness"] = {name: result[name] for name in kept}
        found["rows"] += harness.metric_rows(result)


def write(found: dict[str, Any], output: Path) -> None:
    """results.json, all of it, and table.md, its rows."""
    from halflife.files import write_json, write_text

    write_json(output / "results.json", found)
    lines = [HEADINGS, ("---", "---", "---:", "---:"), *cells(found["rows"])]
    write_text(output / "table.md", "".join(f"| {' | '.join(line)} |\n" for line in lines))


def cells(rows: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Rows as text; how an answer was taken from a text stands after its metric."""
    return [
        (
            row["task"],
            row["metric"] if row.get("filter", "none") == "none" else f"{row['metric']} ({row['filter']})",
            _number(row["value"]),
            "" if row["stderr"] is None else _number(row["stderr"]),
        )
        for row in rows
    ]


def _number(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.4f}" if abs(value) < 10_000 else f"{value:.4g}"


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    """Prints `cells`."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading in ("task", "metric") else "right")
    for row in cells(rows):
        table.add_row(*map(escape, row))
    Console().print(table)
