"""Controls of a comparison: a model resized until its state or its parameters are as many as those of another one."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import torch

from halflife.layers import LAYERS
from halflife.models.config import ModelConfig
from halflife.models.lm import LanguageModel, on_meta
from halflife.registry import constructor_parameters

CONTROL_NAME = re.compile(r"(?P<base>[^@]+)@(?P<kind>\w+)\((?P<target>.+)\)")
KINDS = {"state": "numbers of state", "parameters": "parameters"}  # kind → what it counts
SIZE_TOLERANCE = 0.05  # relative difference from the target
SIZE_STEPS = (1, 2, 4, 8, 16, 32)  # a size may have to be a multiple, for example of the number of heads
LARGEST_SIZE = 1 << 14
CACHES = ("attention", "fox")  # mixers whose state is a cache


def split_control(name: str) -> tuple[str, str, str] | None:
    """Split `base@state(target)` or `base@parameters(target)` into base, kind and target; None for other names.

    Raises:
        ValueError: there is an "@", and the name has another form.
    """
    if "@" not in name:
        return None
    match = CONTROL_NAME.fullmatch(name)
    if match is None or match["kind"] not in KINDS:
        raise ValueError(f"a control is called base@state(target) or base@parameters(target); got {name!r}")
    return match["base"], match["kind"], match["target"]


def control(base: ModelConfig, kind: str, target: ModelConfig, length: int, name: str) -> ModelConfig:
    """Return the base with as much state, or as many parameters, as the target, to `SIZE_TOLERANCE`.

    The state is resized by its rows: `state_size`, or `head_dim` of mixers without it. The parameters are resized by
    the width of the MLP, or by the width of a model without one.

    Args:
        base: the model to resize.
        kind: "state" or "parameters".
        target: the model to match.
        length: tokens after which states are compared; only caches depend on it.
        name: the name of the control.

    Raises:
        ValueError: no size comes near enough, as for softmax attention, whose cache has no rows.
    """

    def measure(config: ModelConfig) -> int:
        return on_meta(config).num_parameters() if kind == "parameters" else _state(config, length)

    wanted = measure(target)
    for step in SIZE_STEPS:
        try:
            found = _nearest(lambda size, step=step: _resized(base, kind, size * step), measure, wanted)
        except (ValueError, TypeError):  # the size must be another multiple, or the mixer has no such size
            continue
        if abs(measure(found) - wanted) <= SIZE_TOLERANCE * wanted:
            return dataclasses.replace(found, name=name)
    raise ValueError(
        f"{name}: no size of {base.name} has {wanted:,} {KINDS[kind]} to {SIZE_TOLERANCE:.0%}, as {target.name} has; "
        f"{base.name} itself has {measure(base):,}"
    )


def _resized(base: ModelConfig, kind: str, size: int) -> ModelConfig:
    if kind == "parameters":
        return dataclasses.replace(base, **{"hidden_size" if base.mlp == "none" else "intermediate_size": size})
    if base.mixer in CACHES:
        raise ValueError("the cache of softmax attention has no rows")
    rows = "state_size" if "state_size" in constructor_parameters(LAYERS[base.mixer]) else "head_dim"
    return dataclasses.replace(base, mixer_options={**base.mixer_options, rows: size})


def _nearest(build: Callable[[int], ModelConfig], measure: Callable[[ModelConfig], int], wanted: int) -> ModelConfig:
    """Return the model of the size, from 1 on, whose measure is nearest; the measure grows with the size."""
    low, high = 1, 2
    while measure(build(high)) < wanted:
        low, high = high, 2 * high
        if high > LARGEST_SIZE:
            raise ValueError("the measure does not grow with the size")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if measure(build(middle)) < wanted else (low, middle)
    return min(build(low), build(high), key=lambda config: abs(measure(config) - wanted))


def _state(config: ModelConfig, length: int) -> int:
    small = dataclasses.replace(config, vocab_size=2, mlp="none", position="none")
    with torch.random.fork_rng(devices=[]):  # leaves the caller's random numbers unchanged
        return LanguageModel(small).state_size(length)
