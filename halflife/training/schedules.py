"""How the learning rate goes on after its warm-up, as transformers' schedulers and their settings."""

from __future__ import annotations

from typing import Any

from halflife.registry import unknown

SCHEDULES = ("cosine", "wsd", "linear", "constant")


def schedule(name: str, steps: int, learning_rate: float, *, floor: float, decay: float) -> tuple[str, dict[str, Any]]:
    """The name and settings of transformers' scheduler.

    Args:
        name: "cosine" (half a wave, down to the floor), "wsd" (stays, then falls in a line to the floor), "linear"
            (falls from the start) or "constant".
        steps, learning_rate: of the run.
        floor: the last learning rate, as a share of the first.
        decay: share of the steps in which "wsd" falls.

    Raises:
        ValueError: an unknown name, or a share outside [0, 1].
    """
    for what, share in (("floor", floor), ("decay", decay)):
        if not 0 <= share <= 1:
            raise ValueError(f"{what} is a share between 0 and 1; got {share}")
    if name == "cosine":
        return "cosine_with_min_lr", {"min_lr_rate": floor}
    if name == "wsd":
        falling = {"num_decay_steps": max(1, round(decay * steps)), "decay_type": "linear", "min_lr_ratio": floor}
        return "warmup_stable_decay", falling
    if name == "linear":
        return "polynomial", {"lr_end": floor * learning_rate, "power": 1.0}
    if name == "constant":
        return "constant_with_warmup", {}
    raise unknown("schedule", name, list(SCHEDULES))
