"""The test that a review of PoST asks for: its models and tasks, its fits, and the stability of gates."""

import json
import math
from pathlib import Path

import pytest
import torch
from helpers import assert_close, assert_raises, generator

from halflife import LanguageModel, preset
from halflife.analysis.stability import gradient_norms, state_stability
from halflife.cli import main
from halflife.lab.experiments import EXPERIMENTS, compare
from halflife.lab.experiments.evidence import post_review
from halflife.runs.sweep import Cell
from halflife.tasks import build

EXPERIMENT = EXPERIMENTS["post-review"]()
SIZES = {"hidden_size": 16, "num_layers": 2, "vocab_size": 31, "num_heads": 4, "train_length": 32}
EXACT = 4 * 3e-7  # decays are float32
LINEAR = 1e-3  # of a disturbance, for which the model is linear to its size


def test_cells_differ_in_their_channels_alone():
    """N decays in each layer, states of one size, as many tokens in a batch, and tests from 4 K to 4 T."""
    settings, sizes = EXPERIMENT.settings_at("smoke", {}), set()
    for name in ("mamba2:2x16", "mamba2:4x32", "mamba2:frozen:4x32"):
        model, n, train = post_review.parse(name)
        config = EXPERIMENT.configure(settings, Cell(name, 1e-2, 0))
        built = LanguageModel(config.model)
        assert all(block.mixer.decay.shape == (n,) for block in built.blocks)
        assert config.batch_size * train == settings.batch_size * settings.train_length
        assert [test.task["length"] for test in config.tests[1:]] == [t for t in (16, 32, 64, 128) if t <= 4 * train]
        assert {task["length"] for (task,) in config.stages} == {train}
        if (post := config.model.mixer_options.get("post")) is not None:
            assert post["train_length"] == train
        assert (post is None) == (model == "mamba2")
        sizes.add(sum(layer["memory"].numel() for layer in built(torch.zeros(1, 2).long())[1]))
    assert len(sizes) == 1
    assert set(EXPERIMENT.expanded(["4x32"])) <= set(EXPERIMENT.models_at("smoke"))
    assert_raises(ValueError, "unknown cell NxT '3x5'", post_review.parse, "mamba2:3x5")
    assert_raises(ValueError, "heads of mamba2; got rwkv7", post_review.parse, "rwkv7:post:4x32")
    assert_raises(ValueError, "unknown part of PoST", post_review.parse, "mamba2:pots:4x32")


def test_queries_of_the_tests_stand_at_the_end():
    config = EXPERIMENT.configure(EXPERIMENT.settings_at("smoke", {}), Cell("mamba2:2x32", 1e-2, 0))
    for test in config.tests[1:]:
        labels = test.built.generate(3, 0).labels
        assert (labels[:, : -2 * 4] == -100).all()
        assert ((labels[:, -2 * 4 :] != -100).sum(1) == 4).all()


def rows(law, accuracy_of_a_guess=0.25):
    """Rows of `results.csv` whose errors are exp(−law(N, T, t))."""
    cells = ((2, 16), (4, 16), (2, 32), (4, 32), (8, 32), (8, 128))
    return [
        {"model": f"mamba2:frozen:{n}x{train}", "selected": True, "test": "retained", "length": t, "seed": seed,
         "num_pairs": 4, "accuracy": 1 - math.exp(-law(n, train, t)), "shortcut_accuracy": accuracy_of_a_guess}
        for n, train in cells for t in (16, 32, 64, 128) if t <= 4 * train for seed in (0, 1)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("law", "found"),
    [
        (lambda n, train, t: 0.5 + 1.5 * n / math.log(t), "N / log t"),
        (lambda n, train, t: 0.5 + 0.7 * n / math.log(train), "N / log T"),
    ],
)  # fmt: skip
def test_fits_find_the_law_of_the_errors(law, found):
    points = list(post_review.points(rows(law), 1 << 30))
    assert len(points) == 6 * 4 - 2
    fits = post_review.fits(points)["mamba2:frozen"]["all t"]
    constant, slope = fits[found]["coefficients"]
    assert -constant == pytest.approx(0.5, rel=1e-6)
    assert -slope == pytest.approx(1.5 if found == "N / log t" else 0.7, rel=1e-6)
    other = ({*fits} - {found, "both"}).pop()
    assert fits[found]["explained"] > 1 - 1e-9 > fits[other]["explained"]


def test_errors_that_say_nothing_are_left_out():
    """Two tests of 100 examples with four questions cannot tell 0 from 1/1600, and an error of a guess has no rate."""
    (point, *_) = post_review.points(rows(lambda n, train, t: 50.0), 100)
    assert point["log error"] == pytest.approx(math.log(1 / 1600))
    (point, *_) = post_review.points(rows(lambda n, train, t: math.log(800)), 100)  # one wrong answer
    assert point["log error"] == pytest.approx(math.log(1 / 800))
    points = list(post_review.points(rows(lambda n, train, t: 0.3), 100))  # errors of 0.74, where a guess has 0.75
    assert all(one["guess"] for one in points)
    assert post_review.fits(points) == {}


