"""The settings of `halflife theory`. The command inherits them, so their texts are also its help."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class TheorySettings:
    """Numbers and files of the topics that `halflife.lab.theory.compute.compute` computes."""

    channels: int = 16
    """Number of channels, N."""
    length: int = 10_000
    """Length T, in tokens."""
    beta: float = 0.5
    """Exponent β of the power law t^−β."""
    lengths: tuple[float, ...] = (1e2, 1e3, 1e4, 1e5, 1e6)
    """Lengths T of Table 1."""
    counts: tuple[int, ...] = (2, 4, 8, 12, 16, 24, 32)
    """Numbers of channels N of Table 1, besides --channels."""
    text: tuple[Path, ...] = ()
    """Files whose autocovariance is measured, one after the other. A file that ends in .gz is unpacked."""
    tokenizer: str | None = None
    """Name or folder of a tokenizer of transformers for the text. Default: bytes."""
    tokens: int = 1 << 20
    """Number of tokens of the text that are read, from its start."""
    runs: tuple[Path, ...] = ()
    """Runs of `halflife train`, for the information, and for the autocovariance of the text in their embeddings."""
    seed: int = 0
    """Seed of random spectra, simulations and the bootstrap."""

    def validate(self) -> None:
        """Raise a ValueError if a number is out of range."""
        if self.channels < 2 or self.length < 10 or not self.beta > 0 or self.tokens < 1:
            raise ValueError(
                "need at least 2 channels, a length of 10, β > 0 and a token; "
                f"got {self.channels}, {self.length}, {self.beta:g}, {self.tokens}"
            )
        if not self.lengths or min(self.lengths) < 2 or min(self.counts, default=2) < 1:
            raise ValueError(f"need lengths from 2 and counts from 1; got {self.lengths} and {self.counts}")

    @property
    def all_counts(self) -> list[int]:
        """Numbers of channels N of Table 1, ascending."""
        return sorted({*self.counts, self.channels})
