"""`halflife train --post-fit`: PoST starts from the decay rates of a trained model."""

import json

import pytest
import torch
from helpers import assert_raises, cases
from test_start import SIZES, saved, text, train  # noqa: F401 (text is a fixture)

from halflife import LanguageModel, preset
from halflife.analysis.survey import load_readable
from halflife.cli.train import Train
from halflife.models import checkpoint
from halflife.training.post_fit import fit_post, plan_fit, quantiles, resting_rates


def target(name="mamba2+post", **options):
    return LanguageModel(preset(name, vocab_size=256, train_length=32, **{**SIZES, "num_heads": 4, **options}))


def rates_of(folder):
    return resting_rates(load_readable(folder), folder)


def static(mixer):
    """λ at zero activation from the parameters of Mamba-2's decay."""
    decay = mixer.decay
    return (-decay.A_log.double().exp() * torch.nn.functional.softplus(decay.dt_bias.double())).exp().detach()


def start_of(post):
    return (-post.base_log_rate().double().exp()).exp().detach()


def source(folder, **options):
    torch.manual_seed(1)
    model = LanguageModel(preset("mamba2", vocab_size=200, **{**SIZES, "num_heads": 4, **options}))
    checkpoint.save(model, folder)
    return model


def test_the_start_has_the_sorted_decays_of_the_source(tmp_path):
    theirs, ours = source(tmp_path), target()
    fit = fit_post(ours, rates_of(tmp_path))
    assert (fit.layers, fit.channels) == ((0, 1), (4, 4))
    assert 0 < fit.error < 1e-6
    for old, new in zip(theirs.blocks, ours.blocks, strict=True):
        expected = static(old.mixer).sort(descending=True).values
        torch.testing.assert_close(start_of(new.mixer.decay), expected, rtol=0, atol=fit.error * (1 + 1e-9))
    with torch.device("meta"):
        planned = target()
    assert plan_fit(planned, rates_of(tmp_path)) == fit


@cases("name, heads, layers", pytest.param("mamba2+post", 2, 1, marks=pytest.mark.slow), ("rwkv7+post", 2, 3))
def test_other_numbers_of_channels_and_layers(name, heads, layers, tmp_path):
    """The error is that of the source's quantiles. RWKV-7 cannot reach fast decays, and its error says so."""
    theirs, ours = source(tmp_path, num_layers=2), target(name, num_heads=heads, num_layers=layers)
    theirs.blocks[1].mixer.decay.dt_bias.data[0] = 2.0  # one fast decay
    checkpoint.save(theirs, tmp_path)
    fit = fit_post(ours, rates_of(tmp_path))
    assert fit.layers == {1: (0,), 3: (0, 0, 1)}[layers]
    differences = [
        (quantiles(start_of(ours.blocks[i].mixer.decay).flatten().log().neg().log(), 4).exp().neg().exp()
         - static(theirs.blocks[j].mixer).sort(descending=True).values).abs().max()
        for i, j in enumerate(fit.layers)
    ]  # fmt: skip
    assert fit.error == pytest.approx(max(differences).item(), abs=1e-7)
    assert (0.5 < fit.error < 0.7) == (name == "rwkv7+post")


def test_transformers_models_are_read_in_place(tmp_path):
    from foreign_models import build

    build("qwen3_5_text").save_pretrained(tmp_path)
    rates = rates_of(tmp_path)
    assert [len(x) for x in rates] == [4, 4, 4]  # the last of four layers has softmax attention
    ours = target("gated_deltanet+post", num_layers=3)
    fit = fit_post(ours, rates)
    for block, rate in zip(ours.blocks, rates, strict=True):
        torch.testing.assert_close(start_of(block.mixer.decay), (-rate).exp(), rtol=0, atol=fit.error * (1 + 1e-9))


def test_what_is_refused(tmp_path):
    saved(tmp_path / "deltanet", "deltanet")
    assert_raises(ValueError, r"no layer of the model in .*deltanet has a decay", rates_of, tmp_path / "deltanet")
    source(tmp_path / "mamba2")
    rates = rates_of(tmp_path / "mamba2")
    assert_raises(ValueError, r"--post-fit needs layers with PoST.*mamba2 has none", fit_post, target("mamba2"), rates)
    broken = checkpoint.load(tmp_path / "mamba2")
    broken.blocks[1].mixer.decay.A_log.data.fill_(-1e4)
    checkpoint.save(broken, tmp_path / "constant")
    with pytest.raises(ValueError, match=r"layer 1 of the model in .*constant has decay rates from 0 to 0"):
        rates_of(tmp_path / "constant")
    for options in ({"model": "mamba2+post"}, {"from_weights": "old"}):
        with pytest.raises(ValueError, match="--post-fit needs a model with PoST and --from"):
            Train(post_fit=True, data=("text",), **options)._folder()


@pytest.mark.slow
def test_a_run_with_post_fit(tmp_path, text, capsys):  # noqa: F811
    source(tmp_path / "old", num_layers=1)
    recipe = ["--data", text, "--context", 32, "--batch-size", 4, "--tokens", 4 * 4 * 32, "--hidden-size", 16]
    recipe += ["--num-layers", 1, "--num-heads", 4, "--lr", 1e-9]
    train("mamba2+post", "--from", tmp_path / "old", "--post-fit", *recipe, "--output", tmp_path / "new")
    said = capsys.readouterr().out
    assert "PoST starts from the rates of layers 0 with a decay in" in said
    assert "4 channels as 4; no decay λ differs by more than" in said
    expected = static(checkpoint.load(tmp_path / "old").blocks[0].mixer).sort(descending=True).values
    found = start_of(checkpoint.load(tmp_path / "new").blocks[0].mixer.decay)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    run = json.loads((tmp_path / "new" / "run.json").read_text())
    assert (run["start"], run["post_fit"]) == (str(tmp_path / "old"), True)
    train("--config", tmp_path / "new" / "run.json", "--output", tmp_path / "same")
    assert (tmp_path / "same" / "model.safetensors").read_bytes() == (
        tmp_path / "new" / "model.safetensors"
    ).read_bytes()
