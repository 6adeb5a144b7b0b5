"""The regression of the losses of the Decay paper's grid on the distributions of λ."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
from tiny_runs import tiny

from halflife.lab.experiments.evidence.decay_regression import (
    FEWEST_ROWS,
    _row,
    measure,
    regress,
    regressions,
    report,
)
from halflife.models import LanguageModel, checkpoint
from halflife.report.figures.decays import loss_by_decay
from halflife.report.figures.matplotlib_renderer import arrange, draw, save_as
from halflife.report.style import PLACES
from halflife.runs.folder import DECAY_REGRESSION_JSON
from halflife.runs.sweep import Cell

ROW = {
    "coefficients": [2.6, -1.6, 1.0], "low": [2, -2, 0], "high": [3, -1, 2], "rows": 12, "error": 0.1,
    "error of the mean": 0.2, "explained": 0.75,
}  # fmt: skip
MINIMUM = {"best": 0.8, "best low": 0.7, "best high": 0.9}


def test_a_parabola_has_its_minimum():
    """Losses 2 + (m − 0.8)² are predicted without an error, and a straight line does worse."""
    medians = np.linspace(0.3, 1.0, 12)
    losses = 2 + (medians - 0.8) ** 2
    squares = np.column_stack([medians, medians**2]).tolist()
    exact = regress(squares, losses.tolist())
    np.testing.assert_allclose(exact["coefficients"], [2.64, -1.6, 1.0], atol=1e-9)
    assert exact["best"] == pytest.approx(0.8)
    assert exact["error"] < 1e-9
    assert exact["explained"] == pytest.approx(1)
    line = regress(medians[:, None].tolist(), losses.tolist())
    assert line["error"] > 0.01
    assert "best" not in line
    assert math.isnan(regress(squares, (-losses).tolist())["best"])


def test_a_parabola_says_where_its_minimum_is_or_that_it_has_none():
    for minimum, words in (
        (MINIMUM, "; best at 0.80 [0.70, 0.90]"), (MINIMUM | {"best low": math.nan}, "; best at 0.80 (not certain)"),
        (dict.fromkeys(MINIMUM, math.nan), "; no minimum"),
    ):  # fmt: skip
        assert list(_row("square", ROW | minimum))[2].endswith(words)


def test_errors_are_those_of_rows_that_are_left_out():
    draw = np.random.default_rng(1)
    x, y = draw.normal(size=(9, 2)), draw.normal(size=9)
    found, squares, plain = regress(x.tolist(), y.tolist()), [], []
    for i in range(9):
        rest = np.arange(9) != i
        design = np.column_stack([np.ones(8), x[rest]])
        fitted = np.linalg.lstsq(design, y[rest], rcond=None)[0]
        squares.append((y[i] - fitted @ [1, *x[i]]) ** 2)
        plain.append((y[i] - y[rest].mean()) ** 2)
    assert found["error"] == pytest.approx(np.mean(squares) ** 0.5)
    assert found["error of the mean"] == pytest.approx(np.mean(plain) ** 0.5)
    assert found["explained"] == pytest.approx(1 - np.mean(squares) / np.mean(plain))
    assert found["explained"] < 0.5  # noise does not predict
    assert all(low < high for low, high in zip(found["low"], found["high"], strict=True))


def runs_of(rows):
    return [
        {"model": str(i), "seed": seed, "loss": 2.0 + i + 0.1 * seed, "init": {"median": 0.5, "spread": 0.1},
         "trained": {"median": i + 0.3 * seed, "spread": 0.1 * i * i}}
        for i in range(rows) for seed in (-1, 1)
    ]  # fmt: skip


def test_decays_are_measured_once_before_and_after_training(tmp_path):
    """Of selected runs with a loss that have decays; training has doubled the rates of the second run."""
    names = ("retnet", "mamba2", "llama", "mamba2", "mamba2")
    rows = [
        {"model": name, "seed": seed, "learning_rate": 0.01, "loss": loss, "selected": seed < 3}
        for seed, (name, loss) in enumerate(zip(names, (1.0, 2.0, 3.0, 4.0, math.nan), strict=True))
    ]
    for row in rows[:2]:
        model = LanguageModel(tiny(row["model"]).model)
        if row["model"] == "mamba2":
            model.blocks[0].mixer.decay.A_log.data += math.log(2)
        checkpoint.save(model, tmp_path / Cell(row["model"], 0.01, row["seed"]).folder)
    ids = torch.randint(64, (2, 16))
    fixed, moved = measure(tmp_path, rows, lambda cell: tiny(cell.model, seed=cell.seed), ids)
    assert [(one["model"], one["loss"]) for one in (fixed, moved)] == [("retnet", 1.0), ("mamba2", 2.0)]
    decays = [1 - 2**-5, 1 - 2**-6]  # of RetNet's two heads
    assert fixed["init"]["median"] == pytest.approx(np.mean(decays), abs=0.01)
    assert fixed["trained"] == fixed["init"]
    assert moved["trained"]["median"] < moved["init"]["median"]
    saved = [fixed | {"loss": 1.0, "seed": 0, "trained": "as saved"}, moved]
    (tmp_path / DECAY_REGRESSION_JSON).write_text(json.dumps({"runs": saved}))
    assert measure(tmp_path, rows, lambda cell: tiny(cell.model, seed=cell.seed), ids) == saved


@pytest.mark.parametrize("count", [FEWEST_ROWS - 1, FEWEST_ROWS])
def test_a_report_needs_some_rows(count, tmp_path):
    runs = runs_of(count)
    rows = [{"model": one["model"], "selected": True} for one in runs]
    text = report(tmp_path, rows, lambda folder, rows: runs)
    assert (f"| median of λ after training | {FEWEST_ROWS} |" in text) == (count == FEWEST_ROWS)
    assert (tmp_path / DECAY_REGRESSION_JSON).exists() == bool(text)
    assert report(tmp_path, rows, lambda folder, rows: runs[2:]) == ""


def test_seeds_are_averaged():
    found = regressions(runs_of(9))
    assert found["trained"]["median"]["rows"] == 9
    np.testing.assert_allclose(found["trained"]["median"]["coefficients"], [2, 1], atol=1e-9)
    assert found["init"]["median"]["explained"] <= 1e-9  # equal medians predict nothing


def test_a_variant_is_a_dot():
    runs = [
        {"model": name, "loss": loss, "init": {"median": 0.5}, "trained": {"median": median}}
        for name, loss, median in (("vector/gla", 2.0, 0.8), ("vector/gla", 3.0, 0.6), ("llama/x", 1.0, 0.1))
    ]
    before, after = loss_by_decay(runs).panels
    dots = {one.name: (*one.x, *one.y) for one in before.series}
    assert dots == {"vector/gla": (0.5, 2.5), "llama/x": (0.5, 1.0)}
    assert [one.x[0] for one in after.series] == pytest.approx([0.7, 0.1])


def test_labels_do_not_cover_each_other(tmp_path):
    """Points close together, one of them far away: the labels of the crowd move, and none covers another."""
    places = [(0.5, 2.0), (0.5, 2.0), (0.505, 2.0), (0.51, 2.01), (0.515, 2.0), (0.52, 2.02), (0.8, 2.5), (1, 3)]
    runs = [
        {"model": f"vector/row-{i}", "loss": y, "init": {"median": x}, "trained": {"median": x}}
        for i, (x, y) in enumerate(places)
    ]
    figure = draw(loss_by_decay(runs))
    save_as(arrange(figure), tmp_path / "labels.png")
    for axes in figure.axes:
        labels = {text.get_text(): text for text in axes.texts if text.get_visible()}
        boxes = [text.get_window_extent() for text in labels.values()]
        assert len(places) > len(labels) >= 4  # labels of the crowd without a place are left out
        assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
        assert labels["row-6"].get_position() == PLACES[0][:2]
