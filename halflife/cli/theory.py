"""`halflife theory`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Theory:
    """Compute what PoST states of decay spectra, beside what is so: tables, theory.json, and a figure a topic.

    Topics: errors (Table 1: how well N channels imitate t^−β on T tokens), ends (where the rates begin and end),
    positions (static, adapted, as run), gaps, coherence, channels (in use at t), responses, energy, taper;
    autocovariance of a text (--text), information per octave of context (--runs). A second command on the same folder
    replaces the topics that it computes and keeps the others.

    examples:
      halflife theory
      halflife theory --text book.txt --runs runs/my-model
      halflife theory --only positions channels --channels 32 --length 100000
      halflife theory --only errors --lengths 1e2 1e4 --counts 2 4 8 --beta 0.3
    """

    channels: int = 16
    """N."""
    length: int = 10_000
    """T, in tokens."""
    beta: float = 0.5
    """Exponent of the power law t^−β."""
    lengths: tuple[float, ...] = (1e2, 1e3, 1e4, 1e5, 1e6)
    """T of Table 1."""
    counts: tuple[int, ...] = (2, 4, 8, 12, 16, 24, 32)
    """N of Table 1, besides --channels."""
    text: tuple[Path, ...] = ()
    """Files whose autocovariance is measured, one after the other; .gz is unpacked."""
    tokenizer: str | None = None
    """For text as tokens: name or folder of a tokenizer of transformers. Default: bytes."""
    tokens: int = 1 << 20
    """How many tokens of the text are read, from its start."""
    runs: tuple[Path, ...] = ()
    """Runs of `halflife train`: their loss by position, and, of a text, its autocovariance in their embeddings."""
    only: tuple[str, ...] = ()
    """Topics to compute. Default: all for which there are files."""
    seed: int = 0
    """Of random spectra, simulations and the bootstrap."""
    output: Path = Path("runs/theory")
    """The folder to write; it keeps the best ends for the next time."""
    quiet: bool = False
    """No progress bar."""

    def run(self) -> None:
        from halflife.report.figures.theory import draw_all
        from halflife.theory import compute as theory_report

        settings = theory_report.Settings(
            **{field.name: getattr(self, field.name) for field in fields(theory_report.Settings)}
        )
        cache = self.output / "theory_ends.json"
        found = theory_report.compute(settings, self.only, cache=cache, show=not self.quiet)
        print_tables(found)
        data = theory_report.write(found, self.output)
        files = ["theory.json", *(file.name for file in draw_all({name: data[name] for name in found}, self.output))]
        print(f"written to {self.output}: {', '.join(files)}")


# ---------------------------------------------------------------------------------------------- tables


class Rows(NamedTuple):
    """A table: its title, headings, rows of cells, and a line below it."""

    title: str
    headings: Sequence[str]
    rows: Iterable[Sequence[str]]
    note: str = ""


def print_tables(found: dict[str, Any]) -> None:
    """Prints the tables of what `theory_report.compute` gives, topic by topic."""
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    from halflife.report.tables.terminal import print_wide

    for name, data in found.items():
        for title, headings, rows, note in TABLES[name](data) if name in TABLES else ():
            print(title)  # a table's own title would break at the table's width
            table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
            for i, heading in enumerate(headings):
                table.add_column(heading, justify="right" if i else "left")
            for row in rows:
                table.add_row(*map(escape, row))
            print_wide(table)
            if note:
                print(note)


def _errors(data: dict[str, Any]) -> Iterator[Rows]:
    lines = [(row["spectrum"], f"{row['length']:g}", row) for row in data["slopes"]]
    yield Rows(
        f"largest error of t^−{data['beta']:g} on 1 … T", ("spectrum", "T", *(f"N = {n}" for n in data["channels"])),
        [(name, length, *map(_small, data["errors"][name][length])) for name, length, _ in lines],
        f"Random: the median of {data['draws']} draws.",
    )  # fmt: skip
    numbers = ("per_channel", "claimed_per_channel", "offset", "power", "claimed_power")
    yield Rows(
        "how fast it falls", ("spectrum", "T", "a channel", "π²/log T", "C₆", "power of N", "β"),
        [(name, length, *(_number(row[key]) for key in numbers)) for name, length, row in lines],
        "a channel: the slope of −log error against N, beside what the paper claims but for C₆; power of N: the slope\n"
        "against log N, beside what it claims for linear rates. Errors under 1e-12 are not counted.",
    )  # fmt: skip


def _ends(data: dict[str, Any]) -> Iterator[Rows]:
    rows = [
        (row["spectrum"], _number(row["low"]), _number(row["high"]), _small(row["integers"]), _small(row["interval"]))
        for row in data["rows"]
    ]
    yield Rows(
        f"where the rates end: N = {data['channels']}, T = {data['length']:,}, β = {data['beta']:g}",
        ("spectrum", "slowest × T", "fastest", "error on 1 … T", "on [1, T]"), rows,
        f"Linear: with the best step. Random: the median of {data['draws']} draws.",
    )  # fmt: skip


def _positions(data: list[dict[str, Any]]) -> Iterator[Rows]:
    for found in data:
        (low, high), errors = found["ends"], found["errors"]
        yield Rows(
            f"error on 1 … t, rates from {low * found['length']:.3g}/T to {high:.3g}", ("t", *errors),
            [(f"{t:,}", *map(_small, row)) for t, *row in zip(found["positions"], *errors.values(), strict=True)],
        )  # fmt: skip


def _gaps(data: dict[str, Any]) -> Iterator[Rows]:
    columns = [data[key] for key in ("channels", "mean", "error", "bound", "even", "largest")]
    yield Rows(
        f"gaps of random log-rates, {data['trials']:,} draws",
        ("N", "least, mean", "±", "bound", "even spacing", "largest, mean"),
        [(f"{n:,}", *map(_number, row)) for n, *row in zip(*columns, strict=True)],
    )  # fmt: skip


def _coherence(data: dict[str, Any]) -> Iterator[Rows]:
    rows = [(name, f"{found['largest']:.5f}", f"{found['bound']:.5f}") for name, found in data.items()]
    yield Rows("coherence of two channels", ("spectrum", "largest", "sech(δ/2), least gap δ"), rows)


def _energy(data: dict[str, Any]) -> Iterator[Rows]:
    kinds = ("continuous", "frozen", "as run", "simulated")
    yield Rows(
        f"energy at t = {data['positions'][-1]:,} of unit noise, time-scale t^α", ("α", *kinds),
        [(f"{alpha:g}", *(_number(data[kind][i][-1]) for kind in kinds)) for i, alpha in enumerate(data["tapers"])],
        f"simulated: the mean of {data['trials']:,} runs.",
    )  # fmt: skip


def _taper(data: dict[str, Any]) -> Iterator[Rows]:
    rows = []
    for slack, found in data.items():
        even = [1 - k / (len(found["best"]) - 1) for k in range(len(found["best"]))]
        off = max(abs(a - b) for a, b in zip(found["best"], even, strict=True))
        rows.append((slack, *(f"{value:.3f}" for value in (max(found["paper"]), max(found["sharp"]), off))))
    yield Rows(
        "how far the best taper may be from (N−k)/(N−1), most of all channels",
        ("slack ε", "paper's bound", "sharp bound", "uneven"), rows,
        "uneven: the first (1 − ε)/2 of the octaves carry J₀(1 + ε), the others J₀(1 − ε).",
    )  # fmt: skip


def _autocovariance(data: dict[str, Any]) -> Iterator[Rows]:
    rows = []
    for name, found in data["sequences"].items():
        lags = [lag for lag, used in zip(found["lags"], found["used"], strict=True) if used]
        rows.append((
            name, f"{found['exponent']:.2f}", f"{found['low']:.2f} to {found['high']:.2f}",
            f"{lags[0]:,.0f} to {lags[-1]:,.0f}",
        ))  # fmt: skip
    rows += [(name, "–", reason, "") for name, reason in data["without"].items()]
    yield Rows(
        f"autocovariance of the text, R(s) ∝ s^−β, {data['tokens']:,} tokens", ("of", "β", "95 %", "lags"), rows,
        "The interval is too narrow: of 24 sequences of known β = 0.3 (0.6) it held β 18 (21) times.",
    )  # fmt: skip


def _information(data: dict[str, Any]) -> Iterator[Rows]:
    scales = sorted({scale for found in data.values() for scale in found["scales"]})
    rows = []
    for name, found in data.items():
        by_scale = dict(zip(found["scales"], found["information"], strict=True))
        rows.append((name, *(f"{by_scale[a]:.3f}" if a in by_scale else "–" for a in scales), _number(found["slack"])))
    yield Rows(
        "information J(σ) of an octave of context, bits a token",
        ("run", *(f"{a:,}–{2 * a:,}" for a in scales), "slack ε"), rows,
    )  # fmt: skip


TABLES: dict[str, Callable[[Any], Iterator[Rows]]] = {
    "errors": _errors, "ends": _ends, "positions": _positions, "gaps": _gaps, "coherence": _coherence,
    "energy": _energy, "taper": _taper, "autocovariance": _autocovariance, "information": _information,
}  # fmt: skip


def _small(value: float) -> str:
    return f"{value:.1e}".replace("e-0", "e-")


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
