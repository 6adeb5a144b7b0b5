"""A language model on a corpus: trained, evaluated by length, and written down."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from halflife.data.corpus import Corpus, Split, bits_per_byte
from halflife.data.tokenizers import ByteTokenizer, HuggingFaceTokenizer, check_vocabulary
from halflife.evaluation.language import by_position, document_loss, octave_means, perplexity
from halflife.files import write_json
from halflife.models import LanguageModel, checkpoint
from halflife.tasks import IGNORED
from halflife.training.config import ExecutionConfig, TrainConfig, rank, world_size
from halflife.training.fit import Objective, claim_run_folder, fit
from halflife.training.speed import Speed, gemm_rate, operations

MULTIPLES = (1, 2, 4, 8, 16)  # of the training length


@dataclass(frozen=True, kw_only=True)
class LanguageConfig(TrainConfig):
    """Everything that determines a run's numbers.

    Attributes:
        digest: of the corpus (SHA-256 of text, tokenizer and splits).
        data: how the corpus was made, to find it again: the fields of a `CorpusConfig`.
        context: tokens of a row.
        mode: "packed" or "concatenated", see `halflife.data.batches`.
        validation_tokens: read for each validation while training.
        test_tokens: of the validation split read for the numbers after training, for each of them.
    """

    digest: str
    data: dict[str, Any]
    context: int
    mode: str = "packed"
    validation_tokens: int = 1 << 16
    test_tokens: int = 1 << 20

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("context", "validation_tokens", "test_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")


class MicroBatches(Dataset[dict[str, Tensor]]):
    """The batches of a split, each cut into `parts` micro-batches; item i belongs to step i // parts.

    However many processes take the micro-batches of a step between them, in whatever number of turns, together they
    see the same rows.
    """

    def __init__(self, split: Split, config: LanguageConfig, parts: int) -> None:
        self.parts = [
            split.batches(config.batch_size, config.context, config.seed, config.mode, i, parts, config.steps)
            for i in range(parts)
        ]

    def __len__(self) -> int:
        return len(self.parts) * len(self.parts[0])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        step, part = divmod(index, len(self.parts))
        return self.parts[part][step]


def run(
    config: LanguageConfig, corpus: Corpus, folder: Path, *, name: str, execution: ExecutionConfig | None = None
) -> dict[str, Any]:
    """Trains on `corpus`, evaluates and writes into `folder`; continues from its last checkpoint if it holds one.

    Writes `config.json` and `model.safetensors` (see `models.io`), the tokenizer, `run.json`, `metrics.jsonl` and
    `result.json`. A folder that has a result is not run again: its result is returned. Started by torchrun, all
    processes train one model and the first one writes.

    Returns:
        `{"parameters", "state_floats", "tokens", "tokens_per_second", "mfu", "validation", "bits_per_byte",
        "bits_per_byte_of_documents", "lengths": [{"length", "perplexity", "last_perplexity"}], "positions": [{"first",
        "last", "loss"}]}`; losses in nats a token. `bits_per_byte` is of the validation split in rows as in training,
        `bits_per_byte_of_documents` of whole documents, the state carried to their ends; `lengths` are multiples of the
        context, as far as the validation split reaches; `last_perplexity` is of the last context's worth of tokens
        alone. After a divergence there are the first ones only, and "diverged" says why.

    Raises:
        ValueError: the folder belongs to a run with another configuration, or the text is another one.
        Stopped: the process was asked to end (SIGTERM), and has saved.
    """
    execution = execution or ExecutionConfig()
    if corpus.digest != config.digest:
        raise ValueError(f"this is not the text of the run: {corpus.digest[:12]}…, not {config.digest[:12]}…")
    check_vocabulary(corpus.tokenizer, config.model.vocab_size)
    parts = execution.parts(config.batch_size)
    data, validate = MicroBatches(corpus.split("train"), config, parts), _validation(corpus, config)
    if (finished := claim_run_folder(config, folder)) is not None:
        return finished
    torch.manual_seed(config.seed)
    model = LanguageModel(config.model)
    speed = _speed(model, config)
    diverged, metrics = fit(
        model, config, data, folder, validate=validate, measure="loss", name=name,
        execution=execution, speed=speed,
    )  # fmt: skip
    result: dict[str, Any] = {
        "parameters": model.num_parameters(),
        "tokens": config.steps * config.batch_size * config.context,
        **speed.of(metrics.seconds_per_step()),
        "validation": math.nan if diverged else metrics.validation,
        **({"diverged": diverged} if diverged else {}),
    }
    if execution.fsdp:
        model = _whole(model, config)
    if rank() == 0:
        checkpoint.save(model, folder, corpus.tokenizer.name if isinstance(corpus.tokenizer, ByteTokenizer) else None)
        if isinstance(corpus.tokenizer, HuggingFaceTokenizer):
            corpus.tokenizer.tokenizer.save_pretrained(folder)
        if not diverged:
            model.to(_device()).eval()
            result |= {"state_floats": model.state_floats(config.context), **evaluate(model, corpus, config)}
        write_json(folder / "result.json", result)
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return result


def _whole(model: LanguageModel, config: LanguageConfig) -> LanguageModel:
    """A model of its own with the parameters that lie in shards; without values but on the first process."""
    from halflife.training.sharding import gather

    with torch.device("meta"):
        whole = LanguageModel(config.model)
    if parameters := gather(model):
        whole.load_state_dict(parameters, assign=True)
    return whole


def _device() -> torch.device:
    return torch.accelerator.current_accelerator() or torch.device("cpu")


def _speed(model: LanguageModel, config: LanguageConfig) -> Speed:
    """Before training, so that the rate is that of a machine which does nothing else."""
    rate = gemm_rate(_device(), torch.bfloat16 if config.bf16 else torch.float32)
    return Speed(config.batch_size * config.context, operations(model, config.context), rate * world_size())


def _validation(corpus: Corpus, config: LanguageConfig, folder_lock: bool = False) -> Callable[[nn.Module], float]:
    """The mean loss on the same rows of the validation split every time.

    Each process reads its share of them, or, `alone`, the one that calls it all.
    """
    processes, own = (1, 0) if folder_lock else (world_size(), rank())
    split = corpus.split("validation")
    rows = min(config.validation_tokens, split.tokens) // config.context
    if not rows:
        raise ValueError(
            f"the validation split has {split.tokens} tokens, fewer than a context of {config.context}: hold out more"
        )
    batches = split.batches(1, config.context, config.seed, config.mode, steps=rows)

    @torch.no_grad()
    def validate(objective: nn.Module) -> float:
        device = next(objective.parameters()).device
        nats = torch.zeros(2, dtype=torch.float64)
        for turn in range(0, rows, processes):  # all take part in every turn: a shard alone can do nothing
            row = turn + own
            batch = {name: x.to(device) for name, x in batches[min(row, rows - 1)].items()}
            tokens = int((batch["labels"] != IGNORED).sum())
            with torch.autocast(device.type, torch.bfloat16, enabled=config.bf16):
                loss = objective(**batch)["loss"].item()
            if row < rows and tokens:
                nats += torch.tensor([loss * tokens, tokens], dtype=torch.float64)
        if processes > 1:
            shared = nats.to(device)
            torch.distributed.all_reduce(shared)
            nats = shared.cpu()
        return (nats[0] / nats[1]).item()

    return validate


def of_rows(model: LanguageModel, corpus: Corpus, config: LanguageConfig) -> float:
    """The mean loss on the validation split in rows as in training, nats a token."""
    limit = min(config.test_tokens, corpus.split("validation").tokens)
    return _validation(corpus, replace(config, validation_tokens=limit), folder_lock=True)(Objective(model))


def evaluate(model: LanguageModel, corpus: Corpus, config: LanguageConfig) -> dict[str, Any]:
    """What `run` measures after training, on the validation split (see there)."""
    split = corpus.split("validation")
    reach = max((m for m in MULTIPLES if m * config.context <= split.tokens), default=0)
    if not reach:
        raise ValueError(f"the validation split has {split.tokens} tokens, fewer than a context of {config.context}")
    length = reach * config.context
    rows = split.batches(1, length, config.seed, "concatenated")
    count = min(len(rows), max(1, config.test_tokens // length))
    with torch.autocast(_device().type, torch.bfloat16, enabled=config.bf16):
        losses = by_position(model, ((rows[i]["input_ids"], rows[i]["labels"]) for i in range(count)))
        whole = document_loss(model, documents(split, config.test_tokens))
    per_token = whole.nats / whole.tokens
    lengths = [
        {"length": size, "perplexity": perplexity(losses, size),
         "last_perplexity": math.exp(losses[size - config.context : size].mean().item())}
        for m in MULTIPLES if (size := m * config.context) <= length
    ]  # fmt: skip
    return {
        "bits_per_byte": bits_per_byte(of_rows(model, corpus, config), split.tokens, split.bytes),
        "bits_per_byte_of_documents": bits_per_byte(per_token, split.tokens, split.bytes),
        "documents": whole._asdict(),
        "lengths": lengths,
        "rows": count,
        "positions": [{"first": a, "last": b, "loss": loss} for a, b, loss in octave_means(losses)],
    }


def documents(split: Split, limit: int) -> Iterator[Tensor]:
    """The documents of a split, in their order, until they have `limit` tokens in all."""
    starts = split.files.offsets
    for first, last in pairwise(starts.tolist()):
        if first >= limit:
            return
        yield torch.from_numpy(split.files.tokens[first : min(last, limit)].astype("int64"))