def test_the_jacobian_of_fixed_decays():
    """RetNet's λ: one step has the slowest one, and 2t − t steps its power. The model disturbs later layers too."""
    model = LanguageModel(preset("retnet", **SIZES)).double()
    ids = torch.randint(31, (3, 32), generator=generator("stability"))
    slowest = max(block.mixer.decay.log_rate.exp().neg().max().item() for block in model.blocks)
    for one in state_stability(model, ids, [1, 8, 16]):
        assert_close(torch.tensor([one.step, one.octave]), torch.tensor([slowest, one.position * slowest]).exp(), EXACT)
        assert 0 < one.response < 2
    assert_raises(ValueError, "between 1 and 16, half of a text", state_stability, model, ids, [17])
    assert_raises(ValueError, "no decays", state_stability, LanguageModel(preset("llama", **SIZES)), ids, [4])


def test_one_layer_leaves_what_its_decays_leave():
    """In one layer the disturbance of every head fades by the product of its decays."""
    model = LanguageModel(preset("retnet", **{**SIZES, "num_layers": 1})).double()
    ids = torch.randint(31, (2, 16), generator=generator("one layer"))
    (one,) = state_stability(model, ids, [8])
    rates = model.blocks[0].mixer.decay.log_rate.exp()
    _, before = model(ids[:, :8])
    _, after = model(ids[:, 8:], before)
    before, after = before[0]["memory"], after[0]["memory"]
    scale = (-8 * rates).exp().double().square().mean().sqrt()  # of white noise over all heads
    expected = scale * before.square().mean().sqrt() / after.square().mean().sqrt()
    assert one.response == pytest.approx(expected.item(), rel=0.05)


def test_stretched_gates_stay_contractions():
    """PoST's λ at t is at most 1, and rises with t in its slowest channel."""
    model = LanguageModel(preset("mamba2+post_paper", **SIZES))
    ids = torch.randint(31, (2, 128), generator=generator("stretched"))
    found = state_stability(model, ids, [2, 16, 64])
    steps = [one.step for one in found]
    assert steps == sorted(steps)
    assert all(one.octave <= one.step < 1 for one in found)


def test_the_page_says_how_gradient_norms_grow():
    """From the shortest text to the longest, at 4 T, of one seed: the sentence has the ends of both ranges."""
    results = Path(__file__).parent.parent / "docs" / "results"
    growth = {"frozen": [], "others": []}
    for name, one in json.loads((results / post_review.RESULT).read_text())["stability"].items():
        norms, (_, _, train) = one["gradients"], post_review.parse(one["model"])
        assert name.endswith("-seed0")
        assert norms[-1]["length"] == post_review.FARTHEST * train
        kind = "frozen" if ":frozen:" in one["model"] else "others"
        growth[kind].append(norms[-1]["parameters"] / norms[0]["parameters"])
    page = (results / "post_review.md").read_text()
    assert len(growth["frozen"]) == 4
    low, high = (format(float(f"{end:.2g}"), ",.0f") for end in (min(growth["frozen"]), max(growth["frozen"])))
    assert f"the gradient norm of `frozen` grows {low} to {high} times" in page
    assert f"those of the others change {min(growth['others']):.1f} to {max(growth['others']):.0f} times" in page


def test_gradient_norms():
    """Those of autograd over single examples: parameters without the embedding, and embeddings of the facts."""
    model = LanguageModel(preset("mamba2", **{**SIZES, "vocab_size": 64})).double()
    batch = build("mqar", vocab_size=64, length=24, num_pairs=3, gap=12).generate(2, 0)
    found = gradient_norms(model, batch)
    x = model.embedding(batch.inputs).detach().requires_grad_()
    logits = model.logits(model.hidden(x)[0])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
    loss.backward()
    weights = [p.grad for name, p in model.named_parameters() if p.grad is not None and "embedding" not in name]
    at_facts = (2 * x.grad)[batch.facts].square().sum() / 2
    assert found.length == 24
    assert found.parameters == pytest.approx(sum(grad.square().sum() for grad in weights).sqrt().item(), rel=1e-5)
    assert found.facts == pytest.approx(at_facts.sqrt().item(), rel=1e-5)


@pytest.mark.slow
def test_the_plan_has_hours(capsys):
    main(["compare", "mamba2:frozen:4x16", "--experiment", "post-review", "--seeds", "3", "--dry-run"])
    out = capsys.readouterr().out
    assert "mamba2:frozen:4x16" in out
    assert "all runs" in out
    assert "at least" in out


def test_three_steps(tmp_path):
    tiny = {
        "steps": 3, "batch_size": 2, "save_every": 3, "hidden_size": 32, "test_examples": 8, "validation_examples": 2,
    }  # fmt: skip
    models = ["mamba2:2x16", "mamba2:frozen:4x16"]
    folder = compare.create_comparison(
        models, experiment="post-review", settings=tiny, learning_rates=[1e-3], output=tmp_path / "run"
    )
    compare.run_comparison(folder, show=False)
    data = json.loads((folder / "post_review.json").read_text())
    assert len(data["points"]) == 2 * 3
    assert {run["model"] for run in data["stability"].values()} == set(models)
    assert all(len(run["gradients"]) == 3 for run in data["stability"].values())
