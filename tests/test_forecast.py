"""Forecasts of how far a model remembers: the parts of its state, their ageing, and measured recall."""

import dataclasses
import json
import math
import re

import pytest
import torch
from helpers import cases

from halflife import LanguageModel, preset, tasks
from halflife.analysis.forecast import reading, recall
from halflife.analysis.forecast.ageing import LayerAgeing, empty_memories, later_angle, memories
from halflife.analysis.forecast.survey import lags_to
from halflife.analysis.forecast.text import FORGOTTEN_SHARE, forecast_influence, measure_influence, texts_length
from halflife.analysis.readable import layer_kinds
from halflife.cli import main
from halflife.models import checkpoint
from halflife.report.figures.forecast import forecast_figures
from halflife.report.figures.matplotlib_renderer import draw
from halflife.report.style import model_styles
from halflife.report.tables import forecast as tables

MQAR = {"name": "mqar", "vocab_size": 64, "length": 16, "num_pairs": 3}
NIAH = {"name": "niah", "length": 16, "num_pairs": 2}
WINDOW = 16
EXACT = 4 * 2.0e-13  # of float64 sums; four times the worst measured error
ROUNDED = 4 * 1.7e-8  # where PoST's time-scales are used, which are float32

LINEAR = ("mamba2", "gated_deltanet+post", "rwkv7", "gla", "mamba2+gate_rank", "deltanet", "simple+dplr")


def model_of(name, vocab_size=64):
    torch.manual_seed(0)
    # With one layer, the state changes by this layer's decay alone.
    config = preset(name, hidden_size=32, num_layers=1, num_heads=4, vocab_size=vocab_size, train_length=WINDOW)
    return LanguageModel(config).double().eval()


def splits(model, *lags):
    task = tasks.build(**MQAR)
    pairs, draw = recall._pairs(task, 4, 0)
    found = [reading.start(model, pairs)]
    for lag in lags:
        found.append(reading.split(model, recall._fillers(task, 4, draw, lag - found[-1].seen), found[-1]))
    return found[1:]


@pytest.mark.parametrize("name", LINEAR)
def test_the_pairs_part_is_linear_in_the_first_state(name):
    """Doubling the first memory doubles the pairs' part, and the others' part is the state from an empty memory."""
    model, task = model_of(name), tasks.build(**MQAR)
    pairs, draw = recall._pairs(task, 4, 0)
    ids = recall._fillers(task, 4, draw, 11)
    start = reading.start(model, pairs)
    once = reading.split(model, ids, start)
    double = tuple({**layer, **{k: 2 * v for k, v in memories(layer).items()}} for layer in start.state)
    twice = reading.split(model, ids, dataclasses.replace(start, state=double))
    _, bare = model.hidden(ids, tuple({**layer, **empty_memories(layer)} for layer in start.state))
    for memory, part in once.beginning[0].items():
        scale = part.abs().max()
        assert (twice.beginning[0][memory] - 2 * part).abs().max() <= EXACT * scale
        assert (once.others[0][memory] - bare[0][memory]).abs().max() <= EXACT * scale
        assert (once.state[0][memory] - part - once.others[0][memory]).abs().max() <= EXACT * scale


