"""`halflife spectrum`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional


@dataclass(frozen=True)
class Spectrum:
    """Show how long trained models remember, layer by layer, from the spectrum of their decays.

    The weights alone give the time-scales of all channels at positions 1, T, 4T and 16T (T: the training length), the
    number of distinct and of wasted time-scales, and PoST's learned taper. With --text, the models read a text. This
    gives the decay λ of every token, and the horizon: the lag at which 1/e of what a token wrote is left. For layers of
    spectral Koopman attention it also gives the eigenvalues of their operators and what the power filter keeps.

    Models of transformers are read in place, and nothing is converted: Gated DeltaNet (Qwen3-Next, Qwen3.5, OLMo
    Hybrid), Kimi delta attention, Mamba-2 (also in Falcon-H1, Bamba, Granite, Nemotron-H, Zamba2), lightning attention
    (MiniMax), RG-LRU (RecurrentGemma) and RWKV-4. Their other layers are listed. The weights must be safetensors, and
    code that comes with a model is not run.

    Writes report.html, decays.json, decays.csv, spectrum*.png, and with a text decays.png and koopman.*.

    examples:
      halflife spectrum runs/20260101-120000-mqar-smoke
      halflife spectrum my-checkpoint another --text book.txt.gz --length 4096 --heads --output decays
      halflife spectrum mamba2-130m-hf --train-length 2048
      halflife spectrum Qwen/Qwen3.5-0.8B --text book.txt --length 4096 --sequences 1
    """

    folders: Positional[tuple[Path, ...]]
    """Checkpoints (ours, those of transformers, and those of fla that `halflife convert` reads), runs that contain
    some, or names of models on the hub, owner/name or owner/name@revision."""
    text: tuple[Path, ...] = ()
    """Files that the models read, one after the other. A file that ends in .gz is unpacked."""
    length: int = 2048
    """Tokens in a sequence of the text."""
    sequences: int = 8
    """Number of sequences, evenly spread over the text."""
    train_length: int | None = None
    """Training length T, for models whose run or PoST does not name it. Default: the length that is read."""
    tokenizer: str | None = None
    """Name or folder of a tokenizer of transformers. Default: the one in the folder of each model, or bytes for
    models with 256 tokens."""
    heads: bool = False
    """Print a table of all heads as well."""
    output: Path | None = None
    """Folder for the results. Default: spectrum/ in the first folder, or spectrum-<owner>--<name>/ for the hub."""
    device: str | None = None
    """Device of the models. Default: the GPU if there is one, else the CPU."""
    quiet: bool = False
    """Do not draw a progress bar."""

    def run(self) -> None:
        from halflife.analysis.survey import measure_models
        from halflife.cli.options import command_line, default_device
        from halflife.files import KOOPMAN_JSON, finite, writable, write_json
        from halflife.report.figures.matplotlib_renderer import save
        from halflife.report.figures.operators import operators
        from halflife.report.page.model_spectrum import write_spectrum_page
        from halflife.report.redraw import SPECTRUM_FILES
        from halflife.report.table import show
        from halflife.report.tables import spectrum as tables

        output = self.output or default_output(self.folders, "spectrum")
        with writable(output):
            result = measure_models(
                self.folders, self.text, length=self.length, sequences=self.sequences, train_length=self.train_length,
                tokenizer=self.tokenizer, show=not self.quiet, device=default_device(self.device),
            ).to_dict()  # fmt: skip
        show(*tables.spectrum_tables(result, heads=self.heads))
        files = tables.write_tables(result, output)
        for figure in SPECTRUM_FILES["decays"](finite(result)):
            files += save(figure, output)
        with_ska = tables.operators_of(result)
        if with_ska["models"]:
            show(*tables.operator_tables(with_ska))
            files += [write_json(output / KOOPMAN_JSON, with_ska), *save(operators(with_ska), output)]
        if any(model["layers"] for model in result["models"]):
            files.append(write_spectrum_page(result, output, command_line()))
        print(f"written to {output}: {', '.join(file.name for file in files)}")


def default_output(folders: Sequence[Path], name: str) -> Path:
    """Return the folder for results about models: one in the first model's folder, or in this one for the hub."""
    if not folders:
        raise ValueError("name at least one checkpoint or run")
    first = folders[0]
    return first / name if first.exists() else Path(f"{name}-{str(first).replace('/', '--')}")
