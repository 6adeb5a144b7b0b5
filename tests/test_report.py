"""The figures and the report page, from a made-up run folder."""

import csv
import dataclasses
import hashlib
import itertools
import json
import math
import re
import struct
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
from helpers import assert_raises

from halflife.models.load import checkpoints
from halflife.report.figures import comparison
from halflife.report.figures.comparison import comparison_figures
from halflife.report.figures.comparison import length as length_by_model
from halflife.report.figures.comparison_spectrum import spectrum
from halflife.report.figures.data import (
    SLOWEST,
    Axis,
    FigureData,
    HeatMap,
    Panel,
    Series,
    log_places,
    seed_series,
    whole_places,
)
from halflife.report.figures.language import length, loss
from halflife.report.figures.matplotlib_renderer import draw, draw_pages, save
from halflife.report.figures.spectrum import timescales
from halflife.report.page import render
from halflife.report.page.comparison import _table, about, findings, listed, not_learned
from halflife.report.page.plotly_renderer import plot
from halflife.report.page.spectrum import explorer_of_measurements
from halflife.report.redraw import redraw, run_figures, save_figures, write_report
from halflife.report.style import model_styles, run_styles
from halflife.report.table import show
from halflife.report.tables.comparison import comparison_tables, recall_sketch
from halflife.report.tables.csv_files import length_table, write_lengths
from halflife.runs import folder as results
from halflife.runs import records

MODELS = ("mamba2", "mamba2+post", "llama")
LENGTH = 64
VOID = {"meta", "link", "br", "img", "hr", "input", "wbr"}


