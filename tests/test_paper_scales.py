"""The scale "paper" of an experiment is the paper's: its docstring's table is compared with its settings."""

import dataclasses

import papers
import pytest
import torch
from helpers import assert_raises

from halflife import LanguageModel
from halflife.lab.experiments import EXPERIMENTS, paper_experiments
from halflife.lab.experiments.mqar import STATES, PostMQAR
from halflife.runs.sweep import Cell
from halflife.tasks import build
from halflife.training.checkpoints import CheckpointStore
from halflife.training.config import ExecutionConfig, TrainConfig
from halflife.training.fit import Objective, _arguments
from halflife.training.trainer import HalflifeTrainer

PAPER = PostMQAR.scales["paper"]


@pytest.mark.parametrize("name", papers.ROWS)
def test_the_scale_paper_has_the_papers_settings(name):
    settings = EXPERIMENTS[name].scales["paper"]
    assert len({row.setting for row in papers.ROWS[name]}) == len(papers.ROWS[name]) >= 8
    for row in papers.ROWS[name]:
        value = getattr(settings, row.setting)
        assert row.paper is None or (row.paper, type(row.paper)) == (value, type(value)), row.setting
    assert "Departures:" in EXPERIMENTS[name].__doc__


def test_the_page_of_the_settings_is_current():
    text = papers.PAGE.read_text()
    assert papers.page(text) == text, "run python docs/papers.py"
    assert {name for name in EXPERIMENTS if "paper" in EXPERIMENTS[name].scales} == {*papers.ROWS, "mqar", "recall"}


def test_experiments_that_no_paper_has_are_not_called_paper():
    scales = {name: set(EXPERIMENTS[name].scales) for name in paper_experiments()}
    assert "paper" not in scales["gate-rank-mqar"] | scales["gate-rank-niah"] | scales["decay-design"]
    assert "paper" not in scales["echo-ablations"]


def test_two_hops_have_their_own_grid():
    """Figure 1b: 16 to 256 tokens, and the other tasks 64 to 4,096."""
    experiment = EXPERIMENTS["echo-transfer"]()
    config = experiment.configure(experiment.scales["paper"], Cell("mamba3_echo", 3e-4, 0))
    lengths = {
        name: {test.task["length"] for test in config.tests if test.name == name} for name in ("multihop", "niah")
    }
    assert lengths["multihop"] == {16, 32, 64, 128, 256}
    assert lengths["niah"] == {64, 128, 256, 512, 1024, 2048, 4096}


def test_echos_grid_of_50m_models():
    """Every cell is its own run; SKA and attention stand in layers 3, 7, 11 and 15, of rank 56 and 7 heads."""
    experiment = EXPERIMENTS["echo-mqar"]()
    settings = experiment.scales["paper"]
    assert len(experiment.models_at("paper")) == 28
    for name in ("mamba2", "mamba2+attention", "mamba2+ska_paper"):
        config = experiment.configure(settings, Cell(f"{name}:8x256", 3e-4, 0))
        (task,) = config.stages[0]
        assert (task["num_pairs"], task["gap"], task["length"]) == (8, 256, 288)
        assert config.stages == (config.validation,)
        with torch.device("meta"):
            model = LanguageModel(config.model)
        assert model.num_parameters() / 1e6 == pytest.approx(50, abs=3)
        if "+" in name:
            assert config.model.hybrid["layers"] == [3, 7, 11, 15]
    assert config.model.hybrid["options"]["rank"] == 56
    assert config.model.mixer_options["state_size"] == 64


def test_a_gap_separates_pairs_and_queries():
    task = build("mqar", vocab_size=64, length=40, num_pairs=4, gap=20)
    batch = task.generate(20, 0)
    low, high = task.key_range
    keys = (batch.inputs >= low) & (batch.inputs < high)
    assert not keys[:, 8:28].any()
    assert ((batch.labels != -100).nonzero()[:, 1] >= 28).all()
    assert (keys[:, 28:].sum(1) == 4).all()
    for settings in ({"gap": -1}, {"gap": 30}):
        assert_raises(ValueError, "gap", build, "mqar", vocab_size=64, length=40, num_pairs=4, **settings)


def test_echos_tiers():
    """Appendix G: SKA beside the last two of three or four layers, with η and the lift that the name says."""
    experiment = EXPERIMENTS["echo-tiers"]()
    settings = experiment.scales["paper"]
    for model in (each for tier in experiment.models_at("paper") for each in experiment.groups[tier]):
        config = experiment.configure(settings, Cell(model, 3e-4, 0))
        amnesia = "amnesia" in model
        assert (config.model.num_layers, config.steps) == ((4, 6000) if amnesia else (3, 2500))
        if "ska" not in model:
            assert not config.model.hybrid
            continue
        hybrid = config.model.hybrid
        assert (hybrid["attach"], hybrid["layers"]) == ("beside", [2, 3] if amnesia else [1, 2])
        assert str(hybrid["options"]["eta_init"]) in model
        assert (hybrid["options"].get("lift") == "cg_projected") == ("cg" in model)
        assert config.passes_action_mask
        assert hybrid["options"]["mode"] == "masked"


@pytest.mark.parametrize("tier", EXPERIMENTS["echo-tiers"].groups)
def test_ska_acts_in_every_tier(tier):
    """Before, no text of two tiers was longer than a chunk, and SKA's output was 0 at every scored position."""
    experiment = EXPERIMENTS["echo-tiers"]()
    config = experiment.configure(experiment.scales["paper"], Cell(f"ska-1.5:{tier}", 3e-4, 0))
    model, read = LanguageModel(config.model), []
    for block in model.blocks[-2:]:
        block.beside.register_forward_hook(lambda _, __, out: read.append(out[0]))
        torch.nn.init.normal_(block.beside.out_proj.weight)
    batch = config.mixtures[0][0].generate(2, 0)
    with torch.no_grad():
        model(batch.inputs, action_mask=batch.action_mask())
    assert len(read) == 2
    assert all(y[batch.labels != -100].abs().min() > 0 for y in read)


