"""The figure of `halflife.lab.theory.statements`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from halflife.report.style import INK, REFERENCE_LINE, WIDTH, styled

ROUNDING = 1e-9  # an identity whose error is above this is none
LEAST = 1e-17  # where an error of 0 is drawn


@styled
def statement_values(data: Mapping[str, Any]) -> Figure:
    """Errors of identities with the limit of rounding, and quotients of values and their bounds with the limit 1 (log).

    Args:
        data: what `theory.statements.statements` returns.
    """
    rows = {kind: [one for one in data.values() if one["kind"] == kind] for kind in ("identity", "bound")}
    figure = Figure(figsize=(WIDTH, 1.2 + 0.2 * sum(map(len, rows.values()))), layout="constrained")
    panels = figure.subplots(2, 1, height_ratios=[len(kind) for kind in rows.values()])
    labels = {"identity": ("relative error of an identity", ROUNDING), "bound": ("value / bound", 1)}
    for axes, (kind, shown) in zip(panels, rows.items(), strict=True):
        label, limit = labels[kind]
        for y, one in enumerate(reversed(shown)):
            axes.plot(max(one["value"], LEAST), y, "o", color=INK, markersize=4)
        axes.axvline(limit, **REFERENCE_LINE)
        axes.set_yticks(range(len(shown)), [f"{one['source']}: {one['what']}" for one in reversed(shown)], fontsize=7)
        axes.set(xscale="log", xlabel=label)
    return figure
