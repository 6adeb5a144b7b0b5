"""What the experiments on text share: the corpus, the sizes of the models, and the tables of losses."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from halflife.data.corpus import Corpus, CorpusConfig
from halflife.data.documents import PYTHON
from halflife.data.tokenizers import unit_of
from halflife.files import write_json
from halflife.lab.experiments.base import Experiment, ExperimentSettings
from halflife.models import SIZES, ModelConfig, preset
from halflife.report.intervals import with_interval
from halflife.report.markdown import Rows, models
from halflife.report.table import Table
from halflife.report.tables.comparison import speed
from halflife.report.tables.csv_files import length_table
from halflife.runs.folder import RESULTS_JSON
from halflife.runs.folder import read as read_comparison
from halflife.runs.language_run import LanguageConfig
from halflife.runs.records import mean
from halflife.runs.sweep import Cell
from halflife.training.schedules import schedule

OF_A_WIDTH = ("intermediate_size", "num_heads", "mixer_options")  # sizes that fit one width alone
FINEWEB_EDU = "hf:HuggingFaceFW/fineweb-edu"


@dataclass(frozen=True, kw_only=True)
class LanguageSettings(ExperimentSettings):
    """The sizes, the text and the budget that the models of an experiment share."""

    # hidden_size, num_layers, num_heads: sizes of every model; 0 for those of `size`
    hidden_size: int = 0
    num_layers: int = 0
    num_heads: int = 0
    size: str = ""  # a name of `models.SIZES`; "" for none
    learning_rate: float = 1e-3  # the rate that is tried when the user names none
    # schedule, floor, decay: a name of `training.schedules.SCHEDULES` and its settings
    schedule: str = "cosine"
    floor: float = 0.1
    decay: float = 0.2
    vocab_size: int = 256  # number of token ids of the models
    # sources of a `CorpusConfig`; "python:" is the source of Python's standard library
    text: tuple[str, ...] = (PYTHON,)
    tokenizer: str = "bytes"  # see `CorpusConfig`
    documents: str = "concatenated"  # "packed" or "concatenated", see `CorpusConfig`
    held_out: tuple[float, float] = (0.05, 0.05)  # shares of the documents for validation and for the test
    validation_tokens: int  # tokens of each validation
    test_tokens: int  # tokens of the test
    # digest, text_bytes: SHA-256 and size of the corpus, filled in by `open_data`
    digest: str = ""
    text_bytes: int = 0

    def corpus(self) -> CorpusConfig:
        """The text. Of a data set of the hub, as many tokens are read as the training needs."""
        rows = self.steps * self.batch_size + 1
        streamed = any(source.startswith("hf:") for source in self.text)
        return CorpusConfig(
            sources=self.text, tokenizer=self.tokenizer, context=self.train_length, mode=self.documents,
            fractions=self.held_out, tokens=rows * self.train_length if streamed else None,
        )  # fmt: skip


# On bytes of Python's standard library, to try a recipe; every paper has its own large scale.
SMOKE: dict[str, Any] = {
    "hidden_size": 64, "num_layers": 2, "num_heads": 2, "train_length": 128, "batch_size": 8, "steps": 60,
    "validate_every": 15, "save_every": 100, "validation_tokens": 1 << 13, "test_tokens": 1 << 12,
    "learning_rate": 3e-3,
}  # fmt: skip
SMALL: dict[str, Any] = {
    "hidden_size": 256, "num_layers": 4, "num_heads": 4, "train_length": 256, "batch_size": 4, "steps": 800,
    "bf16": True, "validate_every": 200, "save_every": 100, "validation_tokens": 1 << 14, "test_tokens": 1 << 16,
    "learning_rate": 2e-3,
}  # fmt: skip
# Validation and test at the scale of a paper. No paper gives them.
LARGE: dict[str, Any] = {
    "bf16": True, "held_out": (0.0005, 0.0005), "validate_every": 1000, "save_every": 1000,
    "validation_tokens": 1 << 20, "test_tokens": 1 << 22,
}  # fmt: skip


class LanguageExperiment(Experiment):
    """Language models of equal budget on one text, compared by their loss.

    In all experiments of papers the text is concatenated, and 0.1 % of its documents are held out, which no paper
    gives. The gradient is clipped at 1.
    """

    measure: ClassVar = "loss"
    settings = LanguageSettings
    zero_shot: ClassVar[str] = ""  # name of the paper's tasks after training, for `halflife eval --tasks`; "" for none
    # takes the name of a model and the arguments of `preset`
    build_model: ClassVar[Callable[..., ModelConfig]] = staticmethod(preset)

    def learning_rates(self, model: str, scale: str) -> tuple[float, ...]:
        return (self.scales[scale].learning_rate,)

    def open_data(self, settings: Any) -> Any:
        """The settings with the text's absolute paths or commits, and its digest, which every run checks."""
        corpus = Corpus.open(settings.corpus(), show=False)
        data = corpus.config.to_dict()
        found = {"text": tuple(data["sources"]), "tokenizer": data["tokenizer"]}
        return dataclasses.replace(settings, **found, digest=corpus.digest, text_bytes=corpus.bytes)

    def build_cell(self, settings: Any, cell: Cell) -> LanguageConfig:
        kind, options = schedule(
            settings.schedule, settings.steps, cell.learning_rate, floor=settings.floor, decay=settings.decay
        )
        fields = {"schedule": kind, "schedule_options": options, **self.recipe(cell.model, settings)}
        return settings.run(
            LanguageConfig, cell, **fields, model=self.model(cell.model, settings), data=settings.corpus().to_dict(),
            context=settings.train_length, mode=settings.documents, test_split="test",
        )  # fmt: skip

    def recipe(self, name: str, settings: Any) -> dict[str, Any]:
        """Fields of `TrainConfig` that differ for a model."""
        return {}

    def size_of(self, name: str, settings: Any) -> str:
        """The size of a model, a name of `models.SIZES`; "" for none."""
        return settings.size

    def options(self, name: str, settings: Any) -> dict[str, Any]:
        """Arguments of `preset` that an experiment sets for a model, whatever its size."""
        return {}

    def model(self, name: str, settings: Any) -> ModelConfig:
        """The configuration of a model by its name."""
        sizes: dict[str, Any] = dict(SIZES[size]) if (size := self.size_of(name, settings)) else {}
        given = {key: x for key in ("hidden_size", "num_layers", "num_heads") if (x := getattr(settings, key))}
        if "hidden_size" in given:  # sizes that belong to another width
            sizes = {key: x for key, x in sizes.items() if key not in OF_A_WIDTH}
        if "koopman_mlp" in name.split("+"):  # some sizes have no MLP
            sizes.pop("mlp", None)
        options = self.options(name, settings)
        mixer = {**sizes.pop("mixer_options", {}), **options.pop("mixer_options", {})}
        sizes |= {**given, **options, "vocab_size": settings.vocab_size, "train_length": settings.train_length}
        return self.build_model(name, **sizes, **({"mixer_options": mixer} if mixer else {}))

    def papers(self, settings: Any, names: Sequence[str]) -> dict[str, float | None]:
        """Model → the loss in the paper, nats per token; None where the paper gives none."""
        return dict.fromkeys(names)

    def findings(self, results: dict[str, Any]) -> list[str]:
        """Sentences about the results, for the page."""
        return []

    def summary(self, folder: Path, rows: Rows) -> str:
        settings = self.saved_settings(folder)
        table = loss_table(rows, self.papers(settings, models(rows)))
        text = f"{describe(settings)}\n\n{units(settings)}.\n\n{table}\n"
        if by_length := length_table(read_comparison(folder)):
            text += f"\n{by_length}\n"
        if self.zero_shot:
            text += f"\nThe paper's zero-shot tasks: `halflife eval FOLDER --tasks {self.zero_shot}` for each run.\n"
        return text

    def write_report(self, folder: Path, rows: Rows) -> None:
        """Write `results.json`, then the report of the base class, which reads this file."""
        results = results_by_seed(rows)
        papers = self.papers(self.saved_settings(folder), list(results))
        write_json(folder / RESULTS_JSON, {"results": results, "paper": papers, "findings": self.findings(results)})
        super().write_report(folder, rows)


