"""Options of a run's configuration, set by their dotted names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

Config = TypeVar("Config")


def apply_overrides(config: Config, overrides: Mapping[str, Any]) -> Config:
    """A configuration with some options replaced.

    Args:
        config: of one run.
        overrides: dotted name → value, such as `{"mixer.power": 2}`.

    Raises:
        ValueError: an unknown name.
    """
    if overrides:
        raise ValueError(f"these options cannot be set yet: {', '.join(overrides)}")
    return config
