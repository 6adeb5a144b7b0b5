"""`halflife forecast`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional


@dataclass(frozen=True)
class Forecast:
    """Forecast how far trained models will remember, from one reading as short as their training, and measure it.

    For every run on MQAR or NIAH: the number of tokens after which fewer than half of the stored pairs are recalled,
    measured; the same, forecast by ageing the state at the rate at which it fades in the first T tokens; and the lag at
    which a pair's energy falls below the state's noise (docs/results/forecast.md). Writes forecast.json, forecast.md
    and a figure.

    examples:
      halflife forecast runs/20260101-120000-mqar-smoke
      halflife forecast runs/a runs/b --longest 32 --output forecast
    """

    folders: Positional[tuple[Path, ...]]
    """Runs of `halflife compare`; all checkpoints below a folder are read."""
    longest: int = 128
    """Longest lag that is measured, in training lengths."""
    window: int = 1
    """Training lengths that are read for the forecast."""
    examples: int = 32
    """Sequences that are read; each is asked for all of its pairs at every lag."""
    seed: int = 0
    """Of those sequences."""
    output: Path | None = None
    """The folder to write. Default: forecast/ in the first folder."""
    device: str | None = None
    """Where to run; by default the GPU if there is one, else the CPU."""
    quiet: bool = False
    """No progress bar."""

    def run(self) -> None:
        import torch
        from rich.console import Console
        from rich.markdown import Markdown

        from halflife.analysis.forecast_survey import markdown, survey, write
        from halflife.report.figures.forecast import forecasts
        from halflife.report.figures.matplotlib_renderer import save

        if min(self.window, self.examples) < 1 or self.longest < self.window:
            raise ValueError(
                f"window and examples are at least 1, and longest no less than window; got window {self.window}, "
                f"examples {self.examples}, longest {self.longest}"
            )
        result = survey(
            self.folders, longest=self.longest, window=self.window, examples=self.examples, seed=self.seed,
            show=not self.quiet,
            device=self.device or ("cuda" if torch.cuda.is_available() else "cpu"),
        )  # fmt: skip
        output = self.output or self.folders[0] / "forecast"
        files = [*write(result, output), *save(forecasts(result), output, "forecast")]
        console = Console()
        (console if console.is_terminal else Console(width=200)).print(Markdown(markdown(result)))
        for label, why in result["refused"].items():
            print(f"left out: {label}: {why}")
        print(f"written to {output}: {', '.join(file.name for file in files)}")