@pytest.mark.parametrize("name", ["retnet", "retnet+post", "retnet+post_norm"])
def test_fixed_decays_are_forecast_exactly(name):
    """If decays depend on the position alone, the first window determines the pairs' part at any lag."""
    model = model_of(name)
    half, full, later = splits(model, WINDOW // 2, WINDOW, 3 * WINDOW)
    forecast = LayerAgeing(model, half, full, 0)
    kept = forecast.fading("memory", 3 * WINDOW).unsqueeze(-1)
    expected = later.beginning[0]["memory"]
    assert (full.beginning[0]["memory"] * kept - expected).abs().max() < ROUNDED * expected.abs().max()
    assert (forecast.rates["memory"] - forecast.noise_rates["memory"]).abs().max() < ROUNDED  # equal rates


def test_the_others_part_grows_as_a_sum_of_decays():
    """For RetNet, the factors of mean and noise are those of geometric series with its decays."""
    model = model_of("retnet")
    forecast = LayerAgeing(model, *splits(model, 8, 16), 0)
    decay = (-model.blocks[0].mixer.decay.base_log_rate().exp()).exp().detach().double()
    mean, noise = forecast.growth("memory", 100)
    assert torch.allclose(mean[:, 0], (1 - decay**100) / (1 - decay**16), rtol=1e-6)
    assert torch.allclose(noise[:, 0], ((1 - decay**200) / (1 - decay**32)).sqrt(), rtol=1e-6)


def test_the_others_part_of_a_row_that_fades_at_once_does_not_grow():
    """Rows that have faded too far to tell have an infinite rate: they hold the latest token alone, at any lag."""
    forecast = LayerAgeing(model_of("retnet"), *splits(model_of("retnet"), 8, 16), 0)
    rates = forecast.noise_rates["memory"]
    rates[0] = torch.inf
    mean, noise = forecast.growth("memory", 100)
    assert torch.equal(mean[0], torch.ones_like(mean[0]))
    assert torch.equal(noise[0], torch.ones_like(noise[0]))
    assert (mean[1:] > 1).all()


def test_a_state_without_decay_keeps_its_pairs_in_the_linear_update():
    """Without decay and erasure, the pairs stay, and mean and noise of the others grow as L and √L."""
    torch.manual_seed(0)
    options = {"decay": None, "granularity": "scalar"}
    config = preset("simple", hidden_size=32, num_layers=1, num_heads=4, vocab_size=64, mixer_options=options)
    model = LanguageModel(config).double().eval()
    forecast = LayerAgeing(model, *splits(model, 8, 16), 0)
    kept, (mean, noise) = forecast.fading("memory", 64), forecast.growth("memory", 64)
    assert torch.allclose(kept, torch.ones_like(kept))
    assert torch.allclose(mean, torch.full_like(mean, 4.0))
    assert torch.allclose(noise, torch.full_like(noise, 2.0))


@pytest.mark.parametrize("spec", [MQAR, NIAH], ids=["mqar", "niah"])
def test_measured_recall_is_that_of_whole_sequences(spec):
    """Answers from a forked state equal those of a model that reads pairs, fillers and question in one call."""
    model, task = model_of("mamba2", 128 if spec is NIAH else 64), tasks.build(**spec)
    lag, examples = 9, 4
    found = recall.measure_recall(model, task, [0, lag], examples=examples, seed=5)[1]
    pairs, draw = recall._pairs(task, examples, 5)
    fillers = recall._fillers(task, examples, draw, lag)
    right = []
    for i in range(task.num_pairs):
        question = [pairs[:, 2 * i : 2 * i + 1]]
        if spec is NIAH:
            question.insert(0, torch.full((examples, 1), 4))
        logits, _ = model(torch.cat([pairs, fillers, *question], 1))
        right.append(logits[:, -1].argmax(-1) == pairs[:, 2 * i + 1])
    assert found == torch.stack(right).double().mean().item()


def test_a_model_in_training_is_measured_without_dropout():
    model, task = LanguageModel(preset("gla", hidden_size=16, num_layers=1, embedding_dropout=0.9)), tasks.build(**MQAR)
    found = [recall.measure_recall(model.train(mode), task, [0, 4], examples=32) for mode in (True, False)]
    assert found[0] == found[1]


def test_needles_have_the_layout_of_the_task():
    task = tasks.build(**NIAH)
    pairs, _ = recall._pairs(task, 8, 0)
    batch = task.generate(8, 0).inputs
    assert (batch[:, -2] == 4).all()
    assert ((pairs[:, ::2] >= 16) & (pairs[:, ::2] < 48)).all()
    assert ((pairs[:, 1::2] >= 48) & (pairs[:, 1::2] < 80)).all()


def test_at_the_window_the_forecast_is_the_measurement():
    model, task = model_of("mamba2").float(), tasks.build(**MQAR)
    found = recall.forecast_recall(model, task, [WINDOW], window=WINDOW, examples=16)
    assert found.values == recall.measure_recall(model, task, [WINDOW // 2, WINDOW], examples=16)[1:]
    assert {head.head for head in found.heads} == {0, 1, 2, 3}


def test_one_part_ages_alone():
    """The first lag ages the pairs' part, the second the others'. At the window, both are as they were read."""
    model = model_of("mamba2")
    half, full = splits(model, WINDOW // 2, WINDOW)
    ageing = LayerAgeing(model, half, full, 0)
    pairs, others = full.beginning[0]["memory"], full.others[0]["memory"]
    faded = ageing.at(4 * WINDOW, WINDOW)["memory"] - others
    assert (faded.square().sum((0, -1)) <= pairs.square().sum((0, -1))).all()
    filled = ageing.at(WINDOW, 4 * WINDOW)["memory"] - pairs
    assert (filled.square().sum() > others.square().sum()).item()
    same = ageing.at(WINDOW, WINDOW)["memory"] - pairs - others
    kept = ageing.rates["memory"].isfinite()  # rows that faded completely are not extrapolated
    assert kept.any()
    assert (same * kept.unsqueeze(-1)).abs().max() < EXACT * pairs.abs().max()


def test_faster_decay_forgets_earlier():
    """The rate of a model with one rate is measured, and what it holds fades the sooner the higher it is."""
    task, found = tasks.build(**MQAR), []
    for rate in (0.05, 0.2):
        model = model_of("mamba2+post")
        post = model.blocks[0].mixer.decay
        with torch.no_grad():
            post.theta.fill_(math.log(rate) - post.decay.rate_offset())
        found.append(recall.forecast_recall(model, task, [16, 64, 256, 1024], window=WINDOW).heads[0].rate)
    assert found[1] > 2 * found[0]


@cases(
    "name, why", ("llama", "layer 0 .attention."), ("lightnet", "decay"), ("mamba2+ska", "layer 1 .ska."),
    ("mesa", "gram"), ("mamba2+log_linear", "memory of several levels"), ("simple+tpe", "the state of TPE"),
    ("mamba2+attention", "beside.keys"),
)  # fmt: skip
def test_what_has_no_such_memory_is_refused(name, why):
    config = preset(name, hidden_size=32, num_layers=2, num_heads=4, vocab_size=64)
    if "beside" in why:
        config = dataclasses.replace(config, hybrid={**config.hybrid, "attach": "beside"})
        assert layer_kinds(LanguageModel(config)) == ["mamba2", "mamba2 + attention"]
    with pytest.raises(ValueError, match=f"no forecast for .*{why}"):
        recall.forecast_recall(LanguageModel(config), tasks.build(**MQAR), [16], window=16)


def test_longhorn_has_no_rates_at_rest_and_fades():
    model = model_of("longhorn")
    found = recall.forecast_recall(model, tasks.build(**MQAR), [WINDOW, 64], window=WINDOW)
    assert all(0 < head.rate < math.inf for head in found.heads)


def test_mamba3_turns_on():
    """The angle goes on by the mean of its last half window; what differs between texts grows as the root."""
    half, full = torch.tensor([[0.1], [0.3]]).double(), torch.tensor([[0.45], [-0.45]]).double()
    found = later_angle({"angle": half}, {"angle": full}, 4)["angle"]  # by 0.35 and 0.25 of a turn
    expected = full + 4 * 0.3 + 2 * torch.tensor([[0.05], [-0.05]])
    assert torch.allclose(found, expected - expected.round())
    model, ids = model_of("mamba3"), texts(40)
    count = iter((8, 12))

    def read(length):
        start = next(count)
        return ids[:, start : start + length]

    aged = reading.Reading(model, ids[:, :8], read, 8)
    before, after = (aged.at(lag, lag)[0]["angle"] for lag in (8, 24))
    torch.testing.assert_close(before, aged.full.state[0]["angle"], rtol=0, atol=1e-15)
    assert (after - before).abs().max() > 1e-3


def test_lags_before_the_window_are_refused():
    with pytest.raises(ValueError, match="from there on; got 16 and"):
        recall.forecast_recall(model_of("mamba2"), tasks.build(**MQAR), [8, 16], window=16)
    with pytest.raises(ValueError, match="at least 2 sequences"):
        recall.forecast_recall(model_of("mamba2"), tasks.build(**MQAR), [16], window=16, examples=1)


def texts(length, vocab_size=64, count=4):
    return torch.randint(vocab_size, (count, length), generator=torch.Generator().manual_seed(0))


def test_influence_is_that_of_a_model_that_never_read_the_beginning():
    """In one layer without convolution, the state without the beginning is that of the text after it."""
    model, ids, (beginning, lag) = model_of("simple"), texts(40), (5, 9)
    (found,) = measure_influence(model, ids, [lag], beginning=beginning)
    asked = slice(beginning + lag, texts_length(beginning, lag))
    whole, _ = model(ids[:, : asked.stop])
    after, _ = model(ids[:, beginning : asked.stop])
    p, other = (logits[:, -16:].log_softmax(-1) for logits in (whole, after))
    assert found == pytest.approx((p.exp() * (p - other)).sum(-1).mean().item(), rel=1e-9)
    assert found > 1e-6


@pytest.mark.parametrize("name", ["mamba2", "gated_deltanet+post", "deltanet", "mamba2+gate_rank"])
def test_at_the_window_the_forecast_influence_is_the_measurement(name):
    model, ids = model_of(name), texts(60)
    measured = measure_influence(model, ids, [0, WINDOW], beginning=8)
    found = forecast_influence(model, ids, [WINDOW, 2 * WINDOW], beginning=8, window=WINDOW)
    assert found.values[0] == pytest.approx(measured[1], rel=1e-6)
    assert found.level == pytest.approx(FORGOTTEN_SHARE * measured[0], rel=1e-9)


def test_a_state_that_keeps_everything_does_not_forget():
    """Without decay nothing fades, so the beginning loses influence only to what fills the state."""
    torch.manual_seed(0)
    options = {"decay": None, "granularity": "scalar"}
    config = preset("simple", hidden_size=32, num_layers=1, num_heads=4, vocab_size=64, mixer_options=options)
    found = forecast_influence(LanguageModel(config), texts(60), [16, 64, 1024], beginning=8, window=16)
    assert found.fade_lag == math.inf
    assert found.fill_lag < math.inf


def test_a_model_whose_predictions_ignore_the_beginning_is_refused():
    """The output projection of an untrained RWKV-7 is zero, so its state changes nothing."""
    with pytest.raises(ValueError, match="no forecast for rwkv7: the beginning of a text changes no prediction"):
        forecast_influence(model_of("rwkv7"), texts(60), [16], beginning=8, window=16)


@pytest.mark.parametrize(("length", "beginning"), [(texts_length(8, 16) - 1, 8), (100, 0)])
def test_texts_that_are_too_short_are_refused(length, beginning):
    with pytest.raises(ValueError, match=f"got a beginning of {beginning} and texts of {length}"):
        measure_influence(model_of("mamba2"), texts(length), [0, 16], beginning=beginning)


def test_crossing():
    assert reading.crossing([0, 1, 3], [1.0, 1.0, 0.0], 0.5) == pytest.approx(math.sqrt(2 * 4) - 1)
    assert reading.crossing([0, 1], [1.0, 0.9], 0.5) == math.inf
    assert reading.crossing([5, 6], [0.1, 0.1], 0.5) == 5


def test_log2_ratio():
    row = {"measured": [1.0], "lags": [0, 64], "half_lag": 16.0, "forecast_half_lag": 32.0}
    never = {**row, "forecast_half_lag": math.inf}
    assert tables.log2_ratio(row) == 1
    assert tables.log2_ratio(never) == 2  # a lower bound
    assert tables.log2_ratio({**never, "half_lag": math.inf}) is None
    assert tables.log2_ratio({**never, "measured": [0.4]}) is None
    text = {"measured": [0.2], "lags": [0, 64], "window": 8, "forgotten_lag": 16.0, "forecast_forgotten_lag": 8.0}
    assert tables.log2_ratio(text) == -1
    assert tables.log2_ratio({**text, "forgotten_lag": 7.0}) is None
    said = tables.error_sentence([row, {**row, "half_lag": 64.0}])
    assert said == "2 models, error 1.00 octaves in the median, at most 1.00 (median with its sign +0.00)."
    assert tables.error_sentence([{**row, "measured": [0.4]}]) == ""


def test_lags():
    assert lags_to(16) == [0, 4, 6, 8, 11, 16]
    assert lags_to(24) == [0, 4, 6, 8, 11, 16, 23, 24]  # the longest lag is measured whatever T is
    assert lags_to(2) == [0, 2]


@pytest.fixture
def run(tmp_path):
    for name in ("mamba2", "llama"):
        checkpoint.save(model_of(name).float(), tmp_path / "run" / name)
        (tmp_path / "run" / name / "run.json").write_text(json.dumps({"seed": 3, "validation": [MQAR]}))
    return tmp_path / "run"


def test_command(run, capsys):
    """It shows the recall of the report beside its own, which is of later questions."""
    tests = [
        {"test": name, "num_pairs": 3, "accuracy": value} for name, value in (("in_distribution", 0.906), ("x", 0))
    ]
    (run / "mamba2" / "result.json").write_text(json.dumps({"tests": tests}))
    main(["forecast", str(run), "--longest", "4", "--examples", "4", "--quiet"])
    printed = capsys.readouterr().out
    assert "left out: llama: no forecast for llama" in printed
    assert "forecast.json" in printed
    with pytest.warns(UserWarning, match="--text was not read"):
        main(["forecast", str(run), "--longest", "4", "--examples", "4", "--quiet", "--text", str(run / "x")])
    capsys.readouterr()
    result = tables.read_forecasts(run / "forecast" / "forecast.json")
    (row,) = result["models"]
    assert (row["model"], row["seed"], row["train_length"]) == ("mamba2", 3, 16)
    assert row["lags"][-1] == 64 == row["forecast_lags"][-1]
    assert row["forecast_lags"][0] == 16
    assert "| mamba2 | 3 | mqar | 16 | 3 | 91 % |" in (run / "forecast" / "forecast.md").read_text()
    assert re.search(r"^mamba2, seed 3, .*its 3 pairs \(mqar\)", printed, re.M)
    assert "recall in T" not in printed
    main(["forecast", str(run), "--longest", "4", "--examples", "4", "--quiet", "--details"])
    assert "recall in T: the report's accuracy in distribution" in " ".join(capsys.readouterr().out.split())
    (figure,) = forecast_figures(result)
    assert figure.name == "forecast"
    drawn = run / "forecast" / "forecast.png"
    assert drawn.stat().st_size > 10_000
    before = drawn.read_bytes()
    drawn.unlink()
    main(["figures", str(run / "forecast"), "--formats", "png"])
    assert drawn.read_bytes() == before
    assert capsys.readouterr().out.split() == [str(drawn)]


def test_lags_beyond_the_longest_have_a_mark_of_their_own_and_not_learned_is_said():
    """A triangle to the right for a half-lag beyond the longest, one upwards for a forecast; no lag without recall."""
    own = {"task": "mqar", "train_length": 16, "num_pairs": 4, "lags": [0, 16, 64], "forecast_lags": [16, 64],
           "forecast": [1.0, 0.0], "fade_lag": 20.0, "fill_lag": 30.0, "seed": None}  # fmt: skip
    rows = [
        {**own, "model": name, "measured": values, "half_lag": lag, "forecast_half_lag": ahead}
        for name, values, lag, ahead in (
            ("far", [1.0, 1.0, 0.9], math.inf, 50.0), ("near", [1.0, 0.6, 0.2], 22.0, math.inf),
            ("none", [0.26, 0.25, 0.24], 0.0, 31.0),
        )
    ]  # fmt: skip
    result = {"models": rows, "texts": [], "refused": {}, "names": ["llama", "none", "far", "near"]}
    (figure,) = forecast_figures(result)
    dots = {one.name: one for one in figure.panels[0].series if one.name != "exact"}
    assert {name: one.style.marker for name, one in dots.items()} == {"far, T 16": ">", "near, T 16": "^"}
    assert (dots["near, T 16"].x, dots["near, T 16"].y) == ([22.0], [64])
    assert dots["far, T 16"].style.color == model_styles(result["names"])["far"].color
    assert "beyond the longest lag" in figure.keys
    assert tables.sentences(result) == [
        "far recalls half of its 4 pairs (mqar) or more up to 64 tokens later, the longest lag. "
        "Forecast: about 50 tokens.",
        "near forgets half of its 4 pairs (mqar) after about 22 tokens. Forecast: more than 64 tokens.",
        "none has not learned to recall: 26 % of its 4 pairs (mqar), asked at once, where naming any value gives 25 %.",
    ]
    (table,) = tables.forecast_tables(result)
    lost = [*table.rows[2]]
    assert (lost[1], lost[7:]) == ("–", ["–"] * 5)
    (empty,) = forecast_figures({**result, "models": rows[2:]})
    assert not empty.panels[0].series
    assert draw(empty)


def test_command_on_a_text(run, tmp_path, capsys):
    """A model of text reads the text; one of another task in the same folder is left out."""
    folder = run / "simple"
    checkpoint.save(model_of("simple", 256).float(), folder)
    (folder / "run.json").write_text(json.dumps({"seed": 1, "context": 16}))
    (run / "mamba2" / "run.json").write_text(json.dumps({"validation": [{"name": "s5"}]}))
    (tmp_path / "text.txt").write_text("It was the best of times, it was the worst of times. " * 20)
    arguments = ["forecast", str(run), "--text", str(tmp_path / "text.txt"), "--beginning", "8", "--longest", "4"]
    main([*arguments, "--examples", "4", "--quiet"])
    printed = capsys.readouterr().out
    assert "left out: mamba2: no run on mqar or niah (run.json), and no run on text" in printed
    result = tables.read_forecasts(run / "forecast" / "forecast.json")
    (row,) = result["texts"]
    assert result["models"] == []
    assert (row["model"], row["seed"], row["train_length"], row["beginning"], row["window"]) == ("simple", 1, 16, 8, 16)
    assert row["lags"][-1] == 64 == row["forecast_lags"][-1]
    assert "| simple | 1 | 16 | 8 | 16 |" in (run / "forecast" / "forecast.md").read_text()
    drawn = run / "forecast" / "forecast_text.png"
    before = drawn.read_bytes()
    drawn.unlink()
    main(["figures", str(run / "forecast"), "--formats", "png"])
    assert drawn.read_bytes() == before


def test_a_text_is_asked_for_and_must_be_long_enough(run, tmp_path, refused):
    (run / "mamba2" / "run.json").write_text(json.dumps({"context": 16}))
    assert "mamba2: no run on mqar or niah (run.json), and a run on text needs --text" in refused("forecast", str(run))
    (tmp_path / "text.txt").write_text("too short")
    message = refused("forecast", str(run), "--text", str(tmp_path / "text.txt"))
    assert "a lag this long needs 2,128; choose a lower --longest" in message


@cases(
    "arguments, message",
    (["--longest", "0"], "window, text_window and beginning are at least 1"),
    (["missing"], "there is no folder"),
)
def test_errors_are_one_line(run, refused, arguments, message):
    assert message in refused("forecast", *([str(run)] if "--" in arguments[0] else []), *arguments)


def test_a_run_on_another_task_is_refused(run, refused):
    for folder in run.iterdir():
        (folder / "run.json").write_text(json.dumps({"validation": [{"name": "s5"}]}))
    assert "no run on mqar or niah" in refused("forecast", str(run))
