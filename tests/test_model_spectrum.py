"""Spectra of trained models: modes, wasted channels, tapers, any decay, any checkpoint, tables and figures."""

import json
import math
from functools import partial

import helpers
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, assert_raises, cases, ids_of
from safetensors.torch import load_file, save_file
from test_convert_fla import published

from halflife.analysis import survey
from halflife.analysis.capture import capture
from halflife.analysis.model_spectrum import effective_modes, model_spectrum, spectrum_at, taper_report
from halflife.cli import main
from halflife.decay import DECAYS, SpectralDecay
from halflife.files import finite
from halflife.lab.theory import spectra
from halflife.models import LanguageModel, ModelConfig, checkpoint
from halflife.models.load import checkpoints, load_any
from halflife.models.timescales import layer_decays, timescales
from halflife.report.figures import spectrum as model_spectrum_figures
from halflife.report.figures.matplotlib_renderer import draw
from halflife.report.tables.spectrum import write_tables

TEXT = b"Before we proceed any further, hear me speak. Speak, speak.\n" * 8
FLOAT32 = 4 * 2.8e-7  # of time-scales, relative; worst measured error
ABSOLUTE = 4 * 2.4e-8  # of tapers, in [0, 1], in float32; worst measured error
EXACT = 4 * 3.4e-16  # of modes in float64, relative; worst measured error
SPECTRAL = [name for name in DECAYS if issubclass(DECAYS[name], SpectralDecay)]
CASES = [
    (name, granularity, post)
    for name in DECAYS for granularity in DECAYS[name].granularities
    for post in ([False, True] if name in SPECTRAL else [False])
]  # fmt: skip


tiny = partial(helpers.tiny, num_heads=4)


def block(decay, granularity, post):
    options = {"num_heads": 2, "decay": decay, "granularity": granularity}
    options |= {"post": {"train_length": 32}} if post else {}
    return LanguageModel(
        ModelConfig(vocab_size=256, hidden_size=12, num_layers=2, mixer="linear", mixer_options=options)
    )


@pytest.mark.parametrize("channels", [1, 5, 64])
def test_modes_are_the_participation_ratio_of_the_coherence(channels):
    scales = np.geomspace(1, 1000, channels)
    p = -np.log(scales)
    eigenvalues = np.linalg.eigvalsh(1 / np.cosh((p[:, None] - p) / 2))
    expected = eigenvalues.sum() ** 2 / (eigenvalues**2).sum()
    assert effective_modes(torch.from_numpy(scales)) == pytest.approx(expected, rel=EXACT)


def test_modes_of_equal_and_of_unlike_channels():
    assert effective_modes(torch.full((7,), 3.0)) == pytest.approx(1, rel=EXACT)
    unlike = 10.0 ** torch.arange(-24, 25, 12, dtype=torch.float64)  # μ = 2e-6, which the number N does not show
    assert effective_modes(unlike) == pytest.approx(5, rel=4 * 6.4e-12)
    assert effective_modes(torch.tensor([1.0, 1.0, 1e20], dtype=torch.float64)) == pytest.approx(9 / 5, rel=EXACT)
    assert effective_modes(torch.tensor([0.0, 0.0, math.inf])) == pytest.approx(9 / 5, rel=EXACT)  # at once and never


def test_wasted_channels_are_counted():
    found = spectrum_at(torch.tensor([0.2, 0.99, 1.0, 5.0, 64.0, 65.0, math.inf, 1e9]), 64)
    assert (found.too_fast, found.too_slow) == (2 / 8, 3 / 8)
    at_once = spectrum_at(torch.tensor([0.2, 5.0]), 1)
    assert (at_once.too_fast, at_once.too_slow) == (1 / 2, 1 / 2)


