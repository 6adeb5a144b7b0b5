"""Controls have as much state, or as many parameters, as their targets."""

import dataclasses

import pytest
import torch
from helpers import assert_raises

from halflife import LanguageModel, preset
from halflife.lab.experiments import EXPERIMENTS, compare
from halflife.models.controls import TOLERANCE, control, split_control
from halflife.runs.sweep import Cell

SIZES = {"hidden_size": 64, "num_layers": 2, "vocab_size": 32, "num_heads": 4, "train_length": 32}
TARGETS = ("mamba2+gate_rank", "mamba2+ska", "mamba2+attention")


def close(found, wanted):
    return abs(found - wanted) <= TOLERANCE * wanted


CASES = [
    (base, target, mlp) for base in ("mamba2", "gated_deltanet") for target in TARGETS for mlp in ("none", "swiglu")
]
FAST = [("mamba2", "mamba2+gate_rank", "none"), ("gated_deltanet", "mamba2+attention", "swiglu")]


@pytest.mark.parametrize(
    ("base", "target", "mlp"), [case if case in FAST else pytest.param(*case, marks=pytest.mark.slow) for case in CASES]
)
def test_sizes(base, target, mlp):
    one, other = (preset(name, **SIZES, mlp=mlp) for name in (base, target))
    models = [LanguageModel(each) for each in (one, other)]
    state = LanguageModel(control(one, "state", other, 32, "a"))
    assert close(state.state_size(32), models[1].state_size(32))
    parameters = LanguageModel(control(one, "parameters", other, 32, "b"))
    assert close(parameters.num_parameters(), models[1].num_parameters())
    assert (state.config.name, parameters.config.name) == ("a", "b")
    assert parameters.config.num_layers == 2
    logits, _ = state(torch.zeros(1, 5, dtype=torch.long))
    assert logits.shape == (1, 5, 32)


def test_the_nearest_size_is_chosen():
    one, other = preset("mamba2", **SIZES), preset("mamba2", **SIZES, mixer_options={"state_size": 37})
    assert control(one, "state", other, 1, "a").mixer_options["state_size"] == 37


def test_names():
    assert split_control("mamba2+post") is None
    assert split_control("mamba2@state(mamba2+gate_rank:reset10)") == ("mamba2", "state", "mamba2+gate_rank:reset10")
    for name in ("mamba2@state", "mamba2@bytes(llama)", "@state(llama)"):
        assert_raises(ValueError, r"a control is called base@state\(target\)", split_control, name)


def test_a_control_of_longhorn_has_more_rows():
    """Its `state_size` is K; `head_dim` would widen the layer."""
    base = preset("longhorn", **SIZES)
    found = control(base, "state", preset("mamba2+gate_rank", **SIZES), 1, "x")
    assert found.mixer_options.keys() - base.mixer_options.keys() <= {"state_size"}
    assert "head_dim" not in found.mixer_options


def test_what_has_no_control():
    attention, other = preset("llama", **SIZES), preset("mamba2", **SIZES)
    with pytest.raises(ValueError, match=r"x: no size of llama has [\d,]+ numbers of state to 5%, as mamba2 has"):
        control(attention, "state", other, 1, "x")


def test_controls_in_an_experiment():
    name = "mamba2@state(mamba2+gate_rank)"
    plan = compare.plan_comparison([name, "mamba2+gate_rank"], experiment="gate-rank-niah", scale="small")
    configs = {cell.model: plan.experiment.configure(plan.settings, cell) for cell in plan.cells()}
    sizes = [LanguageModel(config.model).state_size() for config in configs.values()]
    assert close(*sizes)
    assert configs[name].model.name == name
    experiment = EXPERIMENTS["gate-rank-niah"]()
    plain = experiment.configure(plan.settings, Cell("mamba2", 1e-2, 0))
    same = dataclasses.replace(configs[name], model=plain.model)
    assert same == plain  # the model alone differs
