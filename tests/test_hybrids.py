"""Hybrids with ratios and several kinds of layers: where layers stand, state, memory, cost, names in lists."""

import dataclasses

import pytest
import torch
from helpers import add_noise, assert_raises, assert_streams, cases

from halflife import LanguageModel, ModelConfig, preset
from halflife.evaluation.memory import layer_states, model_state_size
from halflife.models import MODIFIERS, PRESETS
from halflife.models.presets.presets import by_family
from halflife.training.estimate import model_costs

THREE = "kda+nope:2+swa:3+ska:4"


def config(name, **options):
    small = {"hidden_size": 16, "num_heads": 2, "vocab_size": 31, "num_layers": 12}
    return preset(name, **{**small, **options})


def mixers(name):
    model = config(name)
    return [model.mixer_of(i) for i in range(12)]


def short(model):
    """Return the configuration with windows of 3 tokens, SKA of rank 4 and chunks of 4 tokens."""
    small = {"swa": {"window": 3}, "ska": {"rank": 4, "chunk_size": 4}}

    def smaller(kind):
        which = "ska" if kind["mixer"] == "ska" else "swa" if "window" in kind["options"] else ""
        return {**kind, "options": {**kind["options"], **small.get(which, {})}}

    options = {**model.mixer_options, "chunk_size": 4}
    more = [smaller(kind) for kind in model.more_hybrids]
    return dataclasses.replace(model, mixer_options=options, hybrid=smaller(model.hybrid), more_hybrids=more)


def test_a_ratio_counts_layers_of_the_base():
    for ratio in (1, 2, 3, 5):
        where = config(f"mamba2+attention:{ratio}").hybrid["layers"]
        assert where == [i for i in range(12) if i % (ratio + 1) == ratio]
    names = [mixer for mixer, _ in mixers(THREE)]
    assert "".join(name[0] for name in names) == "kkakaaksakaa"
    options = [options for _, options in mixers(THREE)]
    assert [i for i in range(12) if "window" in options[i]] == [4, 10]
    assert [i for i in range(12) if "position" in options[i]] == [2, 5, 8, 11]
    assert config("mamba2+ska:3", num_layers=16, hidden_size=448).hybrid["options"]["rank"] == 56
    assert mixers("echo+attention:5")[5][0] == "attention"


def test_options_of_the_kinds():
    assert config("mamba2+swa:3").hybrid["options"] == {"num_heads": 2, "window": 2048}
    assert config("mamba2+nope").hybrid["options"] == {"num_heads": 2, "position": "none"}
    assert config("mamba2+ska:2").more_hybrids == []
    assert ModelConfig.from_json(config(THREE).to_json()) == config(THREE)


@cases(
    "name, message",
    ("mamba2+attention:0", "at least 1; got '0'"),
    ("mamba2+attention:", "at least 1; got ''"),
    ("mamba2+attention:x", "at least 1; got 'x'"),
    ("mamba2+post:3", "post takes no ratio"),
    ("mamba2+pots:3", "Did you mean 'post'"),
    ("mamba2+attention:12", "needs 13 layers of mamba2, and only 12 are left"),
    ("mamba2+attention:1+ska:6", "needs 7 layers of mamba2, and only 6 are left"),
    ("mamba2+attention:3+attention:4", "'attention:4'|given twice"),
    ("mamba2+attention:3+ska", "attention:3 and ska exclude each other .* one other mixer"),
    ("llama+attention:2", "every layer of llama is softmax attention already"),
)
def test_grammar_errors(name, message):
    assert_raises(ValueError, message, config, name)


def test_kinds_may_not_share_a_layer():
    model = config("mamba2+attention:3")
    assert_raises(ValueError, "share a layer", dataclasses.replace, model, more_hybrids=[model.hybrid])
    with pytest.raises(ValueError, match="keys mixer, options and layers"):
        dataclasses.replace(model, more_hybrids=[{"mixer": "ska"}])


@torch.no_grad()
def test_several_kinds_stream_and_are_measured():
    """The state has the predicted size."""
    model_config = short(config(THREE))
    model = add_noise(LanguageModel(model_config)).double()
    ids = torch.randint(31, (2, 9))
    assert_streams(model, ids, 1e-11)  # SKA solves systems of condition number 1/ε
    states = layer_states(model_config, "float32")
    assert [(found.mixer, found.layers) for found in states] == [
        ("kda", (0, 1, 3, 6, 9)), ("ska", (7,)), ("attention", (2, 5, 8, 11)), ("attention", (4, 10)),
    ]  # fmt: skip
    single = LanguageModel(model_config)
    _, last = single.hidden(ids[:1])
    held = sum(x.numel() * x.element_size() for part in last for x in part.values() if x.is_floating_point())
    assert model_state_size(states).at(9) == held


@pytest.mark.slow
def test_costs_of_kinds_add_up():
    """The operations of a model with two kinds are those of the base and what each kind changes."""
    both = config("mamba2+swa:3+nope:3")
    plain = dataclasses.replace(both, hybrid={}, more_hybrids=[])
    alone = [dataclasses.replace(both, hybrid=kind, more_hybrids=[]) for kind in both.hybrids]
    at = [model_costs(one).operations.at(64) for one in (both, plain, *alone)]
    assert at[0] - at[1] == pytest.approx(at[2] + at[3] - 2 * at[1], rel=1e-9)
    assert at[0] != at[1]


def test_every_name_has_a_family():
    grouped = by_family([*PRESETS, *MODIFIERS])
    assert "" not in grouped
    assert len(grouped) == 10
    assert by_family(["fox", "mine", "llama"]) == {"": ["mine"], ": softmax attention": ["fox", "llama"]}
