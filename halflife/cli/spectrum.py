"""`halflife spectrum`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tyro.conf import Positional


@dataclass(frozen=True)
class Spectrum:
    """Show what trained models can remember, why, and for how long: the spectrum of their decays, layer by layer.

    From the weights alone: time-scales of all channels at positions 1, T, 4T and 16T, how many distinct ones they come
    to, how many are wasted, and PoST's learned taper (spectrum*.png). With a text that the models read: the decays λ at
    every token, and the horizon, the lag at which what a token wrote has faded to 1/e (decays.png). Data: decays.json,
    decays.csv. For layers of spectral Koopman attention, with a text: the eigenvalues of their operators, conditioning,
    what the power filter keeps, γ, μ and η (koopman.*).

    examples:
      halflife spectrum runs/20260101-120000-mqar-smoke --text tinyshakespeare.txt
      halflife spectrum my-checkpoint another --text book.txt.gz --length 4096 --heads --output decays
      halflife spectrum mamba2-130m-hf --train-length 2048
    """

    folders: Positional[tuple[Path, ...]]
    """Checkpoints, or runs: all checkpoints below a folder are read. Ours, or safetensors of transformers' Mamba-2,
    fla's GLA, Gated DeltaNet and RWKV-7."""
    text: tuple[Path, ...] = ()
    """Files to read, one after the other; .gz is unpacked. Models of a vocabulary of 256 read bytes."""
    length: int = 2048
    """Tokens of a sequence; each is read from its start."""
    sequences: int = 8
    """How many, evenly spread over the text."""
    train_length: int | None = None
    """T, where the run or PoST does not tell; else it is the length that is read."""
    tokenizer: str | None = None
    """For models of tokens: name or folder of a tokenizer of transformers."""
    heads: bool = False
    """A table of all heads as well."""
    output: Path | None = None
    """The folder to write. Default: spectrum/ in the first folder."""
    device: str | None = None
    """Where to run; by default the GPU if there is one, else the CPU."""
    quiet: bool = False
    """No progress bar."""

    def run(self) -> None:
        import torch

        from halflife.analysis import survey as decay_survey
        from halflife.analysis import tables
        from halflife.report.figures import decays as decay_figures
        from halflife.report.figures import spectrum as model_spectrum_figures
        from halflife.report.figures.matplotlib_renderer import save
        from halflife.report.tables import operators as koopman_report

        result = decay_survey.survey(
            self.folders, self.text, length=self.length, sequences=self.sequences, train_length=self.train_length,
            tokenizer=self.tokenizer, show=not self.quiet,
            device=self.device or ("cuda" if torch.cuda.is_available() else "cpu"),
        )  # fmt: skip
        output = self.output or self.folders[0] / "spectrum"
        if self.text:
            print_decays(result)
        print_spectra(result)
        if self.heads:
            print_heads(result)
        files = tables.write_tables(result, output)
        if self.text:
            files += save(decay_figures.decays(result), output, "decays")
        for name, figure in model_spectrum_figures.spectrum_figures(tables.finite(result)).items():
            files += save(figure, output, name)
        files += koopman_report.write(koopman_report.operators_of(result), output)
        print(f"written to {output}: {', '.join(file.name for file in files)}")


def print_decays(result: dict[str, Any]) -> None:
    """Prints the decays on the text that `decay_survey.survey` gives, a row a layer, two under GateRank."""
    from halflife.analysis.tables import table_rows

    headings = ("model", "layer", "median", "quartiles", "half-life", "slowest", "horizon")
    rows = [[_decay_cells(row) for row in table_rows(model)] for model in result["models"]]
    _print_table("decay λ", headings, _labelled(result, rows))
    print(f"read: {result['sequences']} × {result['length']:,} tokens. half-life: tokens, at the median.")
    print("slowest: half-life of the channel that keeps longest, by its mean log-decay.")
    print("horizon: lag at which the head that keeps longest has 1/e of a write left (RMS).")
    if any("slow" in layer for model in result["models"] for layer in model["layers"]):
        print("GateRank: fast state, with the horizon of both; slow state (λ = 1: no reset).")


def _decay_cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{row['layer']} {row['state']}".strip(), f"{row['median']:.4f}", f"{row['q25']:.4f}–{row['q75']:.4f}",
        _tokens(row["half_life"]), _tokens(row["slowest_half_life"]), _tokens(row["horizon"], row["longest_lag"]),
    )  # fmt: skip