def test_post_with_reference_length_1_at_every_position():
    """Time-scales are geometric from 1 to T at position 1, and t^{(N − k)/(N − 1)} times longer at t."""
    found = model_spectrum(tiny("retnet+post"))
    assert found.positions == [1, 32, 128, 512]
    base, ideal = 32.0 ** np.array([1, 2 / 3, 1 / 3, 0]), np.array([1, 2 / 3, 1 / 3, 0])
    slow = {"1": 3 / 4, "32": 2 / 4, "128": 2 / 4, "512": 2 / 4}  # 32^{4/3} = 102, 32^{2/3} t^{1/3}… 512: 4,096, 81
    for layer in found.layers:
        for position in found.positions:
            spectrum = layer.spectra[str(position)]
            assert spectrum.timescales == pytest.approx(base * position**ideal, rel=FLOAT32)
            assert spectrum.too_slow == np.mean(base * position**ideal > position * 1.001)
            assert spectrum.too_fast == 0
        assert {at: spectrum.too_slow for at, spectrum in layer.spectra.items()} == slow


@cases("name", "longhorn", "longhorn_paper", "rwkv7+post", "gla", "mamba3")
def test_base_spectra_are_those_of_a_layer_that_reads_zeros(name):
    """Also where a bias of another part counts: of Longhorn's convolution, and the zigzag of RWKV-7 under PoST."""
    model, found = tiny(name), []
    with capture(model, decay=lambda layer, g: found.append(g[0, -1].flatten())), torch.no_grad():
        for block in model.blocks:
            block.mixer(torch.zeros(1, 5, 16), shared={})
    for layer, g in zip(timescales(model, [5]), found, strict=True):
        torch.testing.assert_close(torch.tensor(layer.timescales["5"]), -1 / g, rtol=1e-4, atol=0)


def test_positions_are_of_post_or_of_the_text_or_given():
    fixed = tiny("tnl")
    assert model_spectrum(fixed).positions == [1]
    assert model_spectrum(fixed, ids_of(1, 8)).positions == [1, 8, 32, 128]
    assert model_spectrum(tiny("mamba2+post"), ids_of(1, 8)).positions == [1, 32, 128, 512]
    assert list(model_spectrum(fixed, positions=(3, 5)).layers[0].spectra) == ["3", "5"]


def test_the_text_gives_the_mean_rates():
    (layer, _) = model_spectrum(tiny("tnl"), ids_of(2, 8)).layers
    expected = [4 / (8 * head) for head in (1, 2, 3, 4)]
    assert layer.spectra["text"].timescales == pytest.approx(expected, rel=FLOAT32)
    assert layer.spectra["1"].timescales == pytest.approx(expected, rel=FLOAT32)
    assert layer.spectra["text"].too_fast == 1
    assert layer.spectra["text"].modes == pytest.approx(layer.spectra["8"].modes, rel=FLOAT32)


def test_a_channel_that_never_decays_is_the_slowest():
    """GateRank's heads without a reset on the text: their rate is 0, and not −0, whose time-scale would be −∞."""
    model = tiny("gated_deltanet+gate_rank")
    with torch.no_grad():
        for block in model.blocks:
            block.mixer.gate_rank.slow_gate.bias.fill_(-1e4)
    for layer in model_spectrum(model, ids_of(2, 8)).layers:
        slow = layer.spectra["slow text"]
        assert slow.timescales == [math.inf] * 4
        assert (slow.too_slow, slow.too_fast) == (1, 0)


def test_time_scales_that_are_not_stretched_have_no_taper():
    model = tiny("mamba2+post", mixer_options={"post": {"stretch": False}})
    assert [layer.taper for layer in model_spectrum(model).layers] == [None, None]


def test_a_fresh_taper_is_ideal():
    report = taper_report(layer_decays(tiny("mamba2+post"))[0][1])
    assert report.ideal == pytest.approx([1, 2 / 3, 1 / 3, 0])
    assert report.deviation < ABSOLUTE
    assert report.slack < ABSOLUTE