def make_run(folder: Path, models=MODELS, seeds=(0, 1), layers=2, finished=True) -> Path:
    """Write a run folder in which model i has accuracy 0.9 − 0.2 i + 0.01 seed in distribution, falling with length."""
    folder.mkdir(parents=True)
    settings = {"hidden_size": 64, "train_length": LENGTH, "optimizer": {"steps": 400, "betas": [0.9, 0.95]}}
    config = {
        "models": list(models),
        "task": "mqar",
        "scale": "smoke",
        "seeds": list(seeds),
        "learning_rates": {m: [0.01] for m in models},
    }
    write_json(
        folder / "config.json", {"command": f"halflife compare {' '.join(models)}", **config, "settings": settings}
    )
    write_json(folder / "versions.json", {"halflife": "0.1.0", "device": "cpu, 2 threads"})
    for i, model in enumerate(models):
        for seed in seeds:
            make_training(folder / model / f"lr0.01-seed{seed}", i, seed, 0 if model == "llama" else layers, finished)
    if finished:
        rows = [row for i, model in enumerate(models) for seed in seeds for row in score_rows(i, model, seed)]
        with (folder / "results.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return folder


def make_training(folder: Path, i: int, seed: int, layers: int, finished: bool) -> None:
    folder.mkdir(parents=True)
    lines = []
    for step in range(20, 401, 20):
        loss = 4.8 / (1 + math.exp((step - 150 - 40 * i - 20 * seed) / 30)) + 0.1
        lines.append({"step": step, "loss": loss, "learning_rate": 0.01, "grad_norm": 1.0})
        if step % 100 == 0:
            lines.append({"step": step, "validation_accuracy": 1 - loss / 5})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if finished:
        spectrum = [{"layer": n, "init": scales(i, n), "trained": scales(i, n, 1.6)} for n in range(layers)]
        write_json(folder / "spectrum.json", {"channels": "heads", "layers": spectrum})


def scales(i: int, layer: int, factor: float = 1.0, heads: int = 8) -> dict:
    """Return geometric time-scales. Those of model 1 grow with the position."""
    base = [factor * LENGTH ** (1 - head / (heads - 1)) * (1 + layer) for head in range(heads)]
    moved = {t: [x * t ** (1 - h / (heads - 1)) if i == 1 else x for h, x in enumerate(base)] for t in (1, 64, 512)}
    return {"timescales": {str(t): values for t, values in moved.items()}}


def score_rows(i: int, model: str, seed: int) -> list[dict]:
    common = {"model": model, "learning_rate": 0.01, "seed": seed, "selected": True, "parameters": 123456 + i}
    common |= {"state_size": 8192 * (i + 1), "tokens_per_second": 10000.4 + i}
    rows = []
    for test in ("in_distribution", "capacity", "persist"):
        for times in (1,) if test == "in_distribution" else (1, 2, 4, 8):
            pairs = 16 * times if test == "capacity" else 16
            accuracy = (0.9 - 0.2 * i + 0.01 * seed) * times ** (-0.5 if test == "capacity" else -0.2)
            rows.append({**common, "test": test, "length": LENGTH * times, "num_pairs": pairs, "accuracy": accuracy,
                         "chance": 2 / 256, "shortcut_accuracy": 1 / pairs})  # fmt: skip
    return rows


def write_json(path: Path, data: object) -> None:
    path.write_text(json.dumps(data))


class Page(HTMLParser):
    """A parser that checks the nesting of tags, and collects the visible text, the data of figures, ids and links."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text, self.data, self.ids, self.links, self.tags, self.open = "", "", [], [], [], []
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id"]
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href", "srcset", "action")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data) -> None:
        if self.open[-1:] != ["script"]:
            self.text += data
        elif dict(self.tags[-1][1]).get("type") == "application/json":
            self.data += data


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "one")


@pytest.fixture(scope="module")
def html(run_dir) -> str:
    return write_report(run_dir).read_text()


def draw_files(folder: Path) -> list[Path]:
    run = results.read(folder)
    return save_figures(run, run_figures(run))


def test_every_figure_is_drawn_twice_and_the_page_once(run_dir):
    *files, page = redraw(run_dir)
    names = ("accuracy", "spectrum", "training")
    assert {path.name for path in files} == {f"{name}.{kind}" for name in names for kind in ("png", "svg")}
    assert all(path.parent == run_dir / "figures" and path.stat().st_size > 2000 for path in files)
    assert page == run_dir / "report.html"
    assert_raises(ValueError, "bmp", redraw, run_dir, ["bmp"])


@pytest.mark.slow
def test_figures_are_the_same_each_time(run_dir):
    before = {path: path.read_bytes() for path in draw_files(run_dir)}
    assert all(path.read_bytes() == before[path] for path in draw_files(run_dir))


def assert_same_figure(data):
    """The file and the page show the same titles, labels and points in the same colours."""
    for axes, panel, shown in zip(draw(data).axes, data.panels, plot(data).panels, strict=True):
        assert axes.get_title("left") == panel.title == shown["title"]
        assert axes.get_xlabel() == panel.x.label == shown["layout"]["xaxis"]["title"]["text"]
        assert axes.get_ylabel() == panel.y.label == shown["layout"]["yaxis"]["title"]["text"]
        lines = axes.lines[len(panel.references) :]
        assert len(shown["layout"]["shapes"]) == len(panel.references)
        for line, trace in zip(lines, shown["data"], strict=True):
            assert list(line.get_xdata()) == trace["x"]
            assert list(line.get_ydata()) == pytest.approx(trace["y"], rel=1e-5)
            assert line.get_color() == trace["line"]["color"]


def test_files_and_page_show_the_same(run_dir):
    for data in comparison_figures(results.read(run_dir)):
        assert_same_figure(data)


def test_language_figures_compare_runs_and_baselines(run_dir):
    lengths = [{"length": n, "perplexity": n**0.5, "last_perplexity": n**0.4} for n in (64, 128)]
    result = {"lengths": lengths, "positions": [{"last": 2**k, "loss": 3 - k / 4} for k in range(8)]}
    assert_same_figure(length({"a": result, "b": result}))
    trainings = {one.model: one for one in results.read(run_dir).trainings}
    data = loss(trainings, {"5-gram": 2.5})
    assert_same_figure(data)
    assert list(data.legend) == list(MODELS)
    assert [reference.y for reference in data.panels[0].references] == [2.5]


def test_page_is_whole_and_alone(run_dir, html):
    page = Page(html)
    assert len(page.ids) == len(set(page.ids))
    assert all(link.startswith(("#", "data:")) for link in page.links)
    assert "https:" not in html[: html.index("<script")]
    policy = next(attrs["content"] for tag, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-eval" not in policy
    assert not [attrs for tag, attrs in page.tags if tag == "script" and attrs.get("src")]
    assert {name for link in page.links if (name := link[1:]) and link[0] == "#"} <= set(page.ids)
    assert not list(run_dir.glob(".*tmp"))


def test_page_says_everything(run_dir, html):
    text = " ".join(Page(html).text.split())
    for shown in (*MODELS, "123,456", "8,192", "10,000", "90.5 %", "91.0 %", "0.01", "512 (8T)", "mean of 2"):
        assert shown in text, shown
    for shown in (
        "optimizer.steps",
        "[0.9, 0.95]",
        "cpu, 2 threads",
        "chance 0.78 %",
        "best answer that ignores the key 6.25 % to 0.78 %",
    ):
        assert shown in text, shown
    assert "halflife compare mamba2 mamba2+post llama" in text
    assert f"halflife compare --resume {run_dir}" in text
    found = "In the test persist at length 512 (8T), mamba2 is best with 59.7 % (2 seeds, 59.4 % to 60.0 %)"
    assert f"{found}, followed by mamba2+post" in text


def test_page_is_accessible(html):
    tags = Page(html).tags
    plots = [attrs for _, attrs in tags if "plot" in (attrs.get("class") or "").split()]
    assert all(attrs["role"] == "img" and attrs["aria-label"] for attrs in plots)
    assert len(plots) == 2 + 2 + 2  # accuracy has capacity and persist, training has two, the explorer has two
    assert all(attrs.get("aria-hidden") for tag, attrs in tags if tag == "svg")  # swatches beside names
    assert all(attrs.get("scope") for tag, attrs in tags if tag == "th")
    assert ("html", {"lang": "en"}) in tags


def test_figures_have_the_numbers(html):
    """The page has accuracy (0.9 − 0.2 i + 0.01 seed) / √times, as `score_rows` makes it. A diverged seed has none."""
    data = json.loads(Page(html).data)
    capacity, persist = data["plots"]["accuracy"]
    assert (capacity["title"], persist["title"]) == ("capacity: 16 to 128 pairs", "persist: 16 pairs at every length")
    lines = {trace["name"]: trace for trace in capacity["data"]}
    assert lines["mamba2+post, seed 1"]["x"] == [64, 128, 256, 512]
    assert lines["mamba2+post, seed 1"]["y"] == pytest.approx([0.71 * t**-0.5 for t in (1, 2, 4, 8)], rel=1e-5)
    assert lines["mamba2+post"]["y"] == pytest.approx([0.705 * t**-0.5 for t in (1, 2, 4, 8)], rel=1e-5)
    assert lines["shortcut"]["y"] == pytest.approx([1 / (16 * t) for t in (1, 2, 4, 8)], rel=1e-5)
    styles = {(trace["line"]["dash"], trace["marker"]["symbol"]) for trace in (lines[model] for model in MODELS)}
    assert len(styles) == 3  # visible without colour
    loss, accuracy = data["plots"]["training"]
    assert loss["data"][0]["x"] == list(range(20, 401, 20))
    assert {trace["name"] for trace in accuracy["data"]} >= {"llama", "llama, seed 0"}


def test_spectra_of_runs_without_weights_are_those_saved(html):
    spectra = json.loads(Page(html).data)["spectra"]
    assert [one["label"] for one in spectra["models"]] == [f"{m}, seed {s}" for m in MODELS[:2] for s in (0, 1)]
    one = spectra["models"][2]
    assert one["positions"] == [1, 64, 512]
    assert one["note"].startswith("The weights are missing")
    for t, row in zip(one["positions"], one["layers"][0]["initial"], strict=True):
        assert row == pytest.approx(scales(1, 0)["timescales"][str(t)], rel=5e-4)  # 4 digits are written
    assert "No spectrum: llama." in " ".join(Page(html).text.split())


def test_best_mean_is_emphasised(html):
    marked = re.findall(r"<strong>(.*?)</strong>", html)
    assert sorted(marked) == sorted(["90.5 %", "64.0 %", "45.2 %", "32.0 %", "78.8 %", "68.6 %", "59.7 %"])


def test_the_table_begins_with_accuracies_and_says_nothing_twice(tmp_path, run_dir, html):
    table = _table(results.read(run_dir))
    tested = ["64 (T)", *["128 (2T)", "256 (4T)", "512 (8T)"] * 2]
    assert table.headings == ["model", *tested, "parameters", "state size", "tokens/s", "learning rate"]
    assert [(text, len(columns)) for text, columns in table.parts()] == [
        ("in distribution", 1), ("capacity, by length in tokens", 3), ("persist, by length in tokens", 3), ("", 4)
    ]  # fmt: skip
    assert "also capacity at 64 tokens and persist at 64 tokens" in table.note
    one = _table(results.read(make_run(tmp_path / "one", seeds=(1,))))
    assert [[(row[0].text, row[0].note) for row in rows] for rows in one.groups()] == [
        [(model, "seed 1")] for model in MODELS
    ]
    assert not _table(results.read(make_run(tmp_path / "none", finished=False))).note.count("also")


def test_the_explorer_opens_on_a_model_whose_spectrum_moves(html):
    """That is mamba2+post, model 1 of the run; the first entries are the two seeds of mamba2."""
    options = [attrs for tag, attrs in Page(html).tags if tag == "option"]
    assert ["selected" in attrs for attrs in options] == [False, False, True, False]


def test_the_printed_table_leaves_out_what_the_one_in_distribution_repeats(run_dir, capsys):
    show(*comparison_tables([vars(score) for score in results.read(run_dir).scores]))
    out = capsys.readouterr().out
    assert "in: in distribution, also cap 64, also per 64." in out
    assert re.search(r" cap +cap +cap +per +per +per *\n", out)
    assert re.search(r" 128 +256 +512 +128 +256 +512 *\n", out)


def test_recall_by_lag_as_characters_and_a_sentence():
    """Means over seeds of selected runs; the model that recalls most at the longest lag stands first."""
    recalled = {("a", 0): (1.0, 0.25), ("a", 1): (1.0, 0.25), ("b", 0): (0.5, 0.875), ("b", 1): (0.0, 0.625)}
    rows = [
        {"model": model, "seed": seed, "selected": True, "test": "lag", "lag": lag, "num_pairs": 8, "accuracy": own,
         "shortcut_accuracy": 0.125}
        for (model, seed), values in recalled.items() for lag, own in zip((15.4, 47), values, strict=True)
    ]  # fmt: skip
    rows += [{**rows[0], "selected": False, "accuracy": 0.9}, {**rows[0], "test": "capacity"}]
    assert recall_sketch(rows).splitlines() == [
        "recalled after  15        47       tokens",
        "b               ██        ██████",
        "a               ████████  ██",
        "",
        "47 tokens after a value, b still recalls 75 % of 8 pairs, a 25 %. A guess among the values is right in 12 %.",
    ]
    assert recall_sketch([row for row in rows if row["test"] != "lag"]) == ""
    lost = [*rows, {**next(row for row in rows if row["model"] == "b"), "seed": 7, "accuracy": math.nan}]
    assert recall_sketch(lost).splitlines()[1].startswith("a ")  # a mean without a diverged seed is too good
    assert "a still recalls 25 % of 8 pairs, b 75 % (without 1 diverged). A guess" in recall_sketch(lost)


def test_the_printed_table_has_models_with_tests_of_their_own(tmp_path, capsys):
    """As in `koopman-powers`, where the length follows from the model's cell of the map."""
    rows = [vars(score) for score in results.read(make_run(tmp_path / "x", seeds=(1, 2, 3))).scores]
    other = [row | {"model": "other", "length": 3 * row["length"]} for row in rows if row["model"] == rows[0]["model"]]
    show(*comparison_tables([row for row in rows + other if row["test"] == "in_distribution"]))
    out = capsys.readouterr().out
    assert re.search(r" in +in *\n", out)
    assert re.search(r" 64 +192 *\n", out)
    assert re.search(r"^ other +mean +– +[\d.]+ *\n +low +– +[\d.]+", out, re.MULTILINE)


def test_a_grid_has_a_column_a_test_with_means_over_its_cells(run_dir, capsys):
    rows = [vars(score) for score in results.read(run_dir).scores]
    grid = [row | {"length": n * row["length"]} for n in (1, 16, 256, 4096) for row in rows if row["test"] == "persist"]
    show(*comparison_tables([row for row in rows if row["test"] == "in_distribution"] + grid))
    out = capsys.readouterr().out
    assert "Other tests: means over the lengths and the numbers of pairs." in out
    mean = 100 * 0.905 * sum(times**-0.2 for times in (1, 2, 4, 8)) / 4
    assert re.search(rf"^ mamba2 +mean +90.5 +{mean:.1f} *$", out, re.MULTILINE)


def test_t_is_the_length_in_distribution(run_dir):
    """As in `koopman-powers`, whose setting is the T of another cell. Models with T of their own have no common one."""
    run = results.read(run_dir)
    assert (run.train_length, run.times(4 * LENGTH)) == (LENGTH, "4T")
    twice = [dataclasses.replace(score, length=2 * score.length) for score in run.scores]
    other = dataclasses.replace(run, scores=twice)
    assert (other.train_length, other.times(4 * LENGTH)) == (2 * LENGTH, "2T")
    mixed = dataclasses.replace(run, scores=run.scores + twice)
    assert (mixed.train_length, mixed.times(4 * LENGTH)) == (LENGTH, "")


def test_the_printed_table_has_intervals_from_three_seeds_on(tmp_path, capsys):
    for seeds in ((1, 2, 3), (1, 2)):
        rows = [vars(score) for score in results.read(make_run(tmp_path / str(len(seeds)), seeds=seeds)).scores]
        show(*comparison_tables(rows))
        out = capsys.readouterr().out
        ends = [re.search(rf"^ +{end} +([\d.]+)", out, re.MULTILINE) for end in ("low", "high")]
        assert all(ends) == ("95 % interval" in out) == (len(seeds) == 3)
        if len(seeds) == 3:
            model = rows[0]["model"]
            own = [r for r in rows if r["model"] == model and r["test"] == "in_distribution" and r["selected"]]
            spread = [f"{100 * r['accuracy']:.1f}" for r in sorted(own, key=lambda r: r["accuracy"])]
            assert [end[1] for end in ends if end] == [spread[0], spread[-1]]  # three seeds: the smallest, the largest


def test_the_figures_of_a_report_are_made_once(run_dir, monkeypatch):
    """Files and page are drawn from the same data."""
    made = []
    for name in ("accuracy", "training"):
        make = getattr(comparison, name)
        monkeypatch.setattr(comparison, name, lambda run, make=make: made.append(make(run)) or made[-1])
    write_report(run_dir)
    assert [data.name for data in made] == ["accuracy", "training"]


def test_special_characters_are_escaped(tmp_path):
    models = ('a<b>&"c', "x$y$", "<!-- --><script>alert(1)<|script>")
    html = write_report(make_run(tmp_path / "run", models=models)).read_text()
    page = Page(html)
    assert sum(tag == "script" for tag, _ in page.tags) == 4  # data, plotly, and two scripts of halflife
    assert set(json.loads(page.data)["plots"]) == {"accuracy", "training"}
    assert all(model in page.text for model in models)


@pytest.mark.parametrize(
    "models", [("mamba2",), ("llama",), pytest.param(tuple(f"m{i}" for i in range(9)), marks=pytest.mark.slow)]
)
def test_one_seed_one_layer_and_any_number_of_models(tmp_path, models):
    page = Page(write_report(make_run(tmp_path / "run", models=models, seeds=(7,), layers=1)).read_text())
    assert all(model in page.text for model in models)


def test_figures_of_many_models_are_divided(tmp_path):
    """Into files `name`, `name-2`, …, with each panel once."""
    run = results.read(make_run(tmp_path / "many", models=[f"model{i}" for i in range(10)], seeds=(0,), layers=2))
    figures = draw_pages(spectrum(run))
    assert [len(figure.axes) for figure in figures] == [16, 4]
    heat = HeatMap("x", Axis("x"), Axis("y"), ["1"], ["1", "2"], [[0.5], [1.0]])
    pages = draw_pages(FigureData("heat", "", [heat] * 60, columns=2))
    assert [len(figure.axes) for figure in pages] == [26, 26, 8]
    assert all(figure.get_figheight() < 20 for figure in (*figures, *pages))


def test_a_long_line_of_missing_values_is_drawn(tmp_path):
    """The resets of gates that stay closed are 0 at every step, which a logarithmic axis cannot show."""
    line = Series("a", "a", model_styles(["a"])["a"], list(range(100)), [math.nan] * 100)
    panel = Panel("resets", Axis("step"), Axis("", log=True), [line])
    assert all(file.stat().st_size for file in save(FigureData("gates", "", [panel]), tmp_path))


def test_perplexity_by_length(tmp_path):
    """The file has every run, and the table and the figure the runs at the selected learning rate."""
    trainings = [
        results.Training(tmp_path / f"{rate}-{seed}", "a", rate, seed, [], {}, lengths=[
            {"length": n, "perplexity": 4.0, "last_perplexity": 4.0 + rate * seed} for n in (16, 32)
        ])
        for rate, seed in ((0.1, 0), (1.0, 0), (1.0, 1), (1.0, 2))
    ]  # fmt: skip
    scores = [records.Score("a", 1.0, seed, True, 1, 1, 1.0, "text", 16) for seed in range(3)]
    run = records.Comparison(tmp_path, {"models": ["a"], "seeds": [0, 1, 2]}, {}, scores, trainings)
    write_lengths(run)
    rows = list(csv.DictReader((tmp_path / "lengths.csv").read_text().splitlines()))
    assert [(row["learning_rate"], row["seed"], row["selected"], row["length"]) for row in rows[::2]] == [
        ("0.1", "0", "False", "16"), ("1.0", "0", "True", "16"), ("1.0", "1", "True", "16"), ("1.0", "2", "True", "16"),
    ]  # fmt: skip
    assert rows[-1]["last_perplexity"] == "6.0"
    assert "| a | 5.000 [4.000, 6.000] | 5.000 [4.000, 6.000] |" in length_table(run)
    whole, last = length_by_model(run).panels
    assert {series.y[0] for series in whole.series} == {4.0}
    assert [series.y[0] for series in last.series] == [4.0, 5.0, 6.0, 5.0]
    trainings[2].lengths.clear()  # it diverged
    assert "| a | 5.000 (2 of 3 seeds) | 5.000 (2 of 3 seeds) |" in length_table(run)


def test_the_script_of_the_plots_is_the_one_that_is_recorded():
    script = Path(render.HERE / render.SCRIPTS[0]).read_bytes()
    assert hashlib.sha256(script).hexdigest() in (render.HERE / "vendor" / "README.md").read_text()


@pytest.mark.slow
def test_fifty_models_of_five_seeds(tmp_path):
    folder = make_run(tmp_path / "large", models=[f"model{i:02d}" for i in range(50)], seeds=range(5), layers=6)
    data = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    began = time.process_time()
    page = write_report(folder)
    assert time.process_time() - began <= 60  # 28 s on two busy cores, where it was 167 s before
    script = Path(render.HERE / render.SCRIPTS[0]).stat().st_size
    assert page.stat().st_size <= data + script
    assert "<title>50 models on mqar" in page.read_text()
    pictures = sorted(folder.glob("figures/*.png"))
    assert [path.name for path in pictures if path.name.startswith("spectrum")] == [
        *(f"spectrum-{i}.png" for i in range(2, 8)), "spectrum.png"
    ]  # fmt: skip
    for path in pictures:
        _, height = struct.unpack(">II", path.read_bytes()[16:24])
        assert height <= 3000, path.name


@pytest.mark.parametrize("seeds", [(0, 1), ()], ids=["with metrics", "just begun"])
def test_unfinished_run_has_curves(tmp_path, seeds):
    folder = make_run(tmp_path / "run", seeds=seeds, finished=False)
    if seeds:
        metrics = folder / "mamba2" / "lr0.01-seed0" / "metrics.jsonl"
        metrics.write_text(metrics.read_text() + '{"step": 420, "lo')  # a line that is being written
        assert results.read(folder).trainings[0].curve("loss")[0][-1] == 400
    assert "has not finished" in Page(write_report(folder).read_text()).text
    assert not (folder / "timescales.csv").exists()


def test_diverged_seed_is_told(tmp_path):
    folder = make_run(tmp_path / "run", models=("mamba2", "gla"))
    rows = (folder / "results.csv").read_text().splitlines()
    at = rows[0].split(",").index("accuracy")
    for i, row in enumerate(rows):
        cells = row.split(",")
        if cells[0] == "gla" and cells[2] == "1":
            rows[i] = ",".join([*cells[:at], "" if i % 2 else "nan", *cells[at + 1 :]])
    (folder / "results.csv").write_text("\n".join(rows) + "\n")
    lost = {"timescales": {"1": [math.nan, None], "64": [math.nan, math.inf]}}
    for seed in (0, 1):
        write_json(
            folder / "gla" / f"lr0.01-seed{seed}" / "spectrum.json",
            {"layers": [{"layer": 0, "init": lost, "trained": lost}]},
        )
    with (folder / "gla" / "lr0.01-seed1" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 420, "loss": NaN}\n{"step": 440, "loss": null}\n')
    html = write_report(folder).read_text()
    text = " ".join(Page(html).text.split())  # with ordinary spaces
    assert "mean of 1 of 2" in text
    assert "mamba2 is best with 59.7 %" in text
    assert "gla with 46.2 % (1 of 2 seeds" in text


def test_a_run_that_diverged_has_a_report(tmp_path):
    """Its gates and its time-scales are no numbers, which the files have as null. No rate of it is selected."""
    folder = make_run(tmp_path / "run", models=("mamba2", "gla"), seeds=(0,))
    rows = list(csv.DictReader((folder / "results.csv").read_text().splitlines()))
    with (folder / "results.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows[: len(rows) // 2])
        writer.writerows({**row, "accuracy": "", "selected": False} for row in rows[len(rows) // 2 :])
    lost = folder / "gla" / "lr0.01-seed0"
    write_json(lost / "result.json", {"parameters": 1, "validation": None, "diverged": "the loss is nan at step 420"})
    gates = {name: {"reset_rate": 0.5, "segment_length": 2.0, "slow_share": None} for name in ("a", "b")}
    with (lost / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 420, "loss": None, "gates": gates}) + "\n")
    saved = json.loads((lost / "spectrum.json").read_text())
    saved["layers"][0]["trained"]["timescales"]["1"][0] = None
    write_json(lost / "spectrum.json", saved)
    text = " ".join(Page(write_report(folder).read_text()).text.split())
    assert "gla every run diverged" in text
    assert "What the slow gates do" in text
    one = next(one for one in results.read(folder).trainings if one.model == "gla")
    assert math.isnan(one.spectrum["layers"][0]["trained"]["timescales"]["1"][0])
    (panel,) = [panel for panel in comparison.gates({"gla": [one]}).panels if "energy" in panel.title]
    assert math.isnan(panel.series[0].y[0])


def test_the_explorer_knows_the_length_of_each_model():
    """Models that were trained at different lengths stand on one page of `halflife spectrum`."""

    def measured(name: str, positions: list[int]) -> dict:
        spectra = {str(t): {"timescales": [float(t)]} for t in positions}
        return {
            "model": name,
            "channels": "heads",
            "positions": positions,
            "layers": [{"layer": 0, "spectra": spectra}],
        }

    models = [measured("a", [1, 64, 256, 1024]), measured("b", [1, 512, 2048, 8192]), measured("c", [1])]
    page = explorer_of_measurements(models, None)
    assert [(one["length"], one["positions"][-1]) for one in page["models"]] == [(64, 1024), (512, 8192), (64, 1024)]


def test_infinite_timescales_are_drawn_at_the_limit():
    """Files have null for them, as for a slow state that no token of the text resets."""
    spectra = {"1": {"timescales": [2.0, 3.0]}, "text": {"timescales": [None, 3.0]}}
    model = {"model": "a", "channels": "heads", "positions": [1], "layers": [{"layer": 0, "spectra": spectra}]}
    _, text = timescales({"models": [model]}).panels[0].series
    assert list(text.y) == [SLOWEST, 3.0]


def test_titles_list_few_models():
    assert listed(["a", "b"]) == "a, b"
    assert listed([f"m{i}" for i in range(100)]) == "100 models"


def test_a_mean_says_how_many_seeds_have_values():
    curves = {seed: ([1, 2], [y, y]) for seed, y in enumerate((0.5, 0.7, math.nan))}
    *_, average = seed_series({"a": curves})
    assert (average.note, average.y) == (", mean of 2 of 3 seeds", [0.6, 0.6])


@pytest.mark.parametrize(
    "name", ["config.json", "versions.json", "mamba2/lr0.01-seed0/metrics.jsonl", "mamba2/lr0.01-seed1/spectrum.json"]
)
def test_missing_file_is_named(tmp_path, name):
    folder = make_run(tmp_path / "run")
    (folder / name).unlink()
    assert_raises(FileNotFoundError, re.escape(str(folder / name)), write_report, folder)
    assert not (folder / "report.html").exists()


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "versions.json",
        "results.csv",
        "mamba2/lr0.01-seed0/metrics.jsonl",
        "mamba2/lr0.01-seed1/spectrum.json",
    ],
)
@pytest.mark.parametrize("cut", [2, 8, 30])
def test_truncated_file_is_named(tmp_path, name, cut):
    folder = make_run(tmp_path / "run")
    path = folder / name
    path.write_bytes(path.read_bytes()[:-cut])
    assert_raises(ValueError, re.escape(str(path)) + ".*truncated", results.read, folder)


