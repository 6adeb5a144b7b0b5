"""`halflife forecast`."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional


@dataclass(frozen=True)
class Forecast:
    """Forecast how far trained models remember, from a reading as short as their training, and measure it.

    For every run on MQAR or NIAH, a sentence gives the half-lag: the number of tokens after which fewer than half of
    the stored pairs are recalled. It is measured, and forecast from the state, aged at the rate at which it fades in
    the first T tokens (docs/results/forecast.md).

    Models of text read a text in the place of pairs (--text). The sentence says after how many tokens they forget its
    beginning: the lag at which what it left in the state changes the predictions a hundredth as much as at first. The
    forecast reads --text-window tokens after the beginning. Writes forecast.json, forecast.md and figures.

    Models of transformers are asked for pairs of MQAR over their own vocabulary. Their states are split and aged while
    hooks watch each mixer. This needs Gated DeltaNet, Kimi delta attention or Mamba-2 in every layer. Beside softmax
    attention there is no forecast, because its cache forgets nothing.

    examples:
      halflife forecast runs/20260101-120000-mqar-smoke
      halflife forecast runs/a runs/b --longest 32 --output forecast
      halflife forecast runs/20260102-120000-mamba2+post --text book.txt --longest 16
      halflife forecast mamba2-130m-hf --pairs 16 --length 256 --longest 16
    """

    folders: Positional[tuple[Path, ...]]
    """Runs of `halflife compare`, models of transformers, or their names on the hub. All checkpoints below a folder are
    read."""
    text: tuple[Path, ...] = ()
    """Files that models of text read, one after the other. A file that ends in .gz is unpacked. Models of transformers
    read them too, and are not asked for pairs then."""
    longest: int = 128
    """Longest lag that is measured, in training lengths."""
    window: int = 1
    """Training lengths that are read for the forecast."""
    examples: int = 32
    """Number of sequences. Each is asked for all of its pairs at every lag. Those of a text are spread over it."""
    seed: int = 0
    """Seed of the sequences with pairs."""
    beginning: int = 64
    """Tokens at the beginning of a text that are to be remembered."""
    text_window: int = 16
    """Tokens of a text after its beginning that are read for the forecast."""
    pairs: int = 8
    """Pairs to remember, for models of transformers."""
    length: int = 512
    """Tokens in the place of the training length T, for models of transformers."""
    output: Path | None = None
    """Folder for the results. Default: forecast/ in the first folder, or forecast-<owner>--<name>/ for the hub."""
    device: str | None = None
    """Device of the models. Default: the GPU if there is one, else the CPU."""
    details: bool = False
    """Print the tables as well, which forecast.md has in any case."""
    quiet: bool = False
    """Do not draw a progress bar."""

    def run(self) -> None:
        from halflife.analysis.forecast.survey import measure_forecasts
        from halflife.cli.options import default_device
        from halflife.cli.spectrum import default_output
        from halflife.files import writable
        from halflife.report.figures.forecast import forecast_figures
        from halflife.report.figures.matplotlib_renderer import save
        from halflife.report.tables.forecast import print_forecasts, write_forecasts

        least = min(self.window, self.examples - 1, self.beginning, self.text_window)
        if least < 1 or self.longest < self.window:
            raise ValueError(
                "window, text_window and beginning are at least 1, examples at least 2, and longest no less than "
                f"window; got window {self.window}, text_window {self.text_window}, beginning {self.beginning}, "
                f"examples {self.examples}, longest {self.longest}"
            )
        output = self.output or default_output(self.folders, "forecast")
        with writable(output):
            result = measure_forecasts(
                self.folders, self.text, longest=self.longest, window=self.window, examples=self.examples,
                seed=self.seed, pairs=self.pairs, length=self.length, beginning=self.beginning,
                text_window=self.text_window, show=not self.quiet, device=default_device(self.device),
            ).to_dict()  # fmt: skip
        files = write_forecasts(result, output)
        for figure in forecast_figures(result):
            files += save(figure, output)
        if self.text and not result["texts"]:
            warnings.warn("--text was not read: no model here was trained on text", stacklevel=2)
        print_forecasts(result, self.details)
        print(f"written to {output}: {', '.join(file.name for file in files)}")
