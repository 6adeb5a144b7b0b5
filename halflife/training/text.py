"""Language modelling on bytes: text as it is on the disk, one run on it, and its loss."""

from __future__ import annotations

import hashlib
import math
import shutil
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from halflife.files import read_bytes, write_json
from halflife.models import LanguageModel, checkpoint
from halflife.tasks import stream_seed
from halflife.training.config import ExecutionConfig, TrainConfig
from halflife.training.fit import claim_run_folder, fit

BLOCK = 1 << 14  # bytes; of every 20 blocks one is for validation and one for the test
PERIOD = 20
VOCABULARY = 256


class Text:
    """Bytes of files, one after the other, split into training, validation and test by blocks of 16 KiB.

    Args:
        data: the bytes.

    Raises:
        ValueError: too few bytes for a block of each split.
    """

    def __init__(self, data: bytes) -> None:
        if len(data) < BLOCK * PERIOD:
            raise ValueError(f"the text has {len(data):,} bytes; three splits need at least {BLOCK * PERIOD:,}")
        self.digest = hashlib.sha256(data).hexdigest()
        blocks = torch.frombuffer(bytearray(data), dtype=torch.uint8).split(BLOCK)
        turn = {PERIOD // 2: "validation", PERIOD - 1: "test"}
        parts: dict[str, list[Tensor]] = {"train": [], "validation": [], "test": []}
        for i, block in enumerate(blocks):
            parts[turn.get(i % PERIOD, "train")].append(block)
        self.parts = {split: torch.cat(found) for split, found in parts.items()}

    @classmethod
    def of_files(cls, files: Iterable[Path]) -> Text:
        """The text of these files (gzip is undone).

        Raises:
            FileNotFoundError, ValueError: a file is missing, empty or truncated; the message names it.
        """
        return cls(b"".join(read_bytes(file) for file in files))

    @cached_property
    def size(self) -> int:
        """Bytes in all."""
        return sum(len(part) for part in self.parts.values())

    def windows(self, split: str, length: int, count: int) -> Tensor:
        """`count` pieces of `length` + 1 bytes of a split, evenly spread: `[count, length + 1]`, int64."""
        part = self.parts[split]
        last = len(part) - length - 1
        if last < 0:
            raise ValueError(f"the {split} split has {len(part)} bytes, fewer than a window of {length + 1}")
        return _pieces(part, torch.linspace(0, last, count).long(), length)


def standard_library() -> list[Path]:
    """Python's own library, a text that every machine has (11 MB in Python 3.11), without its tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = (path for path in root.rglob("*.py") if not left_out & set(path.relative_to(root).parts))
    return sorted(path for path in files if path.stat().st_size)


def _pieces(part: Tensor, starts: Tensor, length: int) -> Tensor:
    return part[starts.unsqueeze(1) + torch.arange(length + 1)].long()


class TextStream(Dataset[dict[str, Tensor]]):
    """Random windows of the training split; item i is the batch of step i, whoever asks and whenever."""

    def __init__(self, text: Text, length: int, steps: int, batch_size: int, seed: int) -> None:
        self.part, self.length, self.steps = text.parts["train"], length, steps
        self.batch_size, self.seed = batch_size, seed

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(stream_seed("train", self.seed, step))
        starts = torch.randint(len(self.part) - self.length, (self.batch_size,), generator=draw)
        window = _pieces(self.part, starts, self.length)
        return {"input_ids": window[:, :-1], "labels": window[:, 1:]}


@dataclass(frozen=True, kw_only=True)
class TextConfig(TrainConfig):
    """Everything that determines a run's numbers.

    Attributes:
        digest: SHA-256 of the text.
        length: bytes of a sequence.
        validation_windows, test_windows: sequences of a validation and of the test.
    """

    digest: str
    length: int
    validation_windows: int = 64
    test_windows: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("length", "validation_windows", "test_windows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        if self.model.vocab_size != VOCABULARY:
            raise ValueError(f"a model of bytes has {VOCABULARY} tokens; got vocab_size {self.model.vocab_size}")


@torch.no_grad()
def loss(model: LanguageModel, windows: Tensor, batch_tokens: int = 1 << 13) -> float:
    """Mean cross-entropy of the next byte, nats, over `windows [count, length + 1]`."""
    device, total = next(model.parameters()).device, 0.0
    for batch in windows.split(max(1, batch_tokens // windows.shape[1])):
        logits, _ = model(batch[:, :-1].to(device))
        labels = batch[:, 1:].flatten().to(device)
        total += F.cross_entropy(logits.float().flatten(0, 1), labels, reduction="sum").item()
    return total / windows[:, 1:].numel()


def run(config: TextConfig, text: Text, folder: Path, *, name: str, show: bool = True) -> dict[str, Any]:
    """Trains on `text`, tests and writes into `folder`; continues from its last checkpoint if it holds one.

    Writes `config.json` and `model.safetensors` (see `models.io`), `run.json`, `metrics.jsonl` and `result.json`. A
    folder that has a result is not run again: its result is returned.

    Returns:
        `{"parameters", "state_floats", "tokens_per_second", "validation", "test"}`, losses in nats a byte; NaN after a
        divergence, and "diverged" says why.

    Raises:
        ValueError: the folder belongs to a run with another configuration, or the text is another one.
    """
    if text.digest != config.digest:
        raise ValueError(f"this is not the text of the run: SHA-256 {text.digest[:12]}…, not {config.digest[:12]}…")
    if (finished := claim_run_folder(config, folder)) is not None:
        return finished
    torch.manual_seed(config.seed)
    model = LanguageModel(config.model)
    validation = text.windows("validation", config.length, config.validation_windows)
    diverged, metrics = fit(
        model, config, TextStream(text, config.length, config.steps, config.batch_size, config.seed), folder,
        validate=lambda _: loss(model, validation), measure="loss", name=name, execution=ExecutionConfig(show=show),
    )  # fmt: skip
    model.eval()
    test = text.windows("test", config.length, config.test_windows)
    result = {
        "parameters": model.num_parameters(),
        "state_floats": model.state_floats(config.length),
        "tokens_per_second": config.batch_size * config.length / metrics.seconds_per_step(),
        "validation": math.nan if diverged else metrics.validation,
        "test": math.nan if diverged else loss(model, test),
        **({"diverged": diverged} if diverged else {}),
    }
    checkpoint.save(model, folder)
    write_json(folder / "result.json", result)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    return result
