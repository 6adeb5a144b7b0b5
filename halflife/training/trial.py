"""What runs will take, from a step of each model that is timed before they begin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import fmean

import torch

from halflife.evaluation.throughput import now, train_step
from halflife.models import LanguageModel
from halflife.models.lm import on_meta
from halflife.training.checkpoints import KEPT
from halflife.training.config import TrainConfig
from halflife.training.estimate import BYTES_PER_PARAMETER, recording_saved
from halflife.training.fit import Objective

TIMED_TOKENS = 4096  # of a timed step at most; the time of a larger batch is extrapolated
TIMED_PARAMETERS = 200_000_000  # parameters of a model that is tried; a larger one would take long
TIMED_SECONDS = 0.3  # seconds of steps of a model; one step is always timed
TIMED_MODELS = 8  # different models that are tried; others count as their mean
REPORT_BYTES = 6_000_000  # bytes of a report page with its figures


@dataclass(frozen=True)
class Trial:
    """What runs will take, one after the other on this machine."""

    # runs, steps: their number, and the steps of all of them
    runs: int
    steps: int
    seconds: float | None  # of training, without validations and tests; None if a model is too large to be timed
    # bytes of weights, gradients, AdamW's moments and saved activations of the largest run. If `seconds` is None, the
    # activations are not counted.
    memory: int
    disk: int  # bytes of all models, the checkpoints of one run, and a report


def try_runs(
    runs: Sequence[tuple[TrainConfig, Mapping[int, float]]], device: torch.device, rows: int | None = None
) -> Trial | None:
    """Time a step of each model, and extrapolate; None if there is no run.

    Models larger than `TIMED_PARAMETERS` are not timed.

    Args:
        runs: configurations, and length in tokens → how many sequences of this length the training reads.
        device: where they are trained.
        rows: sequences of a micro-batch; None for whole batches.
    """
    kinds = {_kind(config): (config, sequences) for config, sequences in runs}
    sizes = {kind: on_meta(config.model).num_parameters() for kind, (config, _) in kinds.items()}
    if not sizes:
        return None
    seconds = memory = None
    if max(sizes.values()) <= TIMED_PARAMETERS:
        chosen = [*kinds][:: -(-len(kinds) // TIMED_MODELS)]
        with torch.random.fork_rng(devices=[]):
            tried = {kind: _try(*kinds[kind], device, rows) for kind in chosen}
        mean = tuple(fmean(values) for values in zip(*tried.values(), strict=True))
        found = [(config.steps, sizes[kind], tried.get(kind, mean)) for config, _ in runs if (kind := _kind(config))]
        seconds = sum(steps * step for steps, _, (step, _) in found)
        memory = max(BYTES_PER_PARAMETER * size + activations for _, size, (_, activations) in found)
    disk = sum(4 * sizes[_kind(config)] for config, _ in runs) + (KEPT + 1) * 12 * max(sizes.values()) + REPORT_BYTES
    steps, memory = sum(config.steps for config, _ in runs), memory or BYTES_PER_PARAMETER * max(sizes.values())
    return Trial(len(runs), steps, seconds, round(memory), disk)


def _kind(config: TrainConfig) -> str:
    """Key that groups runs by the time of a step."""
    return config.model.to_json()


def _try(
    config: TrainConfig, sequences: Mapping[int, float], device: torch.device, rows: int | None
) -> tuple[float, float]:
    held = rows or config.batch_size
    length = min(max(sequences), TIMED_TOKENS)
    count = max(1, min(held, TIMED_TOKENS // length))
    model = LanguageModel(config.model).to(device).train()
    objective, ids = Objective(model), torch.randint(config.model.vocab_size, (count, length), device=device)
    step = partial(train_step(model, bf16=config.bf16, loss=lambda ids: objective(ids, ids)["loss"]), ids)
    with recording_saved() as saved:
        step()  # the first one also allocates
    times = [now()]
    while times[-1] - times[0] < TIMED_SECONDS:
        step()
        times.append(now())
    seconds = min(after - before for before, after in pairwise(times))  # other processes disturb some of the steps
    tokens = sum(n * number for n, number in sequences.items()) / config.steps
    return seconds * tokens / (count * length), sum(saved.values()) * held * max(sequences) / (count * length)
