"""What runs will take, from a step of each model that is timed before they begin."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from halflife.models import LanguageModel, param_groups
from halflife.ops.linear import fast_linears
from halflife.training.checkpoints import KEPT
from halflife.training.config import TrainConfig
from halflife.training.estimate import STATES
from halflife.training.fit import Objective
from halflife.training.speed import bf16_slowdown

TOKENS = 4096  # of a timed step at most; the time of a larger batch is extrapolated
LARGEST = 200_000_000  # parameters of a model that is tried; a larger one would take long
ENOUGH = 0.3  # seconds of steps of a model; one step is always timed
MODELS = 8  # different models that are tried; others count as their mean
PAGE = 6_000_000  # bytes of a report page with its figures


@dataclass(frozen=True)
class Trial:
    """What runs will take, one after the other on this machine.

    Attributes:
        runs, steps: their number, and the steps of all of them.
        seconds: of training, without validations and tests; None if a model is too large to be timed.
        memory: bytes of weights, gradients, AdamW's moments and saved activations of the largest run. If `seconds` is
            None, the activations are not counted.
        disk: bytes of all models, the checkpoints of one run, and a report.
        bf16_slowdown: how many times as long as in float32 products take in bfloat16, if a run has it; 1 otherwise.
    """

    runs: int
    steps: int
    seconds: float | None
    memory: int
    disk: int
    bf16_slowdown: float = 1.0


def try_runs(
    runs: Sequence[tuple[TrainConfig, Mapping[int, float]]], device: torch.device, rows: int | None = None
) -> Trial | None:
    """Time a step of each model, and extrapolate; None if there is no run. Models larger than `LARGEST` are not timed.

    Args:
        runs: configurations, and length in tokens → how many sequences of this length the training reads.
        device: where they are trained.
        rows: sequences of a micro-batch; None for whole batches.
    """
    kinds = {_kind(config): (config, sequences) for config, sequences in runs}
    with torch.device("meta"):
        sizes = {kind: LanguageModel(config.model).num_parameters() for kind, (config, _) in kinds.items()}
    if not sizes:
        return None
    seconds = memory = None
    if max(sizes.values()) <= LARGEST:
        chosen = [*kinds][:: -(-len(kinds) // MODELS)]
        with torch.random.fork_rng(devices=[]):
            tried = {kind: _try(*kinds[kind], device, rows) for kind in chosen}
        mean = tuple(fmean(values) for values in zip(*tried.values(), strict=True))
        found = [(config.steps, sizes[kind], tried.get(kind, mean)) for config, _ in runs if (kind := _kind(config))]
        seconds = sum(steps * step for steps, _, (step, _) in found)
        memory = max(STATES * size + activations for _, size, (_, activations) in found)
    disk = sum(4 * sizes[_kind(config)] for config, _ in runs) + (KEPT + 1) * 12 * max(sizes.values()) + PAGE
    steps, memory = sum(config.steps for config, _ in runs), memory or STATES * max(sizes.values())
    slowdown = bf16_slowdown(device) if any(config.bf16 for config, _ in runs) else 1.0
    return Trial(len(runs), steps, seconds, round(memory), disk, slowdown)


def _kind(config: TrainConfig) -> str:
    """What runs share that take equally long a step."""
    return config.model.to_json()


def _try(
    config: TrainConfig, sequences: Mapping[int, float], device: torch.device, rows: int | None
) -> tuple[float, float]:
    """The seconds of a step of a run, and the bytes that its forward pass saves."""
    held = rows or config.batch_size
    length = min(max(sequences), TOKENS)
    count = max(1, min(held, TOKENS // length))
    model = LanguageModel(config.model).to(device).train()
    objective, ids = Objective(model), torch.randint(config.model.vocab_size, (count, length), device=device)
    optimizer = torch.optim.AdamW(param_groups(model, config.weight_decay, config.learning_rate))
    saved: dict[Any, int] = {}

    def save(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        saved[storage._cdata] = storage.nbytes()
        return x

    def step() -> None:
        with fast_linears(model), torch.autocast(device.type, torch.bfloat16, enabled=config.bf16):
            loss = objective(ids, ids)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    with saved_tensors_hooks(save, lambda x: x):
        step()  # the first one also allocates
    _wait(device)
    seconds, start = math.inf, time.perf_counter()
    while time.perf_counter() - start < ENOUGH:  # the fastest of several steps, because other processes disturb them
        before = time.perf_counter()
        step()
        _wait(device)
        seconds = min(seconds, time.perf_counter() - before)
    tokens = sum(n * number for n, number in sequences.items()) / config.steps
    return seconds * tokens / (count * length), sum(saved.values()) * held * max(sequences) / (count * length)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()