def test_the_finding_counts_seeds_and_no_cells(tmp_path):
    """A test with several numbers of pairs has a cell for each. The finding uses means over them for each seed."""
    folder = make_run(tmp_path / "run", models=("mamba2",))
    rows = (folder / "results.csv").read_text().splitlines()
    at = rows[0].split(",").index("num_pairs")
    more = [",".join([*cells[:at], "4", *cells[at + 1 :]]) for cells in (row.split(",") for row in rows[1:])]
    (folder / "results.csv").write_text("\n".join([*rows, *more]) + "\n")
    page = Page(write_report(folder).read_text())
    assert "mamba2 is best with 59.7 % (2 seeds, 59.4 % to 60.0 %)" in " ".join(page.text.split())
    capacity, persist = json.loads(page.data)["plots"]["recall"]
    [heat] = capacity["data"]
    assert (heat["x"], heat["y"]) == (["64", "128", "256", "512"], ["4", "16", "32", "64", "128"])
    assert heat["z"][0] == pytest.approx([0.905 * t**-0.5 for t in (1, 2, 4, 8)], rel=1e-5)
    assert heat["z"][2] == [None, pytest.approx(0.905 * 2**-0.5, rel=1e-5), None, None]
    assert persist["data"][0]["y"] == ["4", "16"]