def test_a_learned_taper_and_the_slack_that_explains_it():
    decay = layer_decays(tiny("mamba2+post"))[0][1]
    with torch.no_grad():
        decay.delta.copy_(torch.tensor([0.1, 2.0, 1.0]))
    report = taper_report(decay)
    p = np.cumsum([0, *np.log1p(np.exp([0.1, 2.0, 1.0]))])
    k = np.arange(4)
    learned = np.clip((3 - k) / 3 + (p - k * p[-1] / 3) / math.log(32), 0, 1)
    assert report.learned == pytest.approx(learned, abs=ABSOLUTE)
    d = np.abs(learned - (3 - k) / 3)
    assert report.deviation == pytest.approx(d.max(), abs=ABSOLUTE)
    for name, side in (("slack", "paper"), ("sharp_slack", "sharp")):
        bound = getattr(spectra.taper_bound(getattr(report, name), 4), side).numpy()
        inner = slice(1, -1)  # the ends of the taper never deviate
        assert (bound[inner] - d[inner]).min() == pytest.approx(0, abs=ABSOLUTE), name


@pytest.mark.parametrize(("decay", "granularity", "post"), CASES)
def test_every_decay(decay, granularity, post):
    model = block(decay, granularity, post)
    channels = 2 if granularity == "scalar" else 12
    for ids in (None, ids_of(2, 8)):
        found = model_spectrum(model, ids)
        assert json.loads(json.dumps(finite(found.to_dict()), allow_nan=False))
        assert [layer.layer for layer in found.layers] == [0, 1]
        for layer in found.layers:
            assert (layer.taper is not None) == post
            assert ("text" in layer.spectra) == (layer.decays is not None) == (ids is not None)
            for spectrum in layer.spectra.values():
                assert len(spectrum.timescales) == channels
                assert 1 - 1e-9 <= spectrum.modes <= channels + 1e-9
                assert 0 <= spectrum.too_slow + spectrum.too_fast <= 1


def test_lightnets_timescale_is_the_position():
    (layer, _) = model_spectrum(block("lightnet", "scalar", False), positions=(1, 64)).layers
    assert layer.spectra["1"].timescales == [0, 0]
    assert layer.spectra["64"].timescales == pytest.approx(
        [1 / math.log(64 / 63)] * 2, rel=4 * 3.8e-6
    )  # 63/64 in float32
    assert layer.spectra["64"].modes == pytest.approx(1, rel=EXACT)


def test_a_model_without_a_decay_has_no_layers():
    for name in ("llama", "deltanet"):
        assert model_spectrum(tiny(name), ids_of(1, 4)).layers == []


def test_the_slow_state_has_a_spectrum_of_its_own():
    layer = model_spectrum(tiny("gated_deltanet+gate_rank"), ids_of(2, 40)).layers[0]
    assert layer.spectra["slow text"].timescales == [1 / rate for rate in layer.decays.slow.rates]
    assert layer.spectra["text"].timescales != layer.spectra["slow text"].timescales


def mamba2(folder, **saving):
    from transformers import Mamba2Config, Mamba2ForCausalLM

    config = Mamba2Config(
        vocab_size=256, hidden_size=32, num_heads=8, head_dim=8, state_size=16, num_hidden_layers=2, n_groups=2
    )
    model = Mamba2ForCausalLM(config)
    model.save_pretrained(folder, **saving)
    return model.state_dict()


def fla(folder, model_type):
    config, tensors = published(model_type, torch.float32)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return tensors


def base(folder, **options):
    (model,) = survey.measure_models([folder], **options).models
    return model, [torch.tensor(layer.spectra["1"].timescales) for layer in model.layers]


@pytest.mark.parametrize("saving", [{}, {"max_shard_size": "20KB"}])
def test_mamba2_of_transformers(tmp_path, saving):
    tensors = mamba2(tmp_path / "theirs", **saving)
    model, got = base(tmp_path / "theirs", train_length=64)
    assert (model.model, model.channels, model.positions) == ("mamba2", "heads", [1, 64, 256, 1024])
    for i, scales in enumerate(got):
        at = f"backbone.layers.{i}.mixer"
        assert_close(scales, 1 / (F.softplus(tensors[f"{at}.dt_bias"]) * tensors[f"{at}.A_log"].exp()), FLOAT32)


def gated_deltanet_rates(tensors, at):
    return F.softplus(tensors[f"{at}.dt_bias"]) * tensors[f"{at}.A_log"].exp()


