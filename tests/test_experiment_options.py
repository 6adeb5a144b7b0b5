"""An experiment sets the sizes of a model and its data; every other option that a preset's name stands for stays."""

from collections.abc import Mapping
from functools import cache

import pytest

from halflife import preset
from halflife.lab.experiments import EXPERIMENTS
from halflife.models import MODIFIERS, PRESETS
from halflife.models.presets.modifiers import HYBRIDS, MLPS
from halflife.runs.sweep import Cell

SIZES = {"train_length", "num_heads", "head_dim", "value_dim", "state_size", "chunk_size", "rank", "layers"}
# What experiments set in a base by their own account (`mqar_model`, `recall_model`, Table 7 of PoST).
BY_EXPERIMENT = {
    ("gated_deltanet", "gate"), ("retnet", "position"), ("retnet", "conv_size"), ("gla", "conv_size"),
}  # fmt: skip
BASES = ("mamba2", "simple", "retnet", "gla", "rwkv7", "gated_deltanet", "llama")
ENDS = {  # what follows a preset's name
    ("echo-mqar", "paper"): ":4x64", ("post-review", "smoke"): ":4x32", ("post-review", "small"): ":4x32",
    ("post-review", "large"): ":4x128",
}  # fmt: skip
OWN_MODELS = ("echo-tiers", "koopman-powers", "decay-design")  # they take no presets
PLACES = [(name, scale) for name in EXPERIMENTS for scale in EXPERIMENTS[name].scales if name not in OWN_MODELS]


def options_of(config, prefix=()):
    """Name → value of every option of the mixers, PoST and GateRank, and the MLP and positions of a model."""
    fields = config if isinstance(config, Mapping) else {
        "mixer": config.mixer, "mixer_options": config.mixer_options, "hybrid": config.hybrid, "mlp": config.mlp,
        "position": config.position,
    }  # fmt: skip
    found = {}
    for name, value in fields.items():
        if isinstance(value, Mapping) and value:
            found |= options_of(value, (*prefix, name))
        elif name not in SIZES:
            found[(*prefix, name)] = value
    return found


@cache
def preset_options(name, train_length):
    return options_of(preset(name, train_length=train_length))


def built(name, scale, model):
    """The configuration in an experiment; None if it refuses the name."""
    experiment = EXPERIMENTS[name]()
    try:
        return experiment.configure(experiment.scales[scale], Cell(model + ENDS.get((name, scale), ""), 1e-3, 0))
    except ValueError:
        return None


def check_modifier(name, scale, base, modifier):
    """Whether the experiment takes the model; if so, it has all that the modifier changes in the base."""
    if (config := built(name, scale, f"{base}+{modifier}")) is None:
        return False
    length = config.model.mixer_options.get("post", {}).get("train_length", 2048)
    plain, own = preset_options(base, length), options_of(config.model)
    wanted = {key: x for key, x in preset_options(f"{base}+{modifier}", length).items() if plain.get(key, ...) != x}
    assert {key: own.get(key, ...) for key in wanted} == wanted, f"{base}+{modifier}"
    return True


@pytest.mark.parametrize("name", dict(PLACES))
def test_no_option_of_a_second_mixer_or_an_mlp_is_lost(name):
    scale = next(iter(EXPERIMENTS[name].scales))
    modifiers = [*MLPS, *HYBRIDS] if name != "gate-rank-s5" else [*MLPS]  # it has models of one layer
    for modifier in modifiers:
        assert check_modifier(name, scale, "mamba2", modifier)
    if name == "echo-mqar":
        assert check_modifier(name, scale, "retnet", "lrpe")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "scale"), PLACES)
def test_no_option_of_a_modifier_is_lost(name, scale):
    assert sum(check_modifier(name, scale, base, modifier) for base in BASES for modifier in MODIFIERS) > 15


@pytest.mark.slow
@pytest.mark.parametrize(("name", "scale"), PLACES)
def test_no_option_of_a_base_is_lost(name, scale):
    """All but the MLP, which the experiments on MQAR leave out unless it is Koopman's."""
    for base in PRESETS:
        if (config := built(name, scale, base)) is not None:
            own, wanted = options_of(config.model), preset_options(base, 2048)
            if not wanted[("mlp",)].startswith("koopman"):
                own.pop(("mlp",))
            kept = {key: x for key, x in wanted.items() if key in own and (base, key[-1]) not in BY_EXPERIMENT}
            assert {key: own[key] for key in kept} == kept, base
            assert wanted.keys() - own.keys() <= {("mlp",)}, base