def test_a_test_of_lags_has_them_on_its_axis_in_its_table_and_in_its_finding(tmp_path, capsys):
    folder = make_run(tmp_path / "run")
    [head, *rows] = (folder / "results.csv").read_text().splitlines()
    at, lags = head.split(",").index("length"), {64: 31, 128: 95, 256: 223, 512: 479}
    lagged = [f"{row.replace('persist', 'lag')},{lags[int(row.split(',')[at])]}" for row in rows]
    (folder / "results.csv").write_text("\n".join([f"{head},lag", *lagged]) + "\n")
    run = results.read(folder)
    _, panel = comparison.accuracy(run).panels
    assert {tuple(series.x) for series in panel.series} == {(31, 95, 223, 479)}
    assert (panel.x.label, list(panel.x.ticks)) == ("lag: tokens from a value to its question", [31, 95, 223, 479])
    assert [reference.x for reference in panel.references] == [31]
    assert _table(run).headings[5:8] == ["95", "223", "479"]
    assert findings(run)[1].startswith("In the test lag at a median lag of 479 tokens, mamba2 is best")
    show(*comparison_tables([vars(score) for score in run.scores]))
    assert re.search(r" 128 +256 +512 +95 +223 +479 *\n", capsys.readouterr().out)
    early = comparison.accuracy(results.read(make_run(tmp_path / "persist"))).caption
    assert 'In the test "persist" it is constant, and most questions come early. ' in early


