"""`halflife eval`."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tyro.conf import Positional

from halflife.cli.options import default_device
from halflife.files import check_writable
from halflife.registry import unknown

OFFLINE = "offline_"  # before the names of RULER's tasks that are made here; the harness has its own niah_…
RULER_OPTIONS = ("examples", "essay")
HARNESS_OPTIONS = ("include", "limit", "num_fewshot", "max_length")
HARNESS_RESULTS = ("config", "versions", "n-shot", "n-samples", "truncated", "lm_eval_version")


@dataclass(frozen=True)
class Eval:
    """Evaluate a trained model: on a text of yours, on lm-evaluation-harness, and on RULER's tasks, made offline.

    A paper's tasks have a name: post-lm, decay-lm, echo-lm, gate-rank-lm, and s-niah for the needles of two papers.

    The checkpoint is a folder of halflife or of transformers' save_pretrained, as for `halflife generate`. Texts keep
    their full length unless --max-length cuts them: a recurrent model takes constant memory. Files: results.json,
    table.md, and for RULER's tasks a heat map, ruler.png.

    examples:
      halflife eval my-checkpoint --text book.txt
      halflife eval my-checkpoint --tasks wikitext,lambada_openai,hellaswag --limit 200
      halflife eval my-checkpoint --tasks post-lm s-niah
      halflife eval my-checkpoint --tasks offline_niah offline_vt --lengths 2048 4096 16384 --essay essays.txt
      halflife eval my-checkpoint --tasks my_task --include my-tasks --num-fewshot 2
    """

    checkpoint: Positional[Path]
    """The folder of the model."""
    tasks: tuple[str, ...] = ()
    """Names, separated by commas or spaces. offline_niah_single_1 … offline_vt, offline_cwe, offline_fwe are RULER's,
    made here at --lengths (offline_niah stands for all needles that have a text). post-lm, decay-lm, echo-lm,
    gate-rank-lm and s-niah are the papers' tasks. Any other name is a task, group or tag of lm-evaluation-harness."""
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
    """For RULER's tasks, ours and the harness's niah_…: lengths in tokens, of the prompt and the answer together. The
    offline tasks need 530 to 2,046 tokens of a model of bytes."""
    examples: int | None = None
    """For offline tasks: examples of a length. Default: 20."""
    essay: Path | None = None
    """For offline tasks: a text file in which needles are hidden."""
    batch_size: int = 8
    """Texts at once."""
    seed: int | None = None
    """Seed of the examples. Default: 0 for offline tasks; for others that of the harness, as in published numbers."""
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

        needles, others = self._split_tasks()
        essay = self.essay.read_text(encoding="utf-8", errors="replace") if self.essay else None
        device = torch.device(default_device(self.device))
        model = load_model(self.checkpoint).to(device).eval()
        tokenizer = load_tokenizer(self.checkpoint, model.config.vocab_size)
        output = self.output or self.checkpoint / "eval" / time.strftime("%Y%m%d-%H%M%S")
        check_writable(output)  # an evaluation of hours must be able to write its results
        settings = {name: str(v) if isinstance(v, Path) else v for name, v in dataclasses.asdict(self).items()}
        settings["text"] = [str(file) for file in self.text]
        result: dict[str, Any] = {
            "settings": settings, "versions": versions(), "model": model.config.name,
            "parameters": model.num_parameters(), "rows": [],
        }  # fmt: skip
        try:
            with torch.autocast(device.type, torch.bfloat16, enabled=self.bf16):
                # The result is written after each part, so that a failure of a later part does not lose an earlier one.
                if self.text:
                    self._add_text(result, model, tokenizer)
                    write_evaluation(result, output)
                if needles:
                    self._add_ruler(result, output, model, tokenizer, needles, essay)
                    write_evaluation(result, output)
                if others:
                    self._add_harness(result, model, tokenizer, others)
                    write_evaluation(result, output)
        finally:
            if result["rows"]:
                print(evaluation_table(result["rows"]).terminal())  # also if they could not be written
            elif not any(output.iterdir()):
                output.rmdir()
                if self.output is None and not any(output.parent.iterdir()):
                    output.parent.rmdir()
        if truncated := result.get("harness", {}).get("truncated"):
            print(f"{truncated} texts were longer than {self.max_length} tokens and have lost their beginning")
        print(f"written to {output}: {', '.join(sorted(file.name for file in output.iterdir()))}")

    def _split_tasks(self) -> tuple[list[str], list[str]]:
        """Return the names of RULER's tasks that are made here, and those of the harness, with the bundles' tasks."""
        from halflife.evaluation import bundles
        from halflife.tasks import ruler

        names = self._names()
        if not names and not self.text:
            raise ValueError(
                "name at least one task or text: --tasks wikitext, --tasks offline_niah --lengths 2048, --text book.txt"
            )
        for name in names:
            if name in (*ruler.names(), "niah") and not name.startswith("niah_"):
                raise ValueError(f"{name} is now {OFFLINE}{name}; a task of the harness keeps its name")
        available = ruler.names(essay=self.essay is not None)
        chosen = [name.removeprefix(OFFLINE) for name in names if name.startswith(OFFLINE)]
        all_needles = [name for name in available if name.startswith("niah_")]
        needles = list(dict.fromkeys(n for name in chosen for n in (all_needles if name == "niah" else [name])))
        if foreign := [name for name in needles if name not in ruler.names()]:
            raise unknown("offline task", f"{OFFLINE}{foreign[0]}", [f"{OFFLINE}{name}" for name in ruler.names()])
        if missing := [f"{OFFLINE}{name}" for name in needles if name not in available]:
            raise ValueError(f"{', '.join(missing)}: these tasks hide needles in a text of yours; give --essay FILE")
        others = bundles.expand([name for name in names if not name.startswith(OFFLINE)])
        if needles and not self.lengths:
            written = ", ".join(f"{OFFLINE}{name}" for name in needles)
            raise ValueError(f"{written}: name at least one length in tokens: --lengths 2048 4096")
        self._check_options(needles, others)
        return needles, others

    def _names(self) -> list[str]:
        return [name for part in self.tasks for name in part.split(",") if name]

    def _check_options(self, needles: Sequence[str], others: Sequence[str]) -> None:
        """Raise a ValueError if an option is given that no task reads."""
        sized = [*needles, *filter(_has_lengths, others)]
        groups = (
            (needles, "offline tasks", RULER_OPTIONS), (others, "tasks of the harness", HARNESS_OPTIONS),
            (sized, "tasks of RULER", ("lengths",)),
        )  # fmt: skip
        for part, kind, options in groups:
            unread = [f"--{name.replace('_', '-')}" for name in options if getattr(self, name) not in (None, ())]
            if unread and not part:
                raise ValueError(f"{', '.join(unread)}: only {kind} read this, and --tasks names none")

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
                error = found[f"{short}_stderr"]
                result["rows"].append({
                    "task": name, "metric": metric, "value": found[key],
                    "stderr": error if math.isfinite(error) else None, "guess": found[f"{short}_guess"],
                })  # fmt: skip

    def _add_ruler(
        self, result: dict[str, Any], output: Path, model: Any, tokenizer: Any, tasks: Sequence[str], essay: str | None
    ) -> None:
        """Measure RULER's tasks, draw them, and add "ruler" and rows to `result`."""
        from halflife.evaluation import ruler
        from halflife.report.figures.ruler import write_figure

        measured = ruler.evaluate(
            model, tokenizer, tasks, self.lengths, examples=20 if self.examples is None else self.examples,
            seed=self.seed or 0, essay=essay, batch_size=self.batch_size, show=not self.quiet,
        )  # fmt: skip
        result["ruler"] = {"rows": measured.rows, "details": measured.details}
        for row in measured.rows:
            task, metric = f"{OFFLINE}{row['task']}", f"found in {row['length']:,} tokens ({row['haystack']})"
            found = {"value": row["score"], "stderr": row["stderr"], "guess": 0.0}  # nothing is found by chance
            result["rows"].append({"task": task, "metric": metric, **found})
        write_figure(measured.details, output)

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
                f"{sized[0]}: the harness counts tokens with a tokenizer of Hugging Face, and this model has another; "
                f"{OFFLINE}{sized[0]} is made here for any tokenizer"
            )
        named = [length for name in self._names() if name in BUNDLES for length in BUNDLES[name].lengths]
        lengths = self.lengths or tuple(dict.fromkeys(named))
        return {"tokenizer": str(self.checkpoint), **({"max_seq_lengths": list(lengths)} if lengths else {})}


def _has_lengths(name: str) -> bool:
    """Whether a task of the harness is one of RULER's, whose texts are made at given lengths."""
    return name.startswith(("niah_", "ruler"))
