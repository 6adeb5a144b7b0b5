"""`halflife spectrum`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tyro.conf import Positional


@dataclass(frozen=True)
class Spectrum:
    """Let trained models read a text and show how fast each of their layers forgets on it.

    The decays λ of every layer, at every token, head and channel: medians and quartiles as a table, a figure
    (decays.png, decays.svg) and data (decays.json, decays.csv). For layers of spectral Koopman attention besides: the
    eigenvalues of their operators, conditioning, what the power filter keeps, γ, μ and η (koopman.*).

    examples:
      halflife spectrum runs/20260101-120000-mqar-smoke --text tinyshakespeare.txt
      halflife spectrum my-checkpoint another --text book.txt.gz --length 4096 --output decays
    """

    folders: Positional[tuple[Path, ...]]
    """Checkpoints (config.json, model.safetensors), or runs: all checkpoints below a folder are read."""
    text: tuple[Path, ...]
    """Files to read, one after the other; .gz is unpacked. Models of a vocabulary of 256 read bytes."""
    length: int = 2048
    """Tokens of a sequence; each is read from its start."""
    sequences: int = 8
    """How many, evenly spread over the text."""
    tokenizer: str | None = None
    """For models of tokens: name or folder of a tokenizer of transformers."""
    output: Path | None = None
    """The folder to write. Default: spectrum/ in the first folder."""
    device: str | None = None
    """Where to run; by default the GPU if there is one, else the CPU."""
    quiet: bool = False
    """No progress bar."""

    def run(self) -> None:
        import torch

        from halflife.analysis.decay_figures import decays
        from halflife.analysis.decay_survey import print_table, survey, write_tables
        from halflife.analysis.figures import save
        from halflife.analysis.koopman_report import report

        reading: dict[str, Any] = {
            "length": self.length, "sequences": self.sequences, "tokenizer": self.tokenizer, "show": not self.quiet,
            "device": self.device or ("cuda" if torch.cuda.is_available() else "cpu"),
        }  # fmt: skip
        result = survey(self.folders, self.text, **reading)
        print_table(result)
        output = self.output or self.folders[0] / "spectrum"
        files = [*write_tables(result, output), *save(decays(result), output, "decays")]
        files += report(self.folders, self.text, output, **reading)
        print(f"written to {output}: {', '.join(file.name for file in files)}")
