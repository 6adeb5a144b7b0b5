"""The tables of `halflife theory`, one function for each topic.

The functions take the data of a topic as it stands in `theory.json`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from halflife.report.tables.terminal import print_sections


class TopicTable(NamedTuple):
    """A table of a topic: its title, headings, rows of cells, and a note below it."""

    title: str
    headings: Sequence[str]
    rows: Iterable[Sequence[str]]
    note: str = ""


def print_tables(topics: dict[str, Any]) -> None:
    """Print the tables of each topic that `theory.compute` gives."""
    from rich.markup import escape

    for name, data in topics.items():
        for title, headings, rows, note in TABLES[name](data) if name in TABLES else ():
            print(title)  # rich would break a title at the width of its table
            print_sections(None, headings, [[tuple(map(escape, row)) for row in rows]], left=headings[:1])
            if note:
                print(note)


def _errors(data: dict[str, Any]) -> Iterator[TopicTable]:
    lines = [(row["spectrum"], f"{row['length']:g}", row) for row in data["slopes"]]
    yield TopicTable(
        f"largest error of t^−{data['beta']:g} on 1 … T", ("spectrum", "T", *(f"N = {n}" for n in data["channels"])),
        [(name, length, *map(_small, data["errors"][name][length])) for name, length, _ in lines],
        f"Random rates: median of {data['draws']} draws.",
    )  # fmt: skip
    numbers = ("per_channel", "claimed_per_channel", "offset", "power", "claimed_power")
    yield TopicTable(
        "how fast the error falls", ("spectrum", "T", "a channel", "π²/log T", "C₆", "power of N", "β"),
        [(name, length, *(_number(row[key]) for key in numbers)) for name, length, row in lines],
        "a channel: slope of −log error against N. π²/log T: the paper's claim for it, without C₆.\n"
        "power of N: slope of −log error against log N. β: the paper's claim for it. Errors under 1e-12 are left out.",
    )  # fmt: skip


def _ends(data: dict[str, Any]) -> Iterator[TopicTable]:
    rows = [
        (row["spectrum"], _number(row["low"]), _number(row["high"]), _small(row["integers"]), _small(row["interval"]))
        for row in data["rows"]
    ]
    yield TopicTable(
        f"error by the ends of the rates: N = {data['channels']}, T = {data['length']:,}, β = {data['beta']:g}",
        ("spectrum", "slowest × T", "fastest", "error on 1 … T", "on [1, T]"), rows,
        f"Linear rates have the best step. Random rates: median of {data['draws']} draws.",
    )  # fmt: skip


def _positions(data: list[dict[str, Any]]) -> Iterator[TopicTable]:
    for spectrum in data:
        (low, high), errors = spectrum["ends"], spectrum["errors"]
        yield TopicTable(
            f"error on 1 … t, rates from {low * spectrum['length']:.3g}/T to {high:.3g}", ("t", *errors),
            [(f"{t:,}", *map(_small, row)) for t, *row in zip(spectrum["positions"], *errors.values(), strict=True)],
        )  # fmt: skip


def _gaps(data: dict[str, Any]) -> Iterator[TopicTable]:
    columns = [data[key] for key in ("channels", "mean", "error", "bound", "even", "largest")]
    yield TopicTable(
        f"gaps of random log-rates, {data['trials']:,} draws",
        ("N", "mean smallest", "±", "bound", "even spacing", "mean largest"),
        [(f"{n:,}", *map(_number, row)) for n, *row in zip(*columns, strict=True)],
    )  # fmt: skip


def _coherence(data: dict[str, Any]) -> Iterator[TopicTable]:
    rows = [(name, f"{one['largest']:.5f}", f"{one['bound']:.5f}") for name, one in data.items()]
    yield TopicTable("coherence of two channels", ("spectrum", "largest", "sech(δ/2), smallest gap δ"), rows)


def _energy(data: dict[str, Any]) -> Iterator[TopicTable]:
    kinds = ("continuous", "frozen", "as run", "simulated")
    yield TopicTable(
        f"energy at t = {data['positions'][-1]:,} of unit noise, time-scale t^α", ("α", *kinds),
        [(f"{alpha:g}", *(_number(data[kind][i][-1]) for kind in kinds)) for i, alpha in enumerate(data["tapers"])],
        f"simulated: mean of {data['trials']:,} runs.",
    )  # fmt: skip


def _taper(data: dict[str, Any]) -> Iterator[TopicTable]:
    rows = []
    for slack, one in data.items():
        even = [1 - k / (len(one["best"]) - 1) for k in range(len(one["best"]))]
        off = max(abs(a - b) for a, b in zip(one["best"], even, strict=True))
        rows.append((slack, *(f"{value:.3f}" for value in (max(one["paper"]), max(one["sharp"]), off))))
    yield TopicTable(
        "largest distance of the best taper from (N−k)/(N−1), over all channels",
        ("slack ε", "paper's bound", "sharp bound", "uneven"), rows,
        "uneven: distance if the first (1 − ε)/2 of the octaves carry J₀(1 + ε), the others J₀(1 − ε).",
    )  # fmt: skip


def _autocovariance(data: dict[str, Any]) -> Iterator[TopicTable]:
    rows = []
    for name, one in data["sequences"].items():
        lags = [lag for lag, used in zip(one["lags"], one["used"], strict=True) if used]
        rows.append((
            name, f"{one['exponent']:.2f}", f"{one['low']:.2f} to {one['high']:.2f}",
            f"{lags[0]:,.0f} to {lags[-1]:,.0f}",
        ))  # fmt: skip
    rows += [(name, "–", reason, "") for name, reason in data["without"].items()]
    yield TopicTable(
        f"autocovariance of the text, R(s) ∝ s^−β, {data['tokens']:,} tokens", ("of", "β", "95 %", "lags"), rows,
        "The interval is too narrow: of 24 sequences of known β = 0.3 (0.6) it contained β 18 (21) times.",
    )  # fmt: skip


def _information(data: dict[str, Any]) -> Iterator[TopicTable]:
    scales = sorted({scale for one in data.values() for scale in one["scales"]})
    rows = []
    for name, one in data.items():
        by_scale = dict(zip(one["scales"], one["information"], strict=True))
        rows.append((name, *(f"{by_scale[a]:.3f}" if a in by_scale else "–" for a in scales), _number(one["slack"])))
    yield TopicTable(
        "information J(σ) of an octave of context, bits a token",
        ("run", *(f"{a:,}–{2 * a:,}" for a in scales), "slack ε"), rows,
    )  # fmt: skip


TABLES: dict[str, Callable[[Any], Iterator[TopicTable]]] = {
    "errors": _errors, "ends": _ends, "positions": _positions, "gaps": _gaps, "coherence": _coherence,
    "energy": _energy, "taper": _taper, "autocovariance": _autocovariance, "information": _information,
}  # fmt: skip


def _small(value: float) -> str:
    return f"{value:.1e}".replace("e-0", "e-")


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