@pytest.mark.parametrize(
    ("name", "model", "changes"),
    [
        ("echo-mqar", "mamba2+ska", {"ska_chunk": 64}), ("recall", "mamba2+ska_paper", {"ska_chunk": 32}),
        ("overview", "mamba2+ska", {"overrides": {"ska.chunk_size": 64}}),
        ("echo-lm", "mamba2+ska", {"train_length": 64}),
        ("echo-tiers", "ska-1.5:amnesia-cot_easy", {"overrides": {"ska.mode": "chunk", "ska.chunk_size": 64}}),
    ],
)  # fmt: skip
def test_an_experiment_in_which_a_layer_cannot_act_does_not_start(name, model, changes):
    experiment = EXPERIMENTS[name]()
    settings = experiment.settings_at("smoke", changes)
    assert_raises(ValueError, "would read nothing", experiment.configure, settings, Cell(model, 1e-3, 0))


def test_sizes_that_figure_3_does_not_have():
    """The docstring of `echo-tiers` has the parameters of the models, for which Figure 3 says 400k, and their heads."""
    experiment = EXPERIMENTS["echo-tiers"]()
    for name, count in (("mamba3", 612_288), ("cg-ska-1.5", 687_760)):
        config = experiment.configure(experiment.scales["paper"], Cell(f"{name}:amnesia-cot_easy", 3e-4, 0)).model
        with torch.device("meta"):
            model = LanguageModel(config)
        assert (model.num_parameters(), model.blocks[0].mixer.head_dim, config.norm) == (count, 48, "layer")
        assert f"{count:,}" in experiment.__doc__


def test_the_curriculum_starts_again_each_epoch():
    """32 stages of 512 batches of 2^18 tokens, from 16 to 128 pairs eight times."""
    config = PostMQAR().configure(PAPER, Cell("mamba2", 1e-3, 0))
    pairs = [stage[0]["num_pairs"] for stage in config.stages]
    assert pairs == [16, 32, 64, 128] * 8
    assert config.steps / len(pairs) == 512
    assert config.batch_size * config.stages[0][0]["length"] == 2**18
    assert {stage[0]["filler"] for stage in config.stages} == {"zoology"}


def test_rates_are_those_of_the_architecture():
    rates = {name: PostMQAR().learning_rates(name, "paper") for name in PostMQAR.models}
    assert rates["rwkv7"] == rates["rwkv7+post_released"] == (10**-4.5, 1e-4, 10**-3.5)
    assert rates["gated_deltanet"] == (10**-3.5, 1e-3, 10**-2.5)
    assert PostMQAR().learning_rates("gated_deltanet:16k", "paper") == rates["gated_deltanet"]
    assert rates["mamba2"] == rates["gla"] == rates["retnet"] == (1e-3, 10**-2.5, 1e-2)


@pytest.mark.parametrize("state", STATES)
def test_models_have_equal_states_and_zoologys_blocks(state):
    size = {"64k": 65536, "32k": 32768, "16k": 16384}[state]
    for name in PostMQAR.groups[state]:
        config = PostMQAR().configure(PAPER, Cell(name, 1e-3, 0)).model
        with torch.device("meta"):
            mixer = LanguageModel(config).blocks[0].mixer
        rows = mixer.state_size if "mamba2" in name else mixer.head_dim
        columns = mixer.head_dim if "mamba2" in name or "rwkv7" in name else mixer.value_dim
        assert mixer.num_heads * rows * columns == size
        assert (config.mlp, config.tie_embeddings, config.embedding_dropout) == ("none", True, 0.1)
    gate, position = (
        PostMQAR().model(name, PAPER).mixer_options.get(option, "rope")
        for name, option in (("gated_deltanet", "gate"), ("retnet", "position"))
    )
    assert (gate, position) == ("none", "rope")


def test_the_rate_falls_once_an_epoch(tmp_path):
    """As LambdaLR of the released trainer: 1, 7/8, …, 1/8 of the rate, without warm-up."""
    model = dataclasses.replace(PostMQAR().model("gla", PostMQAR.scales["smoke"]), vocab_size=8)
    config = TrainConfig(
        model=model, steps=32, batch_size=2, learning_rate=0.8, warmup=0.0, schedule="linear_by_epoch",
        schedule_options={"epochs": 8},
    )  # fmt: skip
    objective = Objective(LanguageModel(model))
    store, arguments = CheckpointStore(tmp_path), _arguments(config, tmp_path, ExecutionConfig())
    trainer = HalflifeTrainer(config, store, model=objective, args=arguments)
    trainer.create_optimizer()
    scheduler, rates = trainer.create_scheduler(32), []
    for _ in range(32):
        rates.append(scheduler.get_last_lr()[0])
        trainer.optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([0.1 * (8 - step // 4) for step in range(32)])


def test_embedding_dropout_acts_in_training_alone():
    config = dataclasses.replace(PostMQAR().model("gla", PostMQAR.scales["smoke"]), embedding_dropout=0.5)
    model, given = LanguageModel(config), []
    model.blocks[0].register_forward_pre_hook(lambda _, inputs: given.append(inputs[0]))
    ids = torch.randint(256, (4, 32))
    model(ids)
    model.eval()(ids)
    assert (given[0] == 0).float().mean().item() == pytest.approx(0.5, abs=0.05)
    assert torch.equal(given[1], model.embedding(ids))
    assert_raises(ValueError, "embedding_dropout", dataclasses.replace, config, embedding_dropout=1.0)
