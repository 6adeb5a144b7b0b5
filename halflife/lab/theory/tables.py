"""The tables of `halflife theory`, one function for each topic.

The functions take the data of a topic as it stands in `theory.json`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from halflife.report.table import Table


def theory_tables(topics: dict[str, Any]) -> Iterator[Table]:
    """The tables of each topic that `theory.compute` gives."""
    for name, data in topics.items():
        if name in TABLES:
            yield from TABLES[name](data)


def _errors(data: dict[str, Any]) -> Iterator[Table]:
    lines = [(row["spectrum"], f"{row['length']:g}", row) for row in data["slopes"]]
    yield Table(
        ("spectrum", "T", *(f"N = {n}" for n in data["channels"])),
        [(name, length, *map(small, data["errors"][name][length])) for name, length, _ in lines],
        f"Random rates: median of {data['draws']} draws.", title=f"largest error of t^−{data['beta']:g} on 1 … T",
    )  # fmt: skip
    numbers = ("per_channel", "claimed_per_channel", "offset", "power", "claimed_power")
    yield Table(
        ("spectrum", "T", "a channel", "π²/log T", "C₆", "power of N", "β"),
        [(name, length, *(_number(row[key]) for key in numbers)) for name, length, row in lines],
        "a channel: slope of −log error against N. π²/log T: the paper's claim for it, without C₆.\n"
        "power of N: slope of −log error against log N. β: the paper's claim for it. Errors under 1e-12 are left out.",
        title="how fast the error falls",
    )


def _ends(data: dict[str, Any]) -> Iterator[Table]:
    rows = [
        (row["spectrum"], _number(row["low"]), _number(row["high"]), small(row["integers"]), small(row["interval"]))
        for row in data["rows"]
    ]
    yield Table(
        ("spectrum", "slowest × T", "fastest", "error on 1 … T", "on [1, T]"), rows,
        f"Linear rates have the best step. Random rates: median of {data['draws']} draws.",
        title=f"error by the ends of the rates: N = {data['channels']}, T = {data['length']:,}, β = {data['beta']:g}",
    )  # fmt: skip


def _positions(data: list[dict[str, Any]]) -> Iterator[Table]:
    for spectrum in data:
        (low, high), errors = spectrum["ends"], spectrum["errors"]
        yield Table(
            ("t", *errors),
            [(f"{t:,}", *map(small, row)) for t, *row in zip(spectrum["positions"], *errors.values(), strict=True)],
            "adapted: with the rates of Theorem 4.11 at t. as run: each step has the rates of its own position.",
            title=f"error on 1 … t, rates from {low * spectrum['length']:.3g}/T to {high:.3g}",
        )


def _gaps(data: dict[str, Any]) -> Iterator[Table]:
    columns = [data[key] for key in ("channels", "mean", "error", "bound", "even", "largest")]
    yield Table(
        ("N", "mean smallest", "±", "bound", "even spacing", "mean largest"),
        [(f"{n:,}", *map(_number, row)) for n, *row in zip(*columns, strict=True)],
        title=f"gaps of random log-rates, {data['trials']:,} draws",
    )


def _channels(data: dict[str, Any]) -> Iterator[Table]:
    forms = {"static": data, "t_ref = T": data["theorem"], "t_ref = 1": data["default"]}
    last = [(name, str(one["counted"][-1]), f"{one['law'][-1]:.1f}") for name, one in forms.items()]
    yield Table(
        ("rates", "counted", "law"), last,
        title=f"channels with time-scales in [1, t] at t = {data['positions'][-1]:,}, of {data['channels']}",
    )  # fmt: skip


def _energy(data: dict[str, Any]) -> Iterator[Table]:
    kinds = ("continuous", "frozen", "as run", "simulated")
    for form, scale in ((data, "t^α"), (data["default"], "(T t)^α (t_ref = 1)")):
        yield Table(
            ("α", *kinds),
            [(f"{alpha:g}", *(_number(form[kind][i][-1]) for kind in kinds)) for i, alpha in enumerate(form["tapers"])],
            f"simulated: mean of {form['trials']:,} runs.",
            title=f"energy at t = {form['positions'][-1]:,} of unit noise, time-scale {scale}",
        )


def _normalization(data: dict[str, Any]) -> Iterator[Table]:
    rows = []
    for name, form in (("static", "static"), ("t_ref = T", "theorem"), ("t_ref = 1", "algorithm")):
        one = data[form]
        for i, multiple in enumerate(data["multiples"]):
            claimed = 1 if form == "static" else multiple
            numbers = (claimed, one["frozen"][i], one["as run"][i], one["claimed middle"][i], one["middle"][i])
            rows.append((name, f"{multiple} T", *map(_number, numbers), f"{one['shrunk'][i]:.2f}"))
    yield Table(
        ("rates", "t₂", "claimed", "frozen", "as run", "middle, claimed", "as run", "norm"), rows,
        "Slowest against fastest channel, then middle against fastest. norm: factor on the fastest after a joint norm.",
        title=f"growth of energy ratios from T = {data['length']:,} on, {data['channels']} channels",
    )  # fmt: skip


def _taper(data: dict[str, Any]) -> Iterator[Table]:
    rows = []
    for slack, one in data.items():
        even = [1 - k / (len(one["best"]) - 1) for k in range(len(one["best"]))]
        off = max(abs(a - b) for a, b in zip(one["best"], even, strict=True))
        rows.append((slack, *(f"{value:.3f}" for value in (max(one["paper"]), max(one["sharp"]), off))))
    yield Table(
        ("slack ε", "paper's bound", "sharp bound", "uneven"), rows,
        "uneven: distance if the first (1 − ε)/2 of the octaves carry J₀(1 + ε), the others J₀(1 − ε).",
        title="largest distance of the best taper from (N−k)/(N−1), over all channels",
    )  # fmt: skip


def _autocovariance(data: dict[str, Any]) -> Iterator[Table]:
    rows = []
    for name, one in data["sequences"].items():
        lags = [lag for lag, used in zip(one["lags"], one["used"], strict=True) if used]
        rows.append((
            name, f"{one['exponent']:.2f}", f"{one['low']:.2f} to {one['high']:.2f}",
            f"{lags[0]:,.0f} to {lags[-1]:,.0f}",
        ))  # fmt: skip
    rows += [(name, "–", reason, "") for name, reason in data["without"].items()]
    yield Table(
        ("of", "β", "95 %", "lags"), rows,
        "The interval is too narrow: of 24 sequences of known β = 0.3 (0.6) it contained β 18 (21) times.",
        title=f"autocovariance of the text, R(s) ∝ s^−β, {data['tokens']:,} tokens",
    )  # fmt: skip


def _blocks(data: dict[str, Any]) -> Iterator[Table]:
    def cell(value: float | None, low: float | None, high: float | None) -> str:
        interval = "" if low is None or high is None else f" ({low:.2f} to {high:.2f})"
        return "–" if value is None else f"{value:.2f}{interval}"

    columns = [data[key] for key in ("exponents", "low", "high")]
    rows = [
        (f"{factor}", *(cell(*(column[i][j] for column in columns)) for j in range(len(data["lags"]))))
        for i, factor in enumerate(data["factors"])
    ]
    yield Table(
        ("b", *(f"s = {lag}" for lag in data["lags"])), rows,
        f"Under the condition all are β. The autocovariance has β = {data['beta']:.2f}. Brackets: 95 %, too narrow.",
        title=f"Condition 3.2: −log(R_b(s)/R(s)) / log b, {data['tokens']:,} tokens",
    )  # fmt: skip


def _density(data: dict[str, Any]) -> Iterator[Table]:
    used = [f for f, on in zip(data["frequencies"], data["used"], strict=True) if on]
    rows = [
        ("measured", f"{data['slope']:.2f}", f"{data['low']:.2f} to {data['high']:.2f}"),
        ("β − 1", f"{data['claimed slope']:.2f}", f"{data['claimed low']:.2f} to {data['claimed high']:.2f}"),
    ]
    title = f"Corollary 3.7: slope of the power spectrum, {used[0]:.1e} to {used[-1]:.1e} cycles a token"
    yield Table(("", "slope", "95 %"), rows, title=title)


def _information(data: dict[str, Any]) -> Iterator[Table]:
    scales = sorted({scale for one in data.values() for scale in one["scales"]})
    rows = []
    for name, one in data.items():
        by_scale = dict(zip(one["scales"], one["information"], strict=True))
        rows.append((name, *(f"{by_scale[a]:.3f}" if a in by_scale else "–" for a in scales), _number(one["slack"])))
    yield Table(
        ("run", *(f"{a:,}–{2 * a:,}" for a in scales), "slack ε"), rows,
        title="information J(σ) of an octave of context, bits a token",
    )  # fmt: skip


def _gradients(data: dict[str, Any]) -> Iterator[Table]:
    yield Table(
        ("T", "rank: attention", "SKA", "norm: attention", "bound", "SKA", "bound", "sharp", "least σ", "bound"),
        [
            (*(f"{row[key]}" for key in ("tokens", "attention rank", "ska rank")),
             *(_number(row[key]) for key in ("attention", "attention bound", "ska", "ska bound", "ska sharp")),
             *(small(row[key]) for key in ("ska least", "ska lower")))
            for row in data["by tokens"]
        ],
        title="Jacobians of a head by the number of tokens: "
        f"r = {data['rank']}, P = {data['width']}, K = {data['power']}",
    )  # fmt: skip
    keys = ("largest weight", "attention", "attention bound", "ska")
    yield Table(
        ("scale", "largest weight", "attention", "bound", "SKA"),
        [(f"{row['scale']:g}", *(_number(row[key]) for key in keys)) for row in data["by scale"]],
        title="the same by the scale of the query",
    )
    keys = ("attention", "attention bound", "ska", "ska bound")
    yield Table(
        ("depth", "attention", "bound", "SKA", "bound"),
        [(f"{row['depth']}", *(small(row[key]) for key in keys)) for row in data["by depth"]],
        title="products of Jacobians by depth (Theorem J.9)",
    )


def _phases(data: dict[str, Any]) -> Iterator[Table]:
    keys = ("raw", "expected", "invariant", "expected invariant", "centred", "expected centred")
    yield Table(
        ("ρ", "jitter", "|A|", "expected", "squares", "expected", "centred", "expected"),
        [
            (f"{row['correlation']:g}", "∞" if row["jitter"] is None else f"{row['jitter']:g}",
             *(f"{row[key]:.3f}" for key in keys))
            for row in data["rows"]
        ],
        title=f"operators of keys with a phase, {data['length']:,} tokens (Prop. C.5)",
    )  # fmt: skip


def _gram(data: dict[str, Any]) -> Iterator[Table]:
    keys = ("trace", "frobenius", "largest", "least", "directions")
    yield Table(
        ("T (bound)", "first key ×", "trace", "‖·‖_F", "λ_max", "λ_min", "directions"),
        [(f"{row['tokens']:,}", f"{row['outlier']:g}", *(_number(row[key]) for key in keys)) for row in data["rows"]],
        f"directions: tr G (G + ε)⁻¹ with ε = {data['ridge']:g}.",
        title=f"Gram matrix of {data['rank']}-dimensional keys over the largest norm (Prop. E.1)",
    )


def _costs(data: dict[str, Any]) -> Iterator[Table]:
    rows = [
        (name, f"{length:,}", *(small(counts[key][i]) for key in ("train", "printed train", "step", "printed step")))
        for name, counts in data["counts"].items() for i, length in list(enumerate(data["lengths"]))[::2]
    ]  # fmt: skip
    yield Table(
        ("layer", "T", "train, counted", "printed", "step at T, counted", "printed"), rows,
        title="multiplications of a layer, counted, and the orders of Echo's Table 1 with a factor of 1",
    )  # fmt: skip


def _statements(data: dict[str, Any]) -> Iterator[Table]:
    def cell(value: Any) -> str:
        if isinstance(value, dict):
            return "; ".join(f"{name}: {cell(each)}" for name, each in value.items())
        if isinstance(value, list):
            return ", ".join(map(_number, value))
        return small(value)

    limits = {"identity": "0", "bound": "≤ 1", "number": ""}
    yield Table(
        ("source", "quantity", "expected", "value"),
        [(one["source"], one["what"], limits[one["kind"]], cell(one["value"])) for one in data.values()],
        "An identity has its largest relative error, and a bound the largest quotient of a value and the bound.",
        title="statements on random draws, in float64",
    )


TABLES: dict[str, Callable[[Any], Iterator[Table]]] = {
    "errors": _errors, "ends": _ends, "positions": _positions, "gaps": _gaps,
    "channels": _channels, "energy": _energy, "normalization": _normalization, "taper": _taper,
    "autocovariance": _autocovariance, "blocks": _blocks, "density": _density, "information": _information,
    "gradients": _gradients, "phases": _phases, "gram": _gram, "costs": _costs,
    "statements": _statements,
}  # fmt: skip


def small(value: float) -> str:
    """Write a number with two digits and a power of ten, "1.6e-3"."""
    return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"