@pytest.mark.parametrize(
    ("values", "places"),
    [((8.7, 9.3), "8.8 9 9.2"), ((1.05, 1.4), "1.1 1.2 1.3 1.4"), ((99.2, 100.7), "99.5 100 100.5"), ((3, 3), "3"),
     ((0.0123, 0.0124), "0.0123 0.01235 0.0124"), ((5, 60), "5 10 20 50"),
     ((1e-8, 1e2), "10⁻⁸ 10⁻⁶ 0.0001 0.01 1 100")],
)  # fmt: skip
def test_narrow_logarithmic_axes_have_numbers_in_both_renderers(values, places):
    panel = Panel(
        "", Axis("x", whole=True), Axis("y", log=True), [Series("a", "", model_styles("a")["a"], (0, 1), values)]
    )
    assert list(panel.ticks("y").values()) == places.split()
    figure, layout = draw(FigureData("", "", [panel])), plot(FigureData("", "", [panel])).panels[0]["layout"]
    for name in "xy":
        axis = getattr(figure.axes[0], f"{name}axis")
        drawn = [label.get_text() for label in axis.get_ticklabels()]
        assert drawn == list(panel.ticks(name).values()) or not panel.ticks(name)
        assert layout[f"{name}axis"].get("ticktext", []) == list(panel.ticks(name).values())
    assert layout["xaxis"]["tickvals"] == [0, 1]  # of two layers, and no half ones