def print_spectra(result: dict[str, Any]) -> None:
    """Prints the base spectra at T that `decay_survey.survey` gives, a row a layer."""
    headings = ("model", "layer", "T", "N", "time-scales", "modes", "text", "slow", "fast")
    rows = [_spectrum_rows(model) for model in result["models"]]
    _print_table("base spectrum", headings, _labelled(result, rows))
    print("time-scales: tokens to 1/e, of N channels at position T, at zero input.")
    print("modes: how many distinct ones; text: at the mean decays on the text.")
    print("slow, fast: channels wasted, with a time-scale beyond T, or below 1 token.")
    for model in result["models"]:
        if tapers := [layer["taper"] for layer in model["layers"] if "taper" in layer]:
            worst = max(tapers, key=lambda taper: taper["deviation"])
            print(
                f"{model['model']}: taper up to {worst['deviation']:.3f} from the ideal one "
                f"(octaves uneven by ε = {worst['sharp_slack']:.2f})."
            )


def _spectrum_rows(model: dict[str, Any]) -> list[tuple[str, ...]]:
    from halflife.analysis.model_spectrum import training_position

    at, rows = training_position(model), []
    known = at > 1
    for layer in model["layers"]:
        base, text = layer["spectra"][str(at)], layer["spectra"].get("text")
        rows.append((
            str(layer["layer"]), f"{at:,}" if known else "–", str(len(base["timescales"])), _range(base["timescales"]),
            f"{base['modes']:.1f}", f"{text['modes']:.1f}" if text else "–",
            f"{base['too_slow']:.0%}" if known else "–", f"{base['too_fast']:.0%}",
        ))  # fmt: skip
    return rows


def print_heads(result: dict[str, Any]) -> None:
    """Prints the base time-scales at T of every head and, with a text, its decays there, slow states below."""
    from rich.markup import escape

    headings = ("layer", "head", "time-scales", "median", "quartiles", "erased", "horizon")
    headings = headings if result["text"] else headings[:3]
    for model in result["models"]:
        if model["layers"]:
            sections = [_head_rows(model, layer) for layer in model["layers"]]
            _print_table(f"heads of {escape(model['model'])}", headings, sections)
    if result["text"]:
        print("erased: share of the tokens that leave less than half, λ < 0.5.")


def _head_rows(model: dict[str, Any], layer: dict[str, Any]) -> list[tuple[str, ...]]:
    from halflife.analysis.model_spectrum import training_position

    scales, count = layer["spectra"][str(training_position(model))]["timescales"], layer["num_heads"]
    size = len(scales) // count
    first = [(str(layer["layer"]), str(h), _range(scales[h * size : (h + 1) * size])) for h in range(count)]
    if "heads" not in layer:
        return first
    first = [(*row, *_head_cells(layer, head)) for row, head in zip(first, layer["heads"], strict=True)]
    slow = layer.get("slow", {}).get("heads", [])
    return first + [(f"{layer['layer']} slow", str(h), "–", *_head_cells(layer, head)) for h, head in enumerate(slow)]


def _head_cells(layer: dict[str, Any], head: dict[str, Any]) -> tuple[str, ...]:
    quartiles, horizon = f"{head['q25']:.4f}–{head['q75']:.4f}", _tokens(head["horizon"], layer["longest_lag"])
    return f"{head['median']:.4f}", quartiles, f"{head['erased']:.1%}", horizon


def _labelled(result: dict[str, Any], rows: list[list[tuple[str, ...]]]) -> list[list[tuple[str, ...]]]:
    """A section a model, its name in the first row."""
    from rich.markup import escape

    sections = []
    for model, section in zip(result["models"], rows, strict=True):
        label = escape(model["model"])
        sections.append([("" if i else label, *row) for i, row in enumerate(section)] or [(label, "", "no decay")])
    return sections


def _print_table(title: str, headings: tuple[str, ...], sections: list[list[tuple[str, ...]]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from halflife.report.tables.terminal import print_wide

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for section in sections:
        for i, row in enumerate(section):
            table.add_row(*row, end_section=i + 1 == len(section))
    print_wide(table)


def _range(scales: list[float]) -> str:
    low, high = _tokens(min(scales)), _tokens(max(scales))
    return low if low == high else f"{low}–{high}"


def _tokens(number: float, longest: int | None = None) -> str:
    """A number of tokens; `longest` is the lag beyond which an infinite one lies."""
    if math.isinf(number):
        return "∞" if longest is None else f">{longest:,}"
    return f"{number:,.0f}" if 100 <= number < 1e6 else f"{number:.3g}"