def results_by_seed(rows: Rows) -> dict[str, dict[str, dict[str, Any]]]:
    """Model → seed → sizes and "test", the loss at the selected learning rate; diverged runs are left out."""
    results: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        if row["selected"] and not math.isnan(row["loss"]):
            sizes = {name: row[name] for name in ("parameters", "state_size", "tokens_per_second")}
            results.setdefault(row["model"], {})[str(row["seed"])] = {**sizes, "test": row["loss"]}
    return results


def loss_table(rows: Rows, papers: Mapping[str, float | None]) -> str:
    """The table of losses in Markdown: a row for each model with its seeds, and with the loss in the paper."""
    table = []
    for name in models(rows):
        runs, paper = {row["seed"]: row for row in rows if row["selected"] and row["model"] == name}, papers[name]
        whole = [run for run in runs.values() if not math.isnan(run["loss"])]
        loss = with_interval([run["loss"] for run in whole], 4) if whole else "–"
        table.append([
            name, f"{next(iter(runs.values()))['parameters']:,}",
            speed(mean(run["tokens_per_second"] for run in whole)),
            ", ".join("diverged" if math.isnan(run["loss"]) else f"{run['loss']:.4f}" for run in runs.values()),
            loss if len(whole) == len(runs) else f"{loss} ({len(whole)} of {len(runs)} seeds)",
            "–" if paper is None else f"{paper:.3f}",
        ])  # fmt: skip
    return Table(["model", "parameters", "tokens/s", "test loss, by seed", "mean", "paper"], table).markdown()


def units(settings: LanguageSettings) -> str:
    """What a loss is here and in a paper, in words."""
    return f"Test loss in nats per {unit_of(settings.tokenizer)}; the paper's is nats per token"


def describe(settings: LanguageSettings) -> str:
    """The text and the budget in words."""
    tokens = settings.steps * settings.batch_size * settings.train_length
    unit = f"{unit_of(settings.tokenizer)}s"
    sizes = [
        f"{settings.num_layers} layers" if settings.num_layers else "",
        f"hidden size {settings.hidden_size}" if settings.hidden_size else settings.size,
        f"{settings.num_heads} heads" if settings.num_heads else "",
    ]
    precision = ", bfloat16 autocast" if settings.bf16 else ""
    return (
        f"Text: {settings.text_bytes:,} bytes (SHA-256 {settings.digest[:12]}…). "
        f"Model: {', '.join(filter(None, sizes))}. "
        f"Training: {settings.steps} steps of {settings.batch_size} × {settings.train_length} {unit} "
        f"({tokens / 1e6:.2f} M){precision}."
    )
