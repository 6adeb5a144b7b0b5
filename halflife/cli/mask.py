"""`halflife mask`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional


@dataclass(frozen=True)
class Mask:
    """Show the decay masks of trained models with one decay a head: one state, GateRank or log-linear attention.

    The table has a row for each head: resets in a sequence, mean tokens between resets, half-lives at the mean
    log-decay, and the rank of the mask's blocks below the diagonal. The picture shows Γ, Λ and their product for one
    head of each model, and the singular values at every cut. With --example, the picture shows the worked example of
    GateRank, Figure 2a, instead.

    examples:
      halflife mask runs/20260101-120000-gate-rank-s5-smoke
      halflife mask my-checkpoint other --text tinyshakespeare.txt --tokens 128 --layer 1 --head 0 --output mask.svg
      halflife mask my-checkpoint --task s5 --tokens 64
      halflife mask --example --output example.png
    """

    folders: Positional[tuple[Path, ...]] = ()
    """Checkpoints (config.json, model.safetensors) or runs. All checkpoints below a folder are read."""
    example: bool = False
    """Draw the paper's example. No model is read."""
    text: tuple[Path, ...] = ()
    """Files that the models read, one after the other. A file that ends in .gz is unpacked."""
    task: str | None = None
    """Task that the models read, `name` or `name:tier`. Default without --text: the task of each model's training."""
    tokens: int = 64
    """Tokens in a sequence."""
    sequences: int = 8
    """Number of sequences in the table. The picture shows the first one."""
    block: int = 8
    """Tokens in a block whose rank is counted."""
    layer: int | None = None
    """Layer in the picture, from 0. Default: the layer of the head with the most resets."""
    head: int | None = None
    """Head in the picture, from 0. Default: the head with the most resets."""
    tokenizer: str | None = None
    """For --text, name or folder of a tokenizer of transformers. Default: the one in the folder of each model, or bytes
    for models with 256 tokens."""
    output: Path | None = None
    """Picture to write, .png, .svg or .pdf. Default: mask.png in the first folder, or ./mask_example.png."""
    device: str | None = None
    """Device of the models. Default: the GPU if there is one, else the CPU."""

    def run(self) -> None:
        from halflife.report.figures import masks as figures
        from halflife.report.figures.matplotlib_renderer import check_format, draw, save_as

        if self.example == bool(self.folders):
            raise ValueError("name at least one checkpoint or run, or give --example alone")
        output = self.output or (Path("mask_example.png") if self.example else self.folders[0] / "mask.png")
        check_format(output.suffix[1:])
        if self.example:
            save_as(draw(figures.example()), output)
        else:
            self._show_models(output)
        print(f"written: {output}")

    def _show_models(self, output: Path) -> None:
        from halflife.analysis.masks import measure_masks
        from halflife.cli.options import default_device
        from halflife.report.figures import masks as figures
        from halflife.report.figures.matplotlib_renderer import draw, save_as
        from halflife.report.tables.masks import mask_table

        gates_of = measure_masks(
            self.folders, text=self.text, task=self.task, tokens=self.tokens, sequences=self.sequences,
            tokenizer=self.tokenizer, device=default_device(self.device),
        )  # fmt: skip
        heads = [figures.most_resets(label, gates, self.layer, self.head) for label, gates in gates_of.items()]
        print(mask_table(gates_of, self.block).terminal())
        save_as(draw(figures.mask(heads)), output)
        if (more := len(heads) - figures.MAX_ROWS) > 0:
            print(f"The picture shows the first {figures.MAX_ROWS} models, not the other {more}.")
