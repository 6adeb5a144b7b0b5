"""Numbers with a name, a unit and named axes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Measured:
    """An array with what it means."""

    values: np.ndarray  # the numbers
    name: str  # what they are
    unit: str  # their unit; "1" for numbers without one
    axes: tuple[str, ...]  # what each axis is

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.values, dtype=dtype) if copy else np.asarray(self.values, dtype=dtype)

    def __repr__(self) -> str:
        sizes = " × ".join(f"{axis} {size}" for axis, size in zip(self.axes, self.values.shape, strict=True))
        unit = "" if self.unit == "1" else f" in {self.unit}"
        ends = f", {self.values.min():.3g} to {self.values.max():.3g}" if self.values.size else ""
        return f"{self.name}{unit}: {sizes}{ends}"
