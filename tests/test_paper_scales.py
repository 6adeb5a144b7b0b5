"""The scale "paper" of an experiment is the paper's: its docstring's table is compared with its settings."""

import dataclasses
import re

import pytest
import torch

from halflife import LanguageModel
from halflife.experiments import EXPERIMENTS, compare, paper_experiments
from halflife.experiments.mqar import STATES, PostMQAR, selections
from halflife.runs.sweep import Cell
from halflife.training.config import ExecutionConfig, TrainConfig
from halflife.training.fit import Objective, _arguments
from halflife.training.trainer import HalflifeTrainer

DESCRIBED = ("post-mqar", "gate-rank-s5")
PAPER = PostMQAR.scales["paper"]


def table(name):
    """setting → its value in the last column of the docstring's table."""
    rows = re.findall(r"\| (\w+) \|[^|]*\| (.+?) \|\n", EXPERIMENTS[name].__doc__)
    return {setting: value for setting, value in rows if setting != "setting"}


@pytest.mark.parametrize("name", DESCRIBED)
def test_the_table_has_the_settings(name):
    settings = EXPERIMENTS[name].scales["paper"]
    assert len(table(name)) >= 8
    for setting, value in table(name).items():
        assert str(getattr(settings, setting)) == value, setting
    assert "Departures:" in EXPERIMENTS[name].__doc__


def test_experiments_that_no_paper_has_are_not_called_paper():
    scales = {name: set(EXPERIMENTS[name].scales) for name in paper_experiments()}
    assert "paper" not in scales["gate-rank-mqar"] | scales["gate-rank-niah"]


# ------------------------------------------------------------------------------------------- post-mqar


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
    trainer = HalflifeTrainer(config, model=objective, args=_arguments(config, tmp_path, ExecutionConfig()))
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
    with pytest.raises(ValueError, match="embedding_dropout"):
        dataclasses.replace(config, embedding_dropout=1.0)


def test_selection_on_the_tests_flatters():
    def row(rate, accuracy, selected):
        return {
            "model": "a", "learning_rate": rate, "seed": 0, "selected": selected, "test": "capacity", "length": 8,
            "accuracy": accuracy,
        }  # fmt: skip

    assert "| a | 60.0 | 80.0 |" in selections([row(1e-3, 0.6, True), row(1e-2, 0.8, False)])


def test_it_starts(tmp_path):
    """Three steps of the smallest scale, with the paper's schedule."""
    changes = {"steps": 3, "schedule": "linear_by_epoch", "schedule_options": {"epochs": 3}, "test_examples": 4}
    folder = compare.create_comparison(
        ["gla+post_released"], experiment="post-mqar", output=tmp_path / "run",
        settings={**changes, "validation_examples": 4, "batch_size": 2},
    )  # fmt: skip
    rows = compare.run_comparison(folder, show=False)
    assert {row["test"] for row in rows} == {"in_distribution", "capacity", "persist"}
    assert "rate selected by validation" in (folder / "summary.md").read_text()
