"""`halflife eval`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tyro.conf import Positional

from halflife.cli.options import default_device
from halflife.files import finite, writable

HARNESS_OPTIONS = ("include", "limit", "num_fewshot", "max_length")
HARNESS_RESULTS = ("config", "versions", "n-shot", "n-samples", "truncated", "lm_eval_version")


@dataclass(frozen=True)
class Eval:
    """Evaluate a trained model: on a text of yours and on lm-evaluation-harness.

    A paper's tasks have a name: post-lm, decay-lm, echo-lm, gate-rank-lm, and s-niah for the needles of two papers.

    The checkpoint is a folder of halflife or of transformers' save_pretrained, as for `halflife generate`. Texts keep
    their full length unless --max-length cuts them: a recurrent model takes constant memory. Files: results.json
    and table.md.

    examples:
      halflife eval my-checkpoint --text book.txt
      halflife eval my-checkpoint --tasks wikitext,lambada_openai,hellaswag --limit 200
      halflife eval my-checkpoint --tasks post-lm s-niah
      halflife eval my-checkpoint --tasks my_task --include my-tasks --num-fewshot 2
    """

    checkpoint: Positional[Path]
    """The folder of the model."""
    tasks: tuple[str, ...] = ()
    """Names, separated by commas or spaces: tasks, groups or tags of lm-evaluation-harness, or the papers' tasks
    post-lm, decay-lm, echo-lm, gate-rank-lm and s-niah."""
    text: tuple[Path, ...] = ()
    """Files, each one document, whose bits per byte and perplexity are measured. Files that end in .gz are unpacked."""
    include: Path | None = None
    """A folder with YAML files of the harness, for tasks of your own."""
    limit: float | None = None
    """Most examples of a task of the harness; below 1, a share of them. Default: all."""
    num_fewshot: int | None = None
    """Examples before the question. Default: the number of the task."""
    max_length: int | None = None
    """Cut texts of the harness to their last max_length tokens. Default: texts keep their length."""
    lengths: tuple[int, ...] = ()
    """For RULER's tasks (niah_…): lengths in tokens, of the prompt and the answer together."""
    batch_size: int = 8
    """Texts at once."""
    seed: int | None = None
    """Seed of the examples. Default: that of the harness, as in published numbers."""
    bf16: bool = False
    """Mixed precision, for a model that was trained in it."""
    device: str | None = None
    """The device. Default: the GPU if there is one, else the CPU."""
    output: Path | None = None
    """The folder to write. Default: <checkpoint>/eval/<time>."""
    quiet: bool = False
    """Show no progress bars."""

    def run(self) -> None:
        import torch

        from halflife.cli.checkpoint import load_model, load_tokenizer
        from halflife.report.tables.evaluation import evaluation_table, write_evaluation
        from halflife.runs.versions import versions

        tasks = self._expand_tasks()
        device = torch.device(default_device(self.device))
        model = load_model(self.checkpoint).to(device).eval()
        tokenizer = load_tokenizer(self.checkpoint, model.config.vocab_size)
        output = self.output or self.checkpoint / "eval" / time.strftime("%Y%m%d-%H%M%S")
        settings = {name: str(v) if isinstance(v, Path) else v for name, v in dataclasses.asdict(self).items()}
        settings["text"] = [str(file) for file in self.text]
        result: dict[str, Any] = {
            "settings": settings, "versions": versions(), "model": model.config.name,
            "parameters": model.num_parameters(), "rows": [],
        }  # fmt: skip
        with writable(output):
            try:
                # The result is written after each part, so that a failure of a later part does not lose an earlier one.
                with torch.autocast(device.type, torch.bfloat16, enabled=self.bf16):
                    if self.text:
                        self._add_text(result, model, tokenizer)
                        write_evaluation(result, output)
                    if tasks:
                        self._add_harness(result, model, tokenizer, tasks)
                        write_evaluation(result, output)
            finally:
                if result["rows"]:
                    print(evaluation_table(result["rows"]).terminal())  # also if they could not be written
        if truncated := result.get("harness", {}).get("truncated"):
            print(f"{truncated} texts were longer than {self.max_length} tokens and have lost their beginning")
        print(f"written to {output}: {', '.join(sorted(file.name for file in output.iterdir()))}")

    def _expand_tasks(self) -> list[str]:
        """Return the harness's tasks, with those of the bundles. Check that the given options are read."""
        from halflife.evaluation import bundles

        if not self._names() and not self.text:
            raise ValueError("name at least one task or text: --tasks wikitext, --text book.txt")
        tasks = bundles.expand(self._names())
        for readers, kind, options in (
            (tasks, "tasks of the harness", HARNESS_OPTIONS),
            (list(filter(_has_lengths, tasks)), "tasks of RULER", ("lengths",)),
        ):
            given = [f"--{name.replace('_', '-')}" for name in options if getattr(self, name) not in (None, ())]
            if given and not readers:
                raise ValueError(f"{', '.join(given)}: only {kind} read this, and --tasks names none")
        return tasks

    def _names(self) -> list[str]:
        return [name for part in self.tasks for name in part.split(",") if name]

    def _add_text(self, result: dict[str, Any], model: Any, tokenizer: Any) -> None:
        """Measure the files of --text, and add "text" and rows to `result`."""
        from halflife.data.tokenizers import unit_of
        from halflife.evaluation.language import measure_texts

        unit = unit_of(tokenizer.name)
        result["text"] = measure_texts(model, tokenizer, self.text)
        for name, found in result["text"].items():
            for metric, key, short in (
                ("bits per byte", "bits_per_byte", "bits"), (f"perplexity of a {unit}", "perplexity", "perplexity"),
            ):  # fmt: skip
                result["rows"].append({
                    "task": name, "metric": metric, "value": found[key],
                    "stderr": finite(found[f"{short}_stderr"]), "guess": found[f"{short}_guess"],
                })  # fmt: skip

    def _add_harness(self, result: dict[str, Any], model: Any, tokenizer: Any, tasks: Sequence[str]) -> None:
        """Measure tasks of the harness, and add "harness" and rows to `result`."""
        from halflife.cli.checkpoint import special_tokens
        from halflife.evaluation import bundles, harness

        measured = harness.evaluate(
            model, tokenizer, tasks, batch_size=self.batch_size, limit=self.limit, num_fewshot=self.num_fewshot,
            include_path=self.include, metadata=self._metadata(tokenizer, tasks), seed=self.seed,
            max_length=self.max_length, show=not self.quiet, **special_tokens(self.checkpoint, tokenizer),
        )  # fmt: skip
        result["harness"] = {name: measured[name] for name in HARNESS_RESULTS}
        rows = harness.metric_rows(measured)
        result["rows"] += [*rows, *bundles.averages(self._names(), rows)]

    def _metadata(self, tokenizer: Any, tasks: Sequence[str]) -> dict[str, Any]:
        """What the harness's RULER tasks need to make their texts: lengths, and the tokenizer that counts tokens."""
        from halflife.data.tokenizers import HuggingFaceTokenizer
        from halflife.evaluation.bundles import BUNDLES

        sized = [name for name in tasks if _has_lengths(name)]
        if not sized:
            return {}
        if not isinstance(tokenizer, HuggingFaceTokenizer):
            raise ValueError(
                f"{sized[0]}: the harness counts tokens with a tokenizer of Hugging Face, and this model has another"
            )
        named = [length for name in self._names() if name in BUNDLES for length in BUNDLES[name].lengths]
        lengths = self.lengths or tuple(dict.fromkeys(named))
        return {"tokenizer": str(self.checkpoint), **({"max_seq_lengths": list(lengths)} if lengths else {})}


def _has_lengths(name: str) -> bool:
    """Whether a task of the harness is one of RULER's, whose texts are made at given lengths."""
    return name.startswith(("niah_", "ruler"))