def rwkv7_rates(tensors, at):
    return math.exp(-0.5) * tensors[f"{at}.w_lora.lora.2.bias"].sigmoid()


def gla_rates(tensors, at):
    return -F.logsigmoid(tensors[f"{at}.gk_proj.1.bias"]) / 16


@cases("model_type, rates", ("gated_deltanet", gated_deltanet_rates), ("rwkv7", rwkv7_rates), ("gla", gla_rates))
def test_models_of_fla(tmp_path, model_type, rates):
    tensors = fla(tmp_path / "theirs", model_type)
    model, got = base(tmp_path / "theirs")
    assert (model.model, model.train_length, model.positions) == (model_type, None, [1])
    for i, scales in enumerate(got):
        assert_close(scales, 1 / rates(tensors, f"model.layers.{i}.attn"), FLOAT32)


@pytest.mark.parametrize("saving", [{}, {"max_shard_size": "5KB"}])
def test_our_models_from_transformers(tmp_path, saving):
    from halflife.hf import HalflifeForCausalLM

    model = tiny("mamba2+post")
    HalflifeForCausalLM.of(model).save_pretrained(tmp_path / "theirs", **saving)
    loaded = load_any(tmp_path / "theirs")
    assert loaded.config == model.config
    for name, x in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], x), name
    assert list(checkpoints([tmp_path])) == ["mamba2+post"]


def test_the_training_length_of_a_run(tmp_path):
    folder = checkpoint.save(tiny("tnl"), tmp_path)
    runs = {
        '{"context": 48}': 48,
        '{"stages": [[{"name": "mqar", "length": 8}], [{"name": "mqar", "length": 24}, {"name": "s5"}]]}': 24,
        "[]": None,
    }
    for run, expected in runs.items():
        (folder / "run.json").write_text(run)
        assert base(folder)[0].train_length == expected
    assert base(folder, train_length=7)[0].positions == [1, 7, 28, 112]
    assert_raises(ValueError, "at least 1 token", base, folder, train_length=0)


def test_each_checkpoint_is_loaded_once(tmp_path, monkeypatch, capsys):
    (tmp_path / "text").write_bytes(TEXT)
    loaded, load = [], survey.load_any
    monkeypatch.setattr(survey, "load_any", lambda folder, device: loaded.append(folder) or load(folder, device))
    for name in ("mamba2", "mamba2+ska"):
        checkpoint.save(tiny(name, num_layers=3), tmp_path / "run" / name)
    main(["spectrum", str(tmp_path / "run"), "--text", str(tmp_path / "text"), "--length", "32", "--sequences", "1"])
    assert sorted(folder.name for folder in loaded) == ["mamba2", "mamba2+ska"]
    assert (tmp_path / "run" / "spectrum" / "koopman.png").exists()
    assert "Koopman operators" in capsys.readouterr().out


def test_without_a_text(tmp_path, capsys):
    tensors = fla(tmp_path / "theirs", "gated_deltanet")
    checkpoint.save(tiny("mamba2+post"), tmp_path / "ours")
    main(["spectrum", str(tmp_path), "--output", str(tmp_path / "out"), "--heads"])
    out = capsys.readouterr().out
    assert "median" not in out
    assert "base spectrum" in out
    assert "mamba2+post: taper up to 0.000" in out
    drawn = ["spectrum", *(f"spectrum_{name}" for name in ("modes", "distribution", "taper"))]
    tables = ["decays.csv", "decays.json", "report.html"]
    names = [*tables, *(f"{name}.{kind}" for name in drawn for kind in ("png", "svg"))]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(names)
    data = json.loads((tmp_path / "out" / "decays.json").read_text(), parse_constant=pytest.fail)
    assert (data["text"], data["length"], data["sequences"]) == ([], None, 0)
    assert [model["train_length"] for model in data["models"]] == [32, None]
    rows = [row.split() for row in out.split("heads of gated_deltanet")[-1].splitlines()]
    rates = gated_deltanet_rates(tensors, "model.layers.1.attn").tolist()
    assert [row[2] for row in rows if row[:1] == ["1"]] == [f"{1 / rate:.3g}" for rate in rates]


