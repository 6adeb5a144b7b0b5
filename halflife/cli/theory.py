"""`halflife theory`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from halflife.lab.theory.settings import TheorySettings

MAX_CELLS = 16_000_000  # channels × length: some topics hold a number for each, at up to 16 times the length


@dataclass(frozen=True, kw_only=True)
class Theory(TheorySettings):
    """Check claims of the papers against computed values: tables, theory.json, and figures of curves.

    Topics of PoST's decay spectra:
      errors          how well N channels approximate t^−β on T tokens (Table 1)
      ends            the same for different slowest and fastest rates
      positions       the same at positions t ≤ T, for fixed and for position-adaptive rates
      gaps            the smallest gap of random log-rates
      channels        how many channels are in use at position t
      responses       what is left of an input, by lag
      energy          how the energy of the state grows with the position
      normalization   how the energies of two channels compare beyond T, and what a norm makes of it (Prop. B.2)
      taper           how far the best taper may be from the ideal one
      autocovariance  whether a text has a power law (needs --text)
      blocks          whether averages over blocks have the same power law (Condition 3.2, needs --text)
      density         the power spectrum of a text (Corollary 3.7, needs --text)
      information     what each octave of context tells about the next token (needs --runs)

    Topics of Echo's Koopman attention:
      gradients       ranks and norms of the Jacobians of attention and SKA (Appendix J)
      phases          what rotating keys do to the operator (Prop. C.5)
      gram            the Gram matrix of keys that are divided by the largest norm (Prop. E.1)
      costs           the multiplications of each kind of layer (Table 1)

    Topic of all four papers:
      statements      identities, bounds and numbers that a few random draws decide (docs/claims.md)

    A second command on the same folder replaces the topics that it computes and keeps the others.

    examples:
      halflife theory
      halflife theory --text book.txt --runs runs/my-model
      halflife theory --only positions channels --channels 32 --length 100000
      halflife theory --only errors --lengths 1e2 1e4 --counts 2 4 8 --beta 0.3
    """

    only: tuple[str, ...] = ()
    """Topics to compute. Default: all topics for which there are files."""
    output: Path = Path("runs/theory")
    """Folder for the results. It also caches the best end points for later commands."""
    quiet: bool = False
    """Do not draw a progress bar."""

    def run(self) -> None:
        from halflife.lab.theory.compute import compute, write
        from halflife.lab.theory.figures import draw_all
        from halflife.lab.theory.tables import theory_tables
        from halflife.report.table import show

        self._limit()
        topics = compute(self, self.only, cache=self.output / "theory_ends.json", show=not self.quiet)
        show(*theory_tables(topics))
        data = write(topics, self.output)
        figures = draw_all({name: data[name] for name in topics}, self.output)
        print(f"written to {self.output}: {', '.join(['theory.json', *(file.name for file in figures)])}")

    def _limit(self) -> None:
        """Raise a ValueError for numbers with which a topic would compute for hours, or not fit into memory."""
        for name, values, largest in (
            ("channels", (self.channels,), 256), ("counts", self.counts, 256), ("length", (self.length,), 10**8),
            ("lengths", self.lengths, 1e15),
        ):  # fmt: skip
            if not max(values, default=0) <= largest:
                raise ValueError(f"--{name} may be at most {largest:,.0f}; got {max(values):,.0f}")
        if (size := self.channels * self.length) > MAX_CELLS:
            raise ValueError(
                f"--channels × --length may be at most {MAX_CELLS:,}, or memory would not hold it; got {size:,}"
            )