@pytest.mark.parametrize(
    ("ends", "places"), [((0, 3), [0, 1, 2, 3]), ((20, 1400), [500, 1000]), ((0.4, 16.6), [5, 10, 15])]
)
def test_ticks_at_whole_numbers(ends, places):
    assert whole_places(*ends) == places


def test_every_logarithmic_range_has_ticks():
    for low, factor in itertools.product((1e-3, 0.97, 7.3, 4096), (1.001, 1.01, 1.1, 1.5, 2, 4, 9, 30, 200, 1e5)):
        assert 3 <= len(log_places(low, low * factor)) <= 8, (low, factor)


def test_a_model_has_one_colour_in_all_pictures_of_a_folder(tmp_path):
    """Colours follow the models of a comparison, also where models are left out, and are shared by its seeds."""
    order = ("rwkv7", "llama", "mamba2", "gla")
    folder = make_run(tmp_path / "run", models=order)
    for name in ("gla", "mamba2", "rwkv7"):
        for seed in (0, 1):
            path = folder / name / f"lr0.01-seed{seed}"
            write_json(path / "config.json", {"format": 1, "model": {"name": name}})
            (path / "model.safetensors").touch()
    labels = list(checkpoints([folder]))
    assert labels == [f"{name} lr0.01-seed{seed}" for name in ("rwkv7", "mamba2", "gla") for seed in (0, 1)]
    report = {model: style.color for model, style in model_styles(order).items()}
    runs = run_styles({label: label.partition(" ")[0] for label in labels}, order)
    assert all(style.color == report[label.partition(" ")[0]] for label, style in runs.items())
    assert len(set(runs.values())) == 6  # seeds differ in marker and line
    assert runs["gla lr0.01-seed0"] == model_styles(order)["gla"]


