"""Does a row's distribution of decays λ predict its loss? A regression over the rows of the Decay paper's grid."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halflife.analysis.decays import measure_decays
from halflife.data.corpus import Corpus
from halflife.files import read_json, write_json
from halflife.models import LanguageModel, checkpoint
from halflife.models.timescales import layer_decays
from halflife.report.markdown import Rows
from halflife.report.table import Table
from halflife.runs.folder import DECAY_REGRESSION_JSON
from halflife.runs.sweep import Cell
from halflife.training.config import TrainConfig

FEWEST_ROWS = 8  # rows; fewer have no regression
RESAMPLES = 2000
TEXT_SEQUENCES = 4  # of the test text, in each of which decays are measured
HEADING = ("predictors of the loss", "rows", "coefficients", "error, nats", "error of the mean", "explained")
WHEN = {"init": "before training", "trained": "after training"}
# Name → the predictors that a regression has beside a constant, computed from the median m and the spread s of λ.
PREDICTORS: dict[str, Callable[[float, float], list[float]]] = {
    "median": lambda m, s: [m],
    "median and its square": lambda m, s: [m, m * m],
    "spread": lambda m, s: [s],
    "median and spread": lambda m, s: [m, s],
}


def measure(folder: Path, rows: Rows, configure: Callable[[Cell], TrainConfig], ids: Tensor) -> list[dict[str, Any]]:
    """Measure the decays of every selected run that has some, before and after training, on sequences `ids [B, T]`.

    Runs that the folder's `decay_regression.json` has are not measured again. Returns a dict a run: "model", "seed",
    "learning_rate", "loss", and "init" and "trained", each with "median", the median λ, and "spread", the distance of
    its quartiles, as means over layers, and "medians" of the layers.
    """
    file = folder / DECAY_REGRESSION_JSON
    known = {_key(one): one for one in (read_json(file)["runs"] if file.exists() else [])}
    runs = []
    for row in (row for row in rows if row["selected"] and row["loss"] == row["loss"]):
        if (one := known.get(_key(row))) is None:
            cell = Cell(row["model"], row["learning_rate"], row["seed"])
            config = configure(cell)
            torch.manual_seed(config.seed)
            start = LanguageModel(config.model)
            if not layer_decays(start):
                continue
            models = {"init": start, "trained": checkpoint.load(folder / cell.folder)}
            one = {name: row[name] for name in ("model", "seed", "learning_rate", "loss")}
            one |= {when: _distribution(model.eval(), ids) for when, model in models.items()}
        runs.append(one)
    return runs


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["model"], row["seed"], row["learning_rate"], row["loss"]


def _distribution(model: LanguageModel, ids: Tensor) -> dict[str, Any]:
    layers = measure_decays(model, ids)
    medians = [layer.median for layer in layers]
    spread = fmean(layer.q75 - layer.q25 for layer in layers)
    return {"median": fmean(medians), "spread": spread, "medians": medians}


def regress(predictors: Sequence[Sequence[float]], losses: Sequence[float]) -> dict[str, Any]:
    """Fit losses of rows by least squares to a constant and predictors, and estimate the error on a row left out.

    Returns:
        "coefficients", "low" and "high", with 95 % intervals by bootstrap over rows; "error", the root mean square
        error of rows that were left out, and "error of the mean" of a constant alone; "explained", one minus the ratio
        of their squares, which is negative if the predictors do not help. With a value and its square as predictors,
        "best", "best low" and "best high" are the value of the smallest loss; they are NaN if there is none.
    """
    x, y = np.column_stack([np.ones(len(losses)), np.asarray(predictors, dtype=float)]), np.asarray(losses, dtype=float)
    error, plain = _left_out(x, y), _left_out(x[:, :1], y)
    draws = np.random.default_rng(0).integers(0, len(y), (RESAMPLES, len(y)))
    resampled = (np.linalg.pinv(x[draws]) @ y[draws][..., None])[..., 0]
    fitted = np.linalg.pinv(x) @ y
    low, high = np.quantile(resampled, (0.025, 0.975), axis=0)
    result = {
        "rows": len(y), "coefficients": fitted.tolist(), "low": low.tolist(), "high": high.tolist(), "error": error,
        "error of the mean": plain, "explained": 1 - (error / plain) ** 2,
    }  # fmt: skip
    if x.shape[1] == 3 and np.allclose(x[:, 2], x[:, 1] ** 2):
        ends = np.quantile(_minimum(resampled), (0.025, 0.975))  # NaN if a resample has no minimum
        result |= dict(zip(("best", "best low", "best high"), (float(_minimum(fitted)), *ends.tolist()), strict=True))
    return result


def _left_out(x: np.ndarray, y: np.ndarray) -> float:
    """The root mean square of the leave-one-out errors, from the diagonal of the hat matrix."""
    hat = x @ np.linalg.pinv(x)
    return float(np.sqrt(np.mean(((y - hat @ y) / (1 - hat.diagonal()).clip(min=1e-9)) ** 2)))


def _minimum(coefficients: np.ndarray) -> np.ndarray:
    """The minimum of a + b m + c m², NaN where c is not positive."""
    _, b, c = np.moveaxis(coefficients, -1, 0)
    return np.where(c > 0, -b / (2 * np.where(c > 0, c, 1)), np.nan)


def regressions(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The regression of each of `PREDICTORS` before and after training, over the means of the rows over their seeds."""
    models = list(dict.fromkeys(one["model"] for one in runs))
    means = {model: [one for one in runs if one["model"] == model] for model in models}
    losses = [fmean(one["loss"] for one in own) for own in means.values()]
    found: dict[str, dict[str, Any]] = {}
    for when in WHEN:
        medians, spreads = (
            [fmean(one[when][name] for one in own) for own in means.values()] for name in ("median", "spread")
        )
        found[when] = {
            name: regress([columns(m, s) for m, s in zip(medians, spreads, strict=True)], losses)
            for name, columns in PREDICTORS.items()
        }
    return found