def other(config):
    def write(folder):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))

    return write


def broken(folder):
    mamba2(folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["backbone.layers.1.mixer.A_log"]
    save_file(tensors, folder / "model.safetensors")


def pickled(folder):
    mamba2(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def damaged(folder):
    from halflife.hf import HalflifeForCausalLM

    HalflifeForCausalLM.of(tiny("mamba2")).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("model.blocks.0.mixer.decay.A_log")
    save_file(tensors, folder / "model.safetensors")


@cases(
    "make, message",
    (other({"model_type": "gpt2"}), "holds a gpt2, which cannot be read"),
    (other({"model_type": "qwen3_next"}), "model.safetensors is missing"),
    (other({"model_type": "halflife", "model": 3}), "its config.json describes no model"),
    (other({"format": 1}), "describes no model"),
    (broken, "backbone.layers.1.mixer.A_log is missing"),
    (pickled, "a pickle"),
    (damaged, "A_log"),
    (lambda folder: checkpoint.save(tiny("llama"), folder), "there is no decay"),
    (lambda folder: folder.mkdir(), "hold no checkpoint"),
)
def test_errors_are_one_line(tmp_path, refused, make, message):
    make(tmp_path / "it")
    assert message in refused("spectrum", str(tmp_path / "it"))
    assert not (tmp_path / "it" / "spectrum").exists()


@pytest.fixture
def data(tmp_path):
    """The content of `decays.json` for four models: position-adaptive, with two states, and without a decay."""
    for name in ("mamba2+post", "gated_deltanet+gate_rank", "lightnet", "llama"):
        checkpoint.save(tiny(name), tmp_path / "run" / name)
    (tmp_path / "text").write_bytes(TEXT)
    result = survey.measure_models([tmp_path / "run"], [tmp_path / "text"], length=32, sequences=2).to_dict()
    write_tables(result, tmp_path)
    return json.loads((tmp_path / "decays.json").read_text(), parse_constant=pytest.fail)


def test_figures_show_the_saved_numbers(data):
    figures = {figure.name: figure for figure in model_spectrum_figures.spectrum_figures(data)}
    assert list(figures) == ["spectrum", "spectrum_modes", "spectrum_distribution", "spectrum_taper"]
    for figure in figures.values():
        draw(figure).canvas.draw()
    post = next(model for model in data["models"] if model["model"] == "mamba2+post")
    panels = {panel.title: panel for panel in figures["spectrum"].panels}
    assert sum("\n" in title for title in panels) == 3  # the first layer of each model has the name
    for place, series in zip(("1", "32", "512", "text"), panels["mamba2+post\nlayer 0"].series, strict=True):
        assert series.y.tolist() == pytest.approx(post["layers"][0]["spectra"][place]["timescales"])
    shown = set(figures["spectrum"].legend)
    assert {"base, position 1", "base, 16T", "mean on the text", "of the slow state, on the text", "T"} <= shown
    expected = [
        [layer["spectra"][place]["too_slow"] for layer in model["layers"]]
        for model in data["models"] if model["layers"] for place in (str(model["positions"][1]), "text")
    ]  # fmt: skip
    assert [series.y for series in figures["spectrum_modes"].panels[1].series] == expected
    ideal, learned = figures["spectrum_taper"].panels[0].series
    assert ideal.y == pytest.approx([1, 2 / 3, 1 / 3, 0])
    assert learned.y == post["layers"][0]["taper"]["learned"]


def test_figures_of_models_without_a_decay(data):
    nothing = {**data, "models": [model for model in data["models"] if not model["layers"]]}
    figures = model_spectrum_figures.spectrum_figures(nothing)
    assert [one.name for one in figures] == ["spectrum", "spectrum_modes", "spectrum_distribution"]
    for figure in map(draw, figures):
        figure.canvas.draw()
        assert {text.get_text() for axes in figure.axes for text in axes.texts} == {"no layer with a decay"}