def test_panels_of_a_training_have_one_range_of_steps(tmp_path):
    """Loss is recorded to step 400 and validation to step 300 in this run; both axes end at the last step of all."""
    run = results.read(make_run(tmp_path / "run", models=("mamba2",), seeds=(0,)))
    for one in run.trainings:
        one.metrics[:] = [line for line in one.metrics if line["step"] < 400 or "loss" in line]
    figure = comparison.training(run)
    assert [max(series.x) for panel in figure.panels for series in panel.series] == [400, 300]
    ends = {tuple(panel["layout"]["xaxis"]["range"]) for panel in plot(figure).panels}
    assert ends == {axes.get_xlim() for axes in draw(figure).axes} == {(0, 408)}


def guessing(folder, without_pairs=False):
    """Give the last model of a run the accuracy of a guess in distribution; without pairs, as in words of a group."""
    [head, *rows] = (folder / "results.csv").read_text().splitlines()
    at = {name: head.split(",").index(name) for name in ("model", "test", "accuracy", "num_pairs", "shortcut_accuracy")}
    changed = []
    for row in (row.split(",") for row in rows):
        if (row[at["model"]], row[at["test"]]) == (MODELS[-1], "in_distribution"):
            row[at["accuracy"]] = str(float(row[at["shortcut_accuracy"]]) + 0.003)
        row[at["num_pairs"]] = "" if without_pairs else row[at["num_pairs"]]
        changed.append(",".join(row))
    (folder / "results.csv").write_text("\n".join([head, *changed]) + "\n")
    return results.read(folder)


