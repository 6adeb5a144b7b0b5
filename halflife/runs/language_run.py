"""A run on text: a language model trained on a corpus and evaluated by length."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from halflife.data.corpus import Corpus, CorpusConfig, Split, bits_per_byte
from halflife.data.paths import absolute_paths, relative_paths
from halflife.data.tokenizers import ByteTokenizer, check_vocabulary
from halflife.evaluation import evaluating
from halflife.evaluation.language import by_position, document_loss, octave_means, perplexity
from halflife.models import LanguageModel, checkpoint
from halflife.packing import Packing
from halflife.registry import check_least
from halflife.runs.one import CellConfig, ModelRun, training_device
from halflife.tasks import IGNORED
from halflife.training.carried import require_constant_state
from halflife.training.config import ExecutionConfig, rank, world_size
from halflife.training.estimate import model_costs
from halflife.training.fit import Objective
from halflife.training.speed import Speed, peak_rate
from halflife.training.start import freeze, load_start

LENGTH_MULTIPLES = (1, 2, 4, 8, 16)  # of the training length
MEASURED_TOKENS = 1024  # tokens of rows that a measurement reads at once
COUNTED_LENGTH = 16  # tokens; shorter rows count as so many in the tokens of a measurement, because each costs a step


@dataclass(frozen=True, kw_only=True)
class LanguageConfig(CellConfig):
    """Everything that determines the numbers of a run on text.

    Attributes:
        digest: SHA-256 of the corpus: its text, tokenizer and splits.
        data: the fields of the `CorpusConfig` that opens the corpus (`CorpusConfig.to_dict`).
        context: tokens of a row.
        mode: "packed", "concatenated" or "continued", see `halflife.data.batches`.
        validation_tokens: tokens of the validation split that each validation during training reads.
        test_tokens: tokens that each measurement after training reads.
        test_split: the split that the measurements after training read.
        start: the folder of the weights from which training starts, or None for new weights.
        start_digest: SHA-256 of these weights.
        freeze: patterns of the names of parameters that are not trained.
    """

    measure: ClassVar[str] = "loss"

    digest: str
    data: dict[str, Any]
    context: int
    mode: str = "packed"
    validation_tokens: int = 1 << 16
    test_tokens: int = 1 << 20
    test_split: str = "validation"
    start: str | None = None
    start_digest: str | None = None
    freeze: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(context=self.context, validation_tokens=self.validation_tokens, test_tokens=self.test_tokens)

    def portable(self, saved: dict[str, Any], folder: Path) -> dict[str, Any]:
        # A relative path is one that `run.json` holds, because those of a configuration are absolute. The folder of the
        # cache is a matter of the machine.
        return {**saved, "data": {**relative_paths(absolute_paths(saved["data"], folder), folder), "cache_dir": None}}

    def sequences(self) -> dict[int, float]:
        return {self.context: self.steps * self.batch_size}

    def open(self, show: bool = False) -> CorpusRun:
        return CorpusRun(self, Corpus.open(CorpusConfig.from_dict(self.data), show))


class MicroBatches(Dataset[dict[str, Tensor]]):
    """The batches of a split, each cut into `num_micro_batches`; item i belongs to step i // num_micro_batches.

    The rows of a step do not depend on how many processes share its micro-batches.
    """

    def __init__(self, split: Split, config: LanguageConfig, num_micro_batches: int) -> None:
        settings = (config.batch_size, config.context, config.seed, config.mode)
        parts = range(num_micro_batches)
        self.slices = [split.batches(*settings, i, num_micro_batches, config.steps) for i in parts]

    def __len__(self) -> int:
        return len(self.slices) * len(self.slices[0])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        step, i = divmod(index, len(self.slices))
        return self.slices[i][step]


class CorpusRun(ModelRun):
    """A run of a `LanguageConfig`.

    Its result adds, with losses in nats per token and the tests on `test_split`:

    - "tokens": the tokens of training; "mfu": the share of the machine's matrix-product rate that training reached.
    - "bits_per_byte": on rows cut as in training; "bits_per_byte_of_documents" and "documents": on whole documents,
      with the state carried from their first token to their last.
    - "lengths": `[{"length", "perplexity", "last_perplexity"}]` at multiples of the context, as far as the split
      reaches; `last_perplexity` is that of the last `context` tokens alone; "rows": the number of rows read.
    - "positions": `[{"first", "last", "loss"}]`, the mean loss in ranges of positions that double.
    - "tests": `[{"test": "text", "length", "loss"}]`, the loss behind "bits_per_byte" (for `results.csv`).

    After a divergence only "tokens", "mfu" and "tests" are there, the last with NaN. The tokenizer is saved beside the
    model.

    Raises:
        ValueError: the corpus is not the one of the configuration, or the model's vocabulary is too small for it.
    """

    config: LanguageConfig

    def __init__(self, config: LanguageConfig, corpus: Corpus) -> None:
        super().__init__(config)
        if corpus.digest != config.digest:
            raise ValueError(
                f"this is not the text of the run: its digest is {corpus.digest[:12]}…, the run's {config.digest[:12]}…"
            )
        check_vocabulary(corpus.tokenizer, config.model.vocab_size)
        self.corpus = corpus

    def new_model(self, resumed: bool) -> LanguageModel:
        model, config = LanguageModel(self.config.model), self.config
        if config.start is not None and not resumed:
            load_start(model, Path(config.start), config.start_digest or "")
        if config.mode == "continued":
            require_constant_state(model, config.model.name)
        freeze(model, config.freeze)
        return model

    @property
    def length(self) -> int:
        return self.config.context

    @property
    def positions(self) -> list[int]:
        return [] if self.config.start is not None else [1, *(m * self.config.context for m in LENGTH_MULTIPLES)]

    def data(self, execution: ExecutionConfig) -> MicroBatches:
        count = execution.num_micro_batches(self.config.batch_size)
        return MicroBatches(self.corpus.split("train"), self.config, count)

    def validation(self) -> Callable[[nn.Module], float]:
        return _validation(self.corpus.split("validation"), self._measured)

    def before_training(self) -> Speed:
        """Measure the rate of matrix products before training, while the machine is idle."""
        config = self.config
        rate = peak_rate(training_device(), config.bf16)
        tokens = config.batch_size * config.context
        self._speed = Speed(tokens, model_costs(config.model).training_operations(config.context), rate * world_size())
        return self._speed

    def throughput(self, seconds: Mapping[int, float]) -> dict[str, float]:
        # Others may have used the machine before training, which would make the share too large.
        rate = max(self._speed.rate, peak_rate(training_device(), self.config.bf16) * world_size())
        speed = replace(self._speed, rate=rate)
        return {"tokens": self.config.steps * speed.tokens, **speed.of(median(seconds.values() or [math.nan]))}

    def save(self, model: LanguageModel, folder: Path) -> None:
        tokenizer = self.corpus.tokenizer
        checkpoint.save(model, folder, tokenizer.name if isinstance(tokenizer, ByteTokenizer) else None)
        tokenizer.save(folder)

    def evaluate(self, model: LanguageModel, diverged: bool) -> dict[str, Any]:
        if diverged:
            return {"tests": [_test(self.config, math.nan)]}
        return evaluate(model, self.corpus, self._measured)

    @property
    def _measured(self) -> LanguageConfig:
        """The configuration for measurements, whose rows never continue each other."""
        return replace(self.config, mode="concatenated") if self.config.mode == "continued" else self.config


def evaluate(model: LanguageModel, corpus: Corpus, config: LanguageConfig) -> dict[str, Any]:
    """The measurements of a `CorpusRun` after training."""
    split = corpus.split(config.test_split)
    largest = max((m for m in LENGTH_MULTIPLES if m * config.context <= split.longest), default=0)
    if not largest:
        raise ValueError(_too_short(split, config))
    length = largest * config.context
    rows = split.batches(1, length, config.seed, "concatenated")
    count = min(len(rows), max(1, config.test_tokens // length))
    joined = (_join([rows[i] for i in part]) for part in _parts(count, length))
    with torch.autocast(training_device().type, torch.bfloat16, enabled=config.bf16):
        losses = by_position(model, ((part["input_ids"], part["labels"]) for part in joined))
        whole = document_loss(model, documents(split, config.test_tokens))
    in_rows = loss_in_rows(model, split, config)
    return {
        "tests": [_test(config, in_rows)],
        "bits_per_byte": bits_per_byte(in_rows, split.tokens, split.bytes),
        "bits_per_byte_of_documents": bits_per_byte(whole.nats / whole.tokens, split.tokens, split.bytes),
        "documents": whole._asdict(),
        "lengths": _by_length(losses, config.context),
        "rows": count,
        "positions": [{"first": a, "last": b, "loss": loss} for a, b, loss in octave_means(losses)],
    }


def _test(config: LanguageConfig, loss: float) -> dict[str, Any]:
    return {"test": "text", "length": config.context, "loss": loss}


def _by_length(losses: Tensor, context: int) -> list[dict[str, Any]]:
    """Perplexities at multiples of the context, from the losses by position `[T]`."""
    lengths = [m * context for m in LENGTH_MULTIPLES if m * context <= len(losses)]
    last = {length: perplexity(losses[length - context :], context) for length in lengths}
    return [{"length": n, "perplexity": perplexity(losses, n), "last_perplexity": last[n]} for n in lengths]


def loss_in_rows(model: LanguageModel, split: Split, config: LanguageConfig) -> float:
    """The mean loss on a split in rows as in training, nats per token, computed by the calling process alone."""
    return _validation(split, replace(config, validation_tokens=config.test_tokens), shared=False)(Objective(model))


def _parts(rows: int, length: int) -> list[range]:
    """The numbers of the rows that are read at once: `MEASURED_TOKENS` tokens, or one row."""
    size = max(1, MEASURED_TOKENS // length)
    return [range(first, min(first + size, rows)) for first in range(0, rows, size)]


def _join(rows: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
    """Batches of one row each as one batch. Boundaries become a `Packing`, whose numbers the host keeps."""
    packed = "cu_seqlens" in rows[0]
    names = ("input_ids", "labels")
    joined: dict[str, Any] = {name: torch.cat([row[name] for row in rows], int(packed)) for name in names}
    if packed:
        ends = [row["cu_seqlens"][1:] + i * row["input_ids"].shape[1] for i, row in enumerate(rows)]
        bounds = torch.cat([rows[0]["cu_seqlens"][:1], *ends])
        joined["cu_seqlens"] = Packing.of(bounds, *joined["input_ids"].shape)
    return joined


def _validation(split: Split, config: LanguageConfig, shared: bool = True) -> Callable[[nn.Module], float]:
    """A function that returns the mean loss of an `Objective` on the same rows of a split at every call.

    The processes share the rows, unless `shared` is false: then the calling process reads all of them.
    """
    processes, process = (world_size(), rank()) if shared else (1, 0)
    length = config.context
    rows = min(max(1, config.validation_tokens // max(length, COUNTED_LENGTH)), split.tokens // length)
    if split.longest < length:
        raise ValueError(_too_short(split, config))
    batches, parts = split.batches(1, length, config.seed, config.mode, steps=rows), _parts(rows, length)

    @torch.no_grad()
    def validate(objective: nn.Module) -> float:
        device = next(objective.parameters()).device
        losses, counts = [], []  # read after the last turn, so that the host waits once
        # Every process takes part in every turn: with FSDP, a forward pass needs the shards of all processes.
        # Training would drop entries of embeddings, and count GateRank's resets.
        with evaluating(objective), torch.autocast(device.type, torch.bfloat16, enabled=config.bf16):
            for turn in range(0, len(parts), processes):
                part = turn + process
                batch = _join([batches[row] for row in parts[min(part, len(parts) - 1)]])
                counts.append(int((batch["labels"] != IGNORED).sum()) if part < len(parts) else 0)
                batch = {name: x.to(device, non_blocking=True) for name, x in batch.items()}
                losses.append(objective(**batch)["loss"])
        tokens = torch.tensor(counts, dtype=torch.float64)
        nats = torch.where(tokens > 0, torch.stack(losses).cpu().double() * tokens, 0.0)
        nats_and_tokens = torch.stack((nats.sum(), tokens.sum()))
        if processes > 1:
            total = nats_and_tokens.to(device)
            torch.distributed.all_reduce(total)
            nats_and_tokens = total.cpu()
        return (nats_and_tokens[0] / nats_and_tokens[1]).item()

    return validate


def _too_short(split: Split, config: LanguageConfig) -> str:
    return (
        f"the {split.files.split} split has {split.longest} tokens in one piece, fewer than a context of "
        f"{config.context}; hold out a larger share of the text"
    )


def documents(split: Split, limit: int) -> Iterator[Tensor]:
    """The documents of a split in their order, until `limit` tokens in all."""
    for files, enough in split.document_files(limit):
        for first, last in pairwise(files.offsets.tolist()):
            if first >= enough:
                break
            yield torch.from_numpy(files.tokens[first : min(last, enough)].astype("int64"))
