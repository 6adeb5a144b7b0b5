"""Learning rates after the warm-up, as schedulers of transformers and their settings."""

from __future__ import annotations

from typing import Any

from halflife.registry import check_choice, unknown

SCHEDULES = ("cosine", "wsd", "linear", "constant")
BY_EPOCH = "linear_by_epoch"  # our schedule beside those of transformers
BY_EVALUATION = ("reduce_lr_on_plateau", "greedy")  # of transformers, which need evaluations by its Trainer


def rate_by_epoch(step: int, steps: int, epochs: int) -> float:
    """The factor on the learning rate under `linear_by_epoch`: 1, then (E − 1)/E, …, 1/E, constant in each epoch."""
    return 1 - min(step * epochs // steps, epochs - 1) / epochs


def schedule(name: str, steps: int, learning_rate: float, *, floor: float, decay: float) -> tuple[str, dict[str, Any]]:
    """The name of a scheduler of transformers, and its settings.

    Args:
        name: "cosine" (half a cosine wave down to the floor), "wsd" (warm-up, stable, then linear decay to the floor),
            "linear" (linear decay from the end of the warm-up) or "constant".
        steps: the number of steps of the run.
        learning_rate: the highest learning rate of the run.
        floor: the last learning rate as a share of the highest.
        decay: the share of the steps in which "wsd" decays.
    """
    for what, share in (("floor", floor), ("decay", decay)):
        if not 0 <= share <= 1:
            raise ValueError(f"{what} must be a share between 0 and 1; got {share}")
    if name == "cosine":
        return "cosine_with_min_lr", {"min_lr_rate": floor}
    if name == "wsd":
        falling = {"num_decay_steps": max(1, round(decay * steps)), "decay_type": "linear", "min_lr_ratio": floor}
        return "warmup_stable_decay", falling
    if name == "linear" and floor < 1:
        return "polynomial", {"lr_end": floor * learning_rate, "power": 1.0}
    if name in ("constant", "linear"):  # a linear decay to a floor of 1 is constant
        return "constant_with_warmup", {}
    raise unknown("schedule", name, list(SCHEDULES))


def check_schedule(name: str, options: dict[str, Any], steps: int, learning_rate: float) -> None:
    """Raise a ValueError if training has no such schedule, or the schedule does not take these settings."""
    import torch
    from transformers import get_scheduler
    from transformers.trainer_utils import SchedulerType

    check_choice("schedule", name, [BY_EPOCH, *(x.value for x in SchedulerType if x.value not in BY_EVALUATION)])
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=learning_rate)
    try:
        if name == BY_EPOCH:
            rate_by_epoch(0, steps, **options)
        else:
            get_scheduler(name, optimizer, 0, steps, scheduler_specific_kwargs=options)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ValueError(f"training.schedule_options do not fit the schedule {name}: {error}") from error