def report(folder: Path, rows: Rows, decays: Callable[[Path, Rows], list[dict[str, Any]]]) -> str:
    """Measure decays, write `decay_regression.json`, and return the regressions in Markdown; "" for too few rows.

    `decays` returns what `measure` does.
    """
    if len({row["model"] for row in rows if row["selected"]}) < FEWEST_ROWS:
        return ""
    runs = decays(folder, rows)
    if len({one["model"] for one in runs}) < FEWEST_ROWS:
        return ""
    found = regressions(runs)
    write_json(folder / DECAY_REGRESSION_JSON, {"runs": runs, "regressions": found})
    table = [list(_row(f"{name} of λ {WHEN[when]}", one)) for when in WHEN for name, one in found[when].items()]
    return "\n".join([
        "## Does the distribution of λ predict the loss?", "",
        "Median λ, and the distance of its quartiles (spread), on the test text, as means over layers. The error is "
        "that on a row which the regression has not seen. Coefficients have 95 % intervals by bootstrap over rows.",
        "", Table(HEADING, table).markdown(), "",
    ])  # fmt: skip


def _row(name: str, one: Mapping[str, Any]) -> Iterator[str]:
    spans = zip(one["coefficients"], one["low"], one["high"], strict=True)
    cells = ", ".join(f"{x:.3f} [{low:.3f}, {high:.3f}]" for x, low, high in list(spans)[1:])
    yield from (name, str(one["rows"]), cells + _best(one), f"{one['error']:.4f}", f"{one['error of the mean']:.4f}")
    yield f"{100 * one['explained']:.0f} %"


def _best(one: Mapping[str, Any]) -> str:
    """The minimum of a parabola with its interval, which it has if every resample has a minimum."""
    if "best" not in one:
        return ""
    if math.isnan(one["best"]):
        return "; no minimum"
    low, high = one["best low"], one["best high"]
    return f"; best at {one['best']:.2f} " + ("(not certain)" if math.isnan(low) else f"[{low:.2f}, {high:.2f}]")


def sequences(corpus: Corpus, length: int) -> Tensor:
    """Sequences of the test text `[B, T]`."""
    found = corpus.split("test").batches(1, length, 0, "concatenated")
    return torch.cat([found[i]["input_ids"] for i in range(min(TEXT_SEQUENCES, len(found)))])
