"""`halflife spectrum`: trained models read a text; decay values in tables and figures; figures of allocation."""

import csv
import gzip
import json
import math

import numpy as np
import pytest
import torch
from helpers import assert_raises, tiny

from halflife.analysis.decays import half_life
from halflife.analysis.forecast.survey import measure_forecasts
from halflife.analysis.survey import find_models, measure_models
from halflife.cli import main
from halflife.data.tokenizers import pieces, read_ids
from halflife.models import checkpoint
from halflife.models.load import checkpoints
from halflife.report.figures import spectrum as allocation
from halflife.report.figures.decays import decays
from halflife.report.figures.matplotlib_renderer import draw
from halflife.report.tables.spectrum import write_tables

TEXT = b"Before we proceed any further, hear me speak. Speak, speak.\n" * 8


def halve(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def test_pieces_are_evenly_spread():
    ids = torch.arange(100)
    assert pieces(ids, 10, 3)[:, 0].tolist() == [0, 45, 90]
    assert pieces(ids, 30, 8)[:, 0].tolist() == [0, 35, 70]  # no more than fit side by side
    assert pieces(ids, 1000, 8).tolist() == [list(range(100))]
    for length, sequences in ((1, 1), (4, 0)):
        assert_raises(ValueError, "at least 1 sequence", pieces, ids, length, sequences)


def test_text_is_read_as_bytes_of_all_files(tmp_path):
    (tmp_path / "a.bin").write_bytes(bytes(range(256)))
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"abc"))
    ids = read_ids([tmp_path / "a.bin", tmp_path / "b.txt.gz"])
    assert ids.tolist() == [*range(256), 97, 98, 99]
    halve(tmp_path / "b.txt.gz")
    assert_raises(ValueError, r"b\.txt\.gz is truncated", read_ids, [tmp_path / "b.txt.gz"])


def test_labels_tell_models_apart(tmp_path):
    def put(name, *parts):
        return checkpoint.save(tiny(name, num_layers=1), tmp_path.joinpath(*parts))

    put("tnl", "run", "tnl", "lr0.01-seed0")
    put("simple", "run", "simple", "lr0.01-seed0")
    assert list(checkpoints([tmp_path / "run"])) == ["simple", "tnl"]
    put("tnl", "run", "tnl", "lr0.01-seed1")
    labels = ["simple lr0.01-seed0", "tnl lr0.01-seed0", "tnl lr0.01-seed1"]
    assert list(checkpoints([tmp_path / "run"])) == labels
    assert list(checkpoints([tmp_path / "run", tmp_path / "run" / "tnl"])) == labels
    other = put("tnl", "other", "tnl", "lr0.01-seed1")
    assert next(iter(checkpoints([other, tmp_path / "run"]))) == str(other)
    (tmp_path / "other" / "foreign").mkdir()
    for name in ("config.json", "model.safetensors"):  # of another library
        (tmp_path / "other" / "foreign" / name).write_text('{"model_type": "mamba"}')
    assert list(checkpoints([tmp_path / "other"])) == ["tnl"]


def test_models_that_diverged_are_left_out(tmp_path, refused):
    """Their weights are no numbers, which ended the analysis of the others too."""
    folders = [checkpoint.save(tiny(name, num_layers=1), tmp_path / name) for name in ("tnl", "simple")]
    (folders[0] / "result.json").write_text('{"parameters": 1, "validation": null, "diverged": "the loss is nan"}')
    with pytest.warns(UserWarning, match="the training of tnl diverged, so this is left out"):
        assert list(find_models([tmp_path])) == ["simple"]
    for command in ("look", "spectrum", "diagnose"):
        assert "the training of tnl diverged, so there is nothing to measure" in refused(command, str(folders[0]))


