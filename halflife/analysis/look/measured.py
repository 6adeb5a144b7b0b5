"""Numbers with a name, a unit and named axes, which show themselves in notebooks."""

from __future__ import annotations

import struct
import zlib
from base64 import b64encode
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

PIXELS = 256  # of a picture, along each axis


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

    def _repr_html_(self) -> str:
        text = f"<p>{escape(repr(self))}</p>"
        if self.values.ndim != 2 or not self.values.size:
            return text
        rows, columns = (np.linspace(0, n - 1, min(n, PIXELS)).astype(int) for n in self.values.shape)
        shown = np.abs(self.values[np.ix_(rows, columns)]).astype(float)
        grey = (255 * (1 - shown / (shown.max() or 1))).astype(np.uint8)
        source = b64encode(grey_png(grey)).decode()
        return f'{text}<img alt="{escape(repr(self))}" width="256" src="data:image/png;base64,{source}">'


def grey_png(pixels: np.ndarray) -> bytes:
    """A PNG file of grey values `[rows, columns]`, uint8."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width = pixels.shape
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
