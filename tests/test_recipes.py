"""The papers' experiments start on tiny data, and `--dry-run` says what they need."""

import math
import re
from pathlib import Path

import papers
import pytest
import torch
from corpora import write_texts
from helpers import assert_raises
from pairwise import slow_beyond
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from halflife import LanguageModel, preset
from halflife.cli import main
from halflife.evaluation.bundles import BUNDLES
from halflife.lab.experiments import EXPERIMENTS, compare
from halflife.lab.experiments.language_models.base import LanguageExperiment
from halflife.models import SIZES
from halflife.ops.backends.native import formulas
from halflife.report.tables.estimate import format_seconds
from halflife.runs.one import run_one
from halflife.runs.sweep import Cell
from halflife.training.config import ExecutionConfig
from halflife.training.estimate import estimate, model_costs

FIDELITY = (Path(__file__).parent.parent / "docs" / "fidelity.md").read_text()
TINY = {
    "steps": 3, "hidden_size": 16, "num_layers": 2, "num_heads": 1, "train_length": 16, "batch_size": 2,
    "save_every": 3, "test_tokens": 64, "validation_tokens": 64, "held_out": (0.2, 0.2), "validate_every": 3,
}  # fmt: skip
# Experiment → changes of its smallest scale, and a model.
RECIPES = {
    "post-lm": (TINY, "rwkv7+post_paper"),
    "decay-lm": (TINY, "tpe/gla:released"),
    "echo-lm": ({**TINY, "train_length": 80}, "echo_paper"),  # a chunk of SKA has 64 tokens
    "gate-rank-lm": ({**TINY, "overrides": {"gate_rank.reset_rate": 0.5}}, "gated_deltanet+gate_rank"),
    "post-mqar": ({"schedule": "linear_by_epoch", "schedule_options": {"epochs": 3}}, "gla+post_released:16k"),
    "echo-mqar": ({}, "mamba2+ska:K1"),
    "echo-transfer": ({}, "mamba2+ska:K1"),
    "echo-tiers": ({"hidden_size": 24, "amnesia_layers": 2}, "cg-ska-2.5:amnesia-cot_easy"),
    "gate-rank-s5": ({"validation_length": 24}, "gated_deltanet+gate_rank:neg"),
    "gate-rank-mqar": ({}, "mamba2+gate_rank"),
    "gate-rank-niah": ({}, "gated_deltanet+gate_rank:reset50"),
}  # fmt: skip
TINY_TASK = {"steps": 3, "batch_size": 2, "test_examples": 2, "validation_examples": 2, "hidden_size": 32}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = write_texts(tmp_path_factory.mktemp("text"), "the state forgets what it cannot hold in {i} tokens; " * 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HALFLIFE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield folder


@pytest.mark.parametrize("name", slow_beyond(("gate-rank-lm", "echo-lm", "decay-lm"), RECIPES))
def test_recipes_start(name, text, tmp_path):
    """Three steps of a model that only the recipe has, and its tests."""
    experiment, (changes, model) = EXPERIMENTS[name](), RECIPES[name]
    on_text = isinstance(experiment, LanguageExperiment)
    changes = {**changes, "text": (str(text),)} if on_text else {**TINY_TASK, **changes}
    settings = experiment.open_data(experiment.settings_at("smoke", changes))
    config = experiment.configure(settings, Cell(model, 1e-3, 0))
    result = run_one(config.open(), tmp_path, name=model, execution=ExecutionConfig(show=False))
    measured = [test[experiment.measure] for test in result["tests"]]
    assert measured
    assert all(map(math.isfinite, measured))
    assert "diverged" not in result


@pytest.mark.slow
def test_a_recipe_from_the_command_line(text, tmp_path, capsys):
    """The whole comparison on a folder in place of FineWeb-Edu, continued with other micro-batches."""
    options = [
        "--steps=3",
        "--hidden-size=16",
        "--num-layers=2",
        "--num-heads=1",
        "--train-length=16",
        "--batch-size=2",
    ]
    folder = str(tmp_path / "run")
    main([
        "compare", "scalar/gla", "llama", "--experiment", "decay-lm", "--data", str(text), "--output", folder,
        "--quiet", "--batch-size", "2", "--micro-batch-size", "1", *options,
        "--set", "training.validation_tokens=64", "training.test_tokens=64",
    ])  # fmt: skip
    printed = capsys.readouterr().out
    assert "halflife eval FOLDER --tasks decay-lm" in printed
    assert "| scalar/gla |" in printed
    assert "| 2.921 |" in printed  # the paper's, of llama
    assert "| 3.008 |" not in printed  # the paper's, of scalar/gla:released
    page = (tmp_path / "run" / "report.html").read_text()
    assert "lowest test loss in nats a byte" in page
    (cell,) = (tmp_path / "run" / "llama").iterdir()
    (cell / "result.json").unlink()
    main(["train", "--resume", str(cell), "--quiet"])  # a run of the comparison is a run of `train`, too
    result = (cell / "result.json").read_text()
    main(["compare", "--resume", folder, "--quiet", "--recompute", "blocks"])
    assert (cell / "result.json").read_text() == result


def test_micro_batches_are_for_text(tmp_path):
    folder = compare.create_comparison(["gla"], output=tmp_path / "run", settings={"steps": 1})
    with pytest.raises(ValueError, match="experiments on text"):
        compare.run_comparison(folder, show=False, execution=ExecutionConfig(micro_batch_size=1))


def configured(experiment, scale, model):
    experiment = EXPERIMENTS[experiment]()
    (rate,) = experiment.learning_rates(model, scale)
    return experiment.configure(experiment.settings_at(scale, {}), Cell(model, rate, 0))


def test_models_of_post():
    """RWKV-7 has its own optimiser; the plain Mamba-2 starts at S4D-Real, and Δ's bias is fixed under PoST."""
    rwkv7, mamba2, post = (configured("post-lm", "paper", name) for name in ("rwkv7", "mamba2", "mamba2+post_paper"))
    assert (rwkv7.betas, rwkv7.epsilon) == ((0.9, 0.99), 1e-18)
    assert (mamba2.betas, mamba2.epsilon) == ((0.9, 0.95), 1e-8)
    assert mamba2.model.mixer_options["decay_options"] == {"rate_start": "s4d_real"}
    assert post.model.mixer_options["decay_options"] == {"step_bias": "frozen"}
    assert (rwkv7.model.initialization, mamba2.model.initialization) == ("rwkv7_released", "mamba2_released")
    assert mamba2.schedule_options["min_lr_rate"] * mamba2.learning_rate == pytest.approx(1e-5)
    assert_raises(ValueError, "no rwkv7 of 440M", configured, "post-lm", "paper-440m", "rwkv7")


@pytest.mark.parametrize("modifier", ["", "+post_paper", "+post_released"])
def test_gated_deltanet_of_post_is_the_released_one(modifier):
    """24 layers without MLPs, 6 heads of 128 × 256: eight times the state of 12 layers with 12 heads of 64 × 64."""
    config = configured("post-lm", "paper", f"gated_deltanet{modifier}").model
    assert (config.num_layers, config.mlp, config.tie_embeddings) == (24, "none", True)
    assert config.initialization == "gated_deltanet_released"
    with torch.device("meta"):
        mixer = LanguageModel(config).blocks[0].mixer
    assert (mixer.num_heads, mixer.head_dim, mixer.value_dim) == (6, 128, 256)
    assert 24 * 6 * 128 * 256 == 8 * 12 * 12 * 64 * 64


@pytest.mark.parametrize("name", ["post-lm", "decay-lm", "echo-lm", "gate-rank-lm"])
def test_tokens_are_those_that_the_paper_prints(name):
    """Formulas stand twice in the stored text of PoST and Echo, once as text and once as LaTeX: "44B" is 4B."""
    settings = EXPERIMENTS[name].scales["paper"]
    tokens = settings.steps * settings.batch_size * settings.train_length
    printed = [row.source for row in papers.ROWS[name] if "B tokens" in row.source]
    assert printed or name == "decay-lm"  # its paper gives steps alone
    assert all(tokens / 1e9 == pytest.approx(float(said.split("B")[0]), rel=0.02) for said in printed)


def test_models_of_echo_share_their_layers():
    for name in ("echo_paper", "mamba2+ska_paper", "mamba2"):
        model = configured("echo-lm", "paper", name).model
        assert (model.hidden_size, model.num_layers, model.mixer_options["state_size"]) == (768, 24, 64)
        assert model.hybrid.get("layers", [8, 16]) == [8, 16]
        assert model.mlp == ("koopman_paper" if name == "echo_paper" else "swiglu")


@pytest.mark.parametrize(
    "name",
    ["llama", "gated_deltanet+gate_rank", *(pytest.param(x, marks=pytest.mark.slow) for x in ("rwkv7", "echo_paper"))],
)
def test_operations_are_those_of_the_whole_model(name):
    """Two layers and three give all five; softmax attention grows with the length."""
    config = preset(name, hidden_size=32, num_layers=5, vocab_size=64)
    costs, model = model_costs(config), LanguageModel(config)
    counter = FlopCounterMode(display=False, custom_mapping=formulas())
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        model(torch.zeros(1, 1024, dtype=torch.long))
    unseen = 0.01 if model.config.hybrid.get("mixer") == "ska" else 0  # the counter does not see the native kernel
    assert costs.operations.at(1024) * 1024 == pytest.approx(counter.get_total_flops(), rel=1e-9 + unseen)
    assert costs.saved.at(1024) > costs.saved.at(512) > 0


def test_what_is_saved_for_the_backward_pass():
    """Fake tensors save what real ones do: here every tensor that autograd holds for a two-layer model."""
    config = preset("gla", hidden_size=32, num_layers=2, vocab_size=64)
    sizes, model = {}, LanguageModel(config)

    def pack(x):
        sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        hidden, _ = model.hidden(torch.zeros(1, 256, dtype=torch.long))
    for parameter in model.parameters():
        sizes.pop(parameter.data_ptr(), None)
    assert hidden.requires_grad
    assert model_costs(config).saved.long == pytest.approx(sum(sizes.values()), rel=0.01)


def test_an_estimate_counts_every_sequence():
    config = configured("gate-rank-lm", "smoke", "mamba2")
    needs = estimate(config, config.sequences())
    assert needs.tokens == 60 * 8 * 128
    assert needs.state_bytes == 16 * needs.parameters
    assert 7 < needs.activation_bytes / estimate(config, config.sequences(), rows=1).activation_bytes < 8
    mixed = EXPERIMENTS["echo-transfer"]()
    run = mixed.configure(mixed.settings_at("small", {}), Cell("mamba2", 1e-3, 0))
    counts = run.sequences()
    assert sum(counts.values()) == pytest.approx(2000 * 32)
    assert counts[64] == 1000 * 32  # the second half; the first has sequences of 24 tokens


def test_dry_runs_write_nothing(tmp_path, monkeypatch, capsys, refused):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HALFLIFE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("halflife.report.tables.estimate.gemm_rate", lambda *_, **__: 1e12)
    main(["compare", "mamba2", "--experiment", "post-lm", "--scale", "paper", "--seeds", "2", "--dry-run"])
    printed = capsys.readouterr().out
    assert "tokenizer: meta-llama/Llama-3.1-8B" in printed
    assert "188,869,056" in printed
    assert "3,999,793,152" in printed
    assert "7,999,586,304" in printed  # of both seeds
    assert "mamba2: 24 layers of width 768, 128,256 tokens, mlp none" in printed
    refuse = refused("compare", "gla", "--task", "mqar", "--micro-batch-size", "2", "--dry-run")
    assert "experiments on text" in refuse
    main(["compare", "mamba2", "--task", "mqar", "--steps", "7", "--dry-run"])
    printed = capsys.readouterr().out
    assert f"{7 * 128 * 32:,}" in printed
    assert "micro-batch" not in printed
    train = ["train", "gla", "--data", "hf:owner/name", "--tokens", "4M", "--dry-run"]
    main([*train, "--size", "decay-160m", "--tokenizer", "owner/tokenizer"])
    assert "vocab_size: 50432" in capsys.readouterr().out
    assert "no tokenizer 'owner/tokenizer'" in refused(*train, "--tokenizer", "owner/tokenizer")
    assert "nowhere.txt" in refused("train", "gla", "--data", "nowhere.txt", "--dry-run")
    assert list(tmp_path.iterdir()) == []


def test_durations():
    seconds = (0.5, 61, 99.7, 150, 60 * 99.6, 7200, 86400, 400 * 86400)
    words = ["0.5 s", "61 s", "100 s", "2.5 min", "100 min", "2 h", "24 h", "400 days"]
    assert [format_seconds(x) for x in seconds] == words


@pytest.mark.parametrize("name", ["post-lm", "decay-lm", "echo-lm", "gate-rank-lm"])
def test_fidelity_names_the_recipes(name):
    """The row of docs/fidelity.md has the tokens, the models and the other sizes of the recipe."""
    experiment = EXPERIMENTS[name]()
    (row,) = (line for line in FIDELITY.splitlines() if line.startswith(f"| `{name}` |"))
    _, _, models, tokens, _, others, _ = row.split("|")
    settings = experiment.scales["paper"]
    assert settings.size in SIZES
    assert float(tokens.strip(" B")) == pytest.approx(
        settings.steps * settings.batch_size * settings.train_length / 1e9, rel=0.01
    )
    scales = [scale for scale in experiment.scales if scale.startswith("paper-")]
    assert [word.partition("`")[0] for word in others.split("`paper")[1:]] == [scale[5:] for scale in scales]
    if name == "decay-lm":
        assert "39 rows" in models
    else:
        named = {part for model in experiment.models_at("paper") for part in (model, *model.split("+"))}
        assert set(re.findall(r"`([^`]+)`", models)) <= named
    assert experiment.zero_shot in BUNDLES