def test_a_tokenizer_in_the_folder_of_a_model_is_found(tmp_path):
    """A run with a tokenizer of its own saves it there; spectrum and forecast read the text with it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"[UNK]": 0, "speak": 1, "hear": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = checkpoint.save(tiny("tnl", vocab_size=3), tmp_path / "run")
    (folder / "run.json").write_text(json.dumps({"context": 8, "seed": 0}))
    (tmp_path / "text").write_text("hear hear speak louder " * 100)
    with pytest.raises(ValueError, match="--tokenizer"):
        measure_models([folder], [tmp_path / "text"])
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(folder)
    assert measure_models([folder], [tmp_path / "text"], length=16).length == 16
    found = measure_forecasts([folder], [tmp_path / "text"], longest=2, beginning=4, text_window=8, examples=4)
    assert [row.model for row in found.texts] == ["tnl"]
    with pytest.raises(ValueError, match=r"too short: .* give [\d,]+ tokens or more"):
        measure_forecasts([folder], [tmp_path / "text"], longest=32, beginning=4, text_window=8, examples=4)


@pytest.fixture
def run_dir(tmp_path):
    run = tmp_path / "run"
    for name, seeds in {"mamba2": 2, "mamba2+post": 1, "lightnet": 1, "llama": 1}.items():
        for seed in range(seeds):
            checkpoint.save(tiny(name), run / name / f"lr0.01-seed{seed}")
    (run / "config.json").write_text('{"models": ["mamba2"]}')
    (tmp_path / "text").write_bytes(TEXT)
    return run


def test_checkpoints_side_by_side(run_dir, tmp_path, capsys):
    folders = [str(run_dir / "mamba2" / "lr0.01-seed0"), str(run_dir / "lightnet")]
    output = tmp_path / "out"
    main(["spectrum", *folders, "--text", str(tmp_path / "text"), "--length", "64", "--output", str(output)])
    models = json.loads((output / "decays.json").read_text())["models"]
    assert [model["model"] for model in models] == ["mamba2", "lightnet"]
    rows = csv.DictReader((output / "decays.csv").read_text().splitlines())
    assert [float(row["median"]) for row in rows] == [x["median"] for model in models for x in model["layers"]]
    assert "written to" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda run: (run.parent / "text").unlink(), "no file"),
        (lambda run: (run.parent / "text").write_bytes(b""), "is empty"),
        (lambda run: (run.parent / "text").write_bytes(b"a"), "too short"),
        (lambda run: (run / "mamba2" / "lr0.01-seed1" / "config.json").write_text('{"format": 99}'), "format 99"),
        (lambda run: checkpoint.save(tiny("mamba2", vocab_size=512), run / "a"), "--tokenizer"),
        (lambda run: halve(run / "lightnet" / "lr0.01-seed0" / "model.safetensors"), "truncated"),
        (lambda run: (run / "lightnet" / "lr0.01-seed0" / "config.json").write_text("{"), "truncated"),
        (lambda run: [path.unlink() for path in run.glob("*/*/model.safetensors")], "no checkpoint"),
        (lambda run: [path.unlink() for path in run.glob("[!l]*/*/config.json")]
         + [path.unlink() for path in run.glob("lightnet/*/config.json")], "there is no decay"),
        (lambda run: run.rename(run.parent / "moved"), "no folder"),
    ],
)  # fmt: skip
def test_errors_are_one_line_and_exit_code_2(run_dir, tmp_path, refused, break_it, message):
    break_it(run_dir)
    assert message in refused("spectrum", str(run_dir), "--text", str(tmp_path / "text"))
    assert not (run_dir / "spectrum").exists()


def test_nothing_named(tmp_path, refused):
    (tmp_path / "text").write_bytes(TEXT)
    assert "name at least one checkpoint" in refused("spectrum", "--text", str(tmp_path / "text"))
    assert "hold no checkpoint" in refused("spectrum", str(tmp_path), "--text")


def made_up(models, layers, **values):
    """`ModelMeasurements.to_dict()` for made-up models, from one that forgets at once to one that never forgets."""

    spectrum = {"timescales": [1.0, math.inf], "modes": 2.0, "too_slow": 0.5, "too_fast": 0.0}

    def layer(i, share):
        median = share * (1 - 0.1 * i / layers)
        return {"layer": i, "mean": median, "q05": median**3, "q25": median**2, "median": median,
                "q75": median**0.5, "q95": median**0.1, "half_life": half_life(median), "slowest_half_life": math.inf,
                "erased": 0.0, "horizon": math.inf, "longest_lag": 32, "spectra": {"1": spectrum},
                **values}  # fmt: skip

    return {"text": ["t"], "tokenizer": None, "length": 64, "sequences": 1, "models": [
        {"model": f"model ${n}", "checkpoint": "c", "channels": "heads", "train_length": None, "positions": [1],
         "layers": [layer(i, n / max(1, models - 1)) for i in range(layers)]} for n in range(models)
    ]}  # fmt: skip


@pytest.mark.parametrize(("models", "layers"), [(1, 1), (4, 3), (12, 24)])
def test_figure(models, layers):
    data = decays(made_up(models, layers))
    values, lives, horizons = draw(data).axes
    assert [line.get_ydata()[0] for line in values.lines] == pytest.approx(np.linspace(0, 1, models))
    assert len(lives.lines) == len(horizons.lines) == models + 1
    assert bool(values.collections) == (models <= 4)
    assert len(data.legend) == models + 1


def test_numbers_that_are_not_finite(tmp_path):
    result = made_up(2, 2, q25=math.nan, median=math.nan)
    draw(decays(result)).canvas.draw()
    write_tables(result, tmp_path)
    layer = json.loads((tmp_path / "decays.json").read_text(), parse_constant=pytest.fail)["models"][0]["layers"][0]
    assert (layer["median"], layer["slowest_half_life"]) == (None, None)


def model(name, layers, channels="heads"):
    rows = [{"layer": i, "spectra": {"1": {"timescales": list(scales)}}} for i, scales in enumerate(layers)]
    return {"model": name, "channels": channels, "layers": rows}


GEOMETRIC = [np.geomspace(1, 512, 8)] * 3
DATA = {"models": [model("mamba2", [[20.0] * 8, [None] + [30.0] * 7]), model("mamba2+post", GEOMETRIC), model("x", [])]}


@pytest.mark.parametrize("logs", [np.array([2.0]), np.zeros(5), np.random.default_rng(0).normal(1, 0.7, 200)])
def test_densities_hold_one(logs):
    x, y = allocation.density(logs)
    assert np.trapezoid(y, x) == pytest.approx(1, abs=3e-3)  # the part of a Gaussian beyond three widths
    assert (x[0] < logs.min()) & (x[-1] > logs.max())


def test_a_density_is_that_of_scipy():
    stats = pytest.importorskip("scipy.stats")
    logs = np.random.default_rng(1).normal(2, 0.5, 64)
    x, y = allocation.density(logs)
    width = 1.06 * logs.std() * len(logs) ** -0.2
    expected = stats.norm.pdf(x[:, None], logs, width).mean(1)
    assert np.allclose(y, expected, rtol=1e-12)


def test_a_geometric_spectrum_is_a_straight_line():
    """Check the right panel of `distributions`, whose axis is logarithmic."""
    _, right = allocation.distributions(DATA).panels
    line = right.series[1]
    assert right.y.log
    assert np.allclose(np.diff(np.log10(line.y)) / np.diff(line.x), np.log10(512))


def test_figures_are_the_same_of_data_read_again():
    """In `halflife figures`, NaN replaces the null of decays.json."""
    again = {"models": [model("mamba2", [[20.0] * 8, [float("nan")] + [30.0] * 7])]}
    first, second = (allocation.distributions(data).panels for data in (again, DATA))
    for panel, expected in zip(first, second, strict=True):
        assert np.array_equal(panel.series[0].y, expected.series[0].y)
        assert np.isfinite(panel.series[0].y).all()


def test_nothing_to_show_says_so():
    figure = draw(allocation.distributions({"models": [model("llama", [])]}))
    assert "no layer with a decay" in [text.get_text() for axes in figure.axes for text in axes.texts]