def test_models_at_the_level_of_a_guess_are_named(tmp_path, capsys):
    run = guessing(make_run(tmp_path / "run"))
    assert [model for model in run.models if run.not_learned(model)] == [MODELS[-1]]
    assert not_learned(run)[0].startswith(f"Not learned: {MODELS[-1]}. ")
    notes = {row[0].text: row[0].note for row in _table(run).cells() if row[0].note}
    assert [model for model, note in notes.items() if "not learned" in note] == [MODELS[-1]]
    show(*comparison_tables([vars(score) for score in run.scores]))
    assert f"not learned, in distribution at the level of a guess: {MODELS[-1]}." in capsys.readouterr().out
    lost = [vars(score) | ({} if score.seed else {"accuracy": math.nan}) for score in run.scores]  # seed 0 diverged
    assert f"of a guess: {MODELS[-1]}." in comparison_tables(lost)[1].note
    whole = results.read(make_run(tmp_path / "other"))
    assert not not_learned(whole)
    assert "not learned" not in _table(whole).note + " ".join(row[0].note for row in _table(whole).cells())


def test_a_task_without_pairs_is_described_without_keys(tmp_path, capsys):
    run = guessing(make_run(tmp_path / "run"), without_pairs=True)
    figure = comparison.accuracy(run)
    said = " ".join([*findings(run), _table(run).note, *(series.group for p in figure.panels for series in p.series)])
    assert "best guess" in said
    assert "key" not in said
    show(*comparison_tables([vars(score) for score in run.scores]))
    assert "key" not in capsys.readouterr().out


def test_the_page_says_what_the_task_is_and_why_the_loss_jumps(tmp_path):
    folder = make_run(tmp_path / "run", models=("mamba2",), seeds=(0,))
    stages = [[{"name": "mqar", "num_pairs": k}] for k in (2, 4, 8, 8)]
    write_json(folder / "mamba2" / "lr0.01-seed0" / "run.json", {"steps": 400, "stages": stages})
    task, jumps = about(results.read(folder))
    assert task.startswith("The task mqar. Multi-query associative recall")
    assert jumps == "Training goes from easier to harder tasks, so the loss jumps after step 100 and step 200."
    assert task[:40] in Page(write_report(folder).read_text()).text


def test_only_the_selected_learning_rate_counts(tmp_path):
    folder = make_run(tmp_path / "run", models=("mamba2",))
    make_training(folder / "mamba2" / "lr0.1-seed0", 0, 0, 1, True)
    path = folder / "results.csv"
    other = [row.replace(",0.01,", ",0.1,").replace("True", "False") for row in path.read_text().splitlines()[1:]]
    path.write_text(path.read_text() + "\n".join(other) + "\n")
    run = results.read(folder)
    assert {one.learning_rate for one in run.trainings} == {0.01, 0.1}
    assert {one.learning_rate for one in run.trainings_of("mamba2")} == {0.01}
    assert len(run.select("mamba2", test="capacity", length=LENGTH)) == 2


def test_looks_differ():
    assert len(set(model_styles([str(i) for i in range(56)]).values())) == 56


@pytest.mark.slow
def test_drawing_leaves_matplotlib_alone(run_dir):
    import matplotlib

    before = dict(matplotlib.rcParams)
    draw_files(run_dir)
    assert dict(matplotlib.rcParams) == before


def test_timescales_are_a_table(run_dir, html):
    """Each run, layer and channel at the first position, T and the longest test."""
    rows = list(csv.DictReader((run_dir / "timescales.csv").read_text().splitlines()))
    keys = [(r["model"], r["seed"], r["layer"], r["position"], r["channel"]) for r in rows]
    models, positions = ("mamba2", "mamba2+post"), ("1", str(LENGTH), "512")  # a llama has no decay
    assert keys == list(itertools.product(models, "01", "01", positions, "01234567"))
    assert {row["selected"] for row in rows} == {"True"}
    chosen = rows[keys.index(("mamba2+post", "1", "1", "512", "3"))]
    expected = scales(1, 1)["timescales"]["512"][3]
    assert float(chosen["initial"]) == pytest.approx(expected, rel=1e-5)
    assert float(chosen["trained"]) == pytest.approx(1.6 * expected, rel=1e-5)


def test_validations_are_a_table(run_dir, html):
    """Each step of each run at which the model was validated."""
    rows = list(csv.DictReader((run_dir / "validation.csv").read_text().splitlines()))
    for run in results.read(run_dir).trainings:
        own = [row for row in rows if (row["model"], row["seed"]) == (run.model, str(run.seed))]
        steps, values = run.curve("validation_accuracy")
        assert [int(row["step"]) for row in own] == steps
        assert [float(row["validation"]) for row in own] == pytest.approx(values, rel=1e-5)
        assert steps


def test_timescales_of_many_channels_are_a_choice(tmp_path):
    path = tmp_path / "run" / "mamba2" / "lr0.01-seed0" / "spectrum.json"
    folder = make_run(tmp_path / "run", models=("mamba2",), seeds=(0,), layers=1)
    one = {"timescales": {"1": [float(n) for n in range(1, 301)]}}
    write_json(path, {"channels": "channels", "layers": [{"layer": 0, "init": one, "trained": one}]})
    write_report(folder)
    rows = list(csv.DictReader((folder / "timescales.csv").read_text().splitlines()))
    assert len(rows) == 64
    assert [float(rows[n]["trained"]) for n in (0, -1)] == [1, 300]
    assert all(float(row["trained"]) == int(row["channel"]) + 1 for row in rows)
