"""Options of a run by name: their places, names and values that are refused, and options of all models."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
from helpers import assert_raises, cases

from halflife.cli import main
from halflife.decay import build
from halflife.lab.experiments.overrides import (
    GROUPS,
    apply_overrides,
    check_parts,
    constructor_options,
    parse_overrides,
)
from halflife.lab.experiments.values import convert, load_yaml
from halflife.layers import LAYERS
from halflife.layers.memory.choice import KINDS
from halflife.models import PRESETS, preset
from halflife.registry import check_options
from halflife.training.config import TrainConfig


def run_of(name):
    return TrainConfig(model=preset(name, hidden_size=64, num_layers=2), steps=10, batch_size=2, learning_rate=1e-3)


def changed(name, *written):
    return apply_overrides(run_of(name), parse_overrides(written))


def test_options_land_where_presets_put_theirs():
    model = changed("mamba2+post", "post.reference_length=512", "post.endpoints=[0.5, 4]", "mixer.state_size=32").model
    assert model.mixer_options["post"] == {"train_length": 2048, "reference_length": 512, "endpoints": (0.5, 4.0)}
    assert model.mixer_options["state_size"] == 32
    assert changed("simple", "decay.p=0.9").model.mixer_options["decay_options"] == {"p": 0.9}
    model = changed("mamba2+gate_rank", "gate_rank.reset_rate=0.5").model
    assert model.mixer_options["gate_rank"] == {"reset_rate": 0.5}
    model = changed("mamba2", "model.tie_embeddings=false", "model.mlp=none").model
    assert not model.tie_embeddings
    assert model.mlp == "none"
    run = changed("mamba2", "training.weight_decay=0.05", "training.betas=[0.9, 0.99]", "training.learning_rate=1e-4")
    assert (run.weight_decay, run.betas, run.learning_rate) == (0.05, (0.9, 0.99), 1e-4)
    assert run.model == run_of("mamba2").model


def test_hybrids():
    """Options of a hybrid's other mixer are set by its group, or by `mixer` if the base has no such option."""
    assert changed("mamba2+ska", "mixer.power=2").model == changed("mamba2+ska", "ska.power=2").model
    options = changed("mamba2+ska", "mixer.chunk_size=32", "ska.chunk_size=8", "ska.ridge=1e-2").model
    assert options.mixer_options["chunk_size"] == 32
    assert options.hybrid["options"] == {"num_heads": 1, "rank": 48, "chunk_size": 8, "ridge": 1e-2}
    model = changed("mamba2+attention", "mixer.rope_base=5e5").model
    assert model.hybrid["options"]["rope_base"] == 5e5


def test_decay_options_are_those_of_the_decay_that_was_set():
    options = changed("simple", "decay.tau=8", "mixer.decay=gla").model.mixer_options
    assert (options["decay"], options["decay_options"]) == ("gla", {"tau": 8})
    with pytest.raises(ValueError, match=r"unknown decay option of GLADecay 'p'. Choose from: tau"):
        changed("simple", "mixer.decay=gla", "decay.p=0.5")


def test_a_new_schedule_drops_the_settings_of_the_old_one():
    run = changed("mamba2", "training.schedule_options={power: 2}", "training.schedule=polynomial")
    assert run.schedule_options == {"power": 2}
    assert apply_overrides(run, {"training.schedule": "cosine"}).schedule_options == {}


@cases(
    "name, written, message",
    ("mamba2", "mixer.statesize=2", r"unknown mixer option of mamba2 'statesize'. Did you mean 'state_size'\?"),
    ("mamba2", "mixer.powr=2", "Choose from: num_heads, decay, .*expand, head_dim, state_size, num_groups, conv_size"),
    ("gla", "mixer.tau=2", "Choose from: num_heads, head_dim, value_dim, .*feature_map, .*decay"),
    ("mamba2", "training.stpes=1", r"Did you mean 'steps'\? Choose from: steps, batch_size, weight"),
    ("mamba2", "model.tie=1", "Choose from: hybrid, mlp, intermediate_size, tie_embeddings"),
    ("mamba2", "mixr.x=1", "unknown group of options 'mixr'. Did you mean 'mixer'"),
    (
        "mamba2",
        "power=1",
        "as group.option; the groups are model, mixer, decay, post, gate_rank, log_linear, ska, training",
    ),
    ("mamba2", "mixer.power", "for example mixer.power=2; got 'mixer.power'"),
    ("mamba2", "post.reference_length=5", r"has no meaning here: mamba2 has no PoST; .*\+post"),
    ("mamba2", "gate_rank.reset_rate=0.5", r"mamba2 has no GateRank; the modifier \+gate_rank adds it"),
    ("rwkv7", "gate_rank.reset_rate=0.5", "rwkv7 has no GateRank"),
    ("mamba2", "ska.power=1", r"no layer of spectral Koopman attention; the modifier \+ska"),
    ("llama", "decay.p=0.5", "llama has no decay"),
    ("rwkv7", "decay.p=0.5", "RWKV7Decay has no options"),
    ("mamba2", "model.hidden_size=8", "use the option --hidden-size"),
    ("mamba2", "mixer.hidden_size=8", "mixer.hidden_size cannot be set: the model sets it"),
    ("mamba2", "mixer.post={}", "post.… sets these options one at a time"),
    ("mamba2", "mixer.decay_options={}", "decay.… sets"),
    ("mamba2", "mixer.state_size=2.5", "mixer.state_size must be a whole number; got 2.5"),
    ("mamba2", "training.bf16=1", "training.bf16 must be true or false; got 1"),
    ("mamba2", "training.betas=0.9", "training.betas must be a list of a number and a number"),
    ("mamba2", "mixer.head_dim=wide", "mixer.head_dim must be a whole number or null; got 'wide'"),
    ("mamba2", "mixer.num_groups=3", "have no meaning for mamba2: num_groups must divide"),
    ("mamba2+gate_rank", "gate_rank.reset_rate=5", "between 0 and 1"),
    ("mamba2", "model.mlp=kop", "Did you mean 'koopman'"),
    ("mamba3", "decay.step_bias=frozen", "ChosenRateDecay has no options"),
    ("mamba2", "training.steps=0", "steps must be at least 1"),
    ("mamba2", "training.schedule=cosin", "Did you mean 'cosine'"),
    ("mamba2", "training.schedule=warmup_stable_decay", "do not fit .* warmup_stable_decay: .*num_decay_steps"),
    ("mamba2", "training.schedule=linear_by_epoch", "do not fit .* linear_by_epoch: .*epochs"),
    ("mamba2", "training.schedule_options={power: 2}", "do not fit the schedule linear: .*power"),
    ("mamba2", "training.schedule=reduce_lr_on_plateau", "unknown schedule"),
    ("mamba2", "mixer.conv_size=[", "the value of mixer.conv_size is no YAML"),
)
def test_wrong_options(name, written, message):
    assert_raises(ValueError, message, changed, name, written)


def test_every_preset_takes_an_option_of_its_mixer():
    special = {"longhorn": ("state_size", 3), "longhorn_paper": ("state_size", 3), "fox": ("num_kv_heads", 1)}
    special |= {"llama": ("num_kv_heads", 1), "mamba3_echo": ("conv_size", 3)}
    for name in PRESETS:
        option, value = special.get(name, ("norm_eps", 1e-6))
        run = apply_overrides(run_of(name), {f"mixer.{option}": value})
        assert run.model.mixer_options[option] == value


def test_every_layer_states_the_types_of_its_options():
    for name in LAYERS:
        options = constructor_options(LAYERS[name])
        assert "hidden_size" in options
        assert Any not in options.values()


def test_rwkv7_has_a_width_that_is_called_gate_rank():
    assert changed("rwkv7", "mixer.gate_rank=64").model.mixer_options["gate_rank"] == 64


def test_the_last_of_equal_names_wins():
    assert parse_overrides(["mixer.power=1", "ska.mix=ridge", "mixer.power=2"]) == {
        "mixer.power": 2,
        "ska.mix": "ridge",
    }


def test_baselines_of_a_comparison_may_lack_a_part():
    models, overrides = [run_of("mamba2"), run_of("mamba2+post")], {"post.reference_length": 8, "mixer.state_size": 16}
    check_parts(models, overrides)
    plain, post = (apply_overrides(run, overrides, skip_absent_parts=True).model.mixer_options for run in models)
    assert plain == {"num_heads": 2, "state_size": 16}
    assert post["post"]["reference_length"] == 8
    check_parts([run_of("deltanet")], {"mixer.decay": "simple", "decay.p": 0.9})
    with pytest.raises(ValueError, match=r"ska.power has no meaning here: mamba2 has no layer of spectral"):
        check_parts(models, {"ska.power": 1})
    with pytest.raises(ValueError, match="unknown post option of PoST 'referrence'"):
        apply_overrides(models[1], {"post.referrence": 8}, skip_absent_parts=True)


def test_nothing_to_set_changes_nothing():
    assert changed("mamba2") == run_of("mamba2")
    assert set(GROUPS) == {"model", "mixer", "decay", "post", *KINDS, "ska", "training"}


def test_values_are_yaml_with_the_numbers_of_python():
    for text, value in {
        "1e-3": 1e-3, "-2E+4": -2e4, "3": 3, "true": True, "null": None, "none": "none", "[1, 2.5]": [1, 2.5],
        '"1e-3"': "1e-3", "e5": "e5", "1e": "1e", "cosine": "cosine", "{a: 1}": {"a": 1},
    }.items():  # fmt: skip
        assert load_yaml(text, "it") == value
        assert type(load_yaml(text, "it")) is type(value)


def test_values_become_the_types_of_options():
    for value, hint, expected in [
        (1, float, 1.0), (2.0, int, 2), (5, str, "5"), ("a", Path, Path("a")), (None, int | None, None),
        ([1, 2], tuple[float, float] | str, (1.0, 2.0)), ("optimal", tuple[float, float] | str, "optimal"),
        ("a", tuple[str, ...], ("a",)), ([1, 2], tuple[int, ...], (1, 2)), ({"a": 1}, dict[str, Any], {"a": 1}),
        ({"a": 1}, Mapping[str, Any] | None, {"a": 1}), ("x", Literal["x", "y"], "x"), ({1}, Any, {1}),
    ]:  # fmt: skip
        assert convert("it", value, hint) == expected
        assert type(convert("it", value, hint)) is type(expected)
    for value, hint, message in [
        (True, int, "a whole number"), (True, float, "a number"), (1, bool, "true or false"), (True, str, "text"),
        (1.5, int | None, "a whole number or null"), ([1], tuple[float, float], "a list of a number and a number"),
        ("a", dict[str, Any], "a mapping"), ("z", Literal["x", "y"], "x or y"), (1.5, tuple[int, ...], "each entry"),
        (math.inf, int, "a whole number"), (math.nan, int, "a whole number"),
        ([1], Path, "a path"), (1, list, "a list"),
    ]:  # fmt: skip
        assert_raises(ValueError, message, convert, "it", value, hint)


def test_options_of_a_preset_are_changed_one_by_one():
    """In Python as with --set: a mapping changes the options that it names, and no others."""
    model = preset("mamba2+post_norm", train_length=64, mixer_options={"post": {"train_length": 128}})
    assert model.mixer_options["post"] == {"train_length": 128, "reference_length": 64}
    ska = preset("mamba2+ska", hybrid={"options": {"power": 2}}).hybrid
    assert ska == {"mixer": "ska", "options": {"num_heads": 4, "rank": 48, "power": 2}, "layers": [2]}
    attention = {"mixer": "attention", "options": {"num_heads": 2}, "layers": [0]}
    assert preset("mamba2+ska", hybrid=attention).hybrid == attention
    assert preset("mamba2+ska", hybrid={}).hybrid == {}
    assert preset("mamba2+post", mixer_options={"post": None}).mixer_options["post"] is None
    # Options of the preset's decay are not those of another one.
    options = preset("mamba2+post_paper", mixer_options={"decay": "mamba2_no_dt"}).mixer_options
    assert options["decay_options"] == {}
    assert preset("mamba2+post_paper").mixer_options["decay_options"] == {"step_bias": "frozen"}


@cases(
    "name, given, message",
    ("mamba2", {"mpl": "none"}, r"option of a preset 'mpl'. Did you mean 'mlp'\? Choose from: hidden_size,"),
    ("mamba2", {"mixer_options": {"stat_size": 3}}, "unknown option of layer mamba2 'stat_size'.*head_dim"),
    ("mamba2+post", {"mixer_options": {"post": {"refrence": 3}}}, "option of post 'refrence'.*train_length"),
    ("mamba2+gate_rank", {"mixer_options": {"gate_rank": {"rate": 3}}}, "of gate_rank 'rate'.*from: reset_rate"),
    ("simple", {"mixer_options": {"decay_options": {"q": 3}}}, "option of decay simple 'q'. Choose from: p"),
    ("mamba2", {"mixer_options": {"post": 3}}, "post takes a mapping of options; got 3"),
    ("rwkv7", {"mixer_options": {"gate_rnk": 3}}, "Did you mean 'gate_rank'"),
    ("mamba2+ska", {"hybrid": {"options": {"pwer": 2}}}, "option of layer ska 'pwer'. Did you mean 'power'"),
)
def test_an_unknown_option_of_a_preset_lists_the_known_ones(name, given, message):
    assert_raises(ValueError, message, preset, name, **given)


def test_a_layer_of_a_user_may_take_any_option():
    class Any:
        def __init__(self, **options):
            self.options = options

    check_options("layer any", Any, {"x": 1})
    with pytest.raises(ValueError, match="decay rwkv7 takes no options; got 'p'"):
        build("rwkv7", num_heads=1, head_dim=2, granularity="vector", p=1)


def test_list_prints_the_options_of_a_model(capsys, refused):
    main(["list", "mamba2+post"])
    out = capsys.readouterr().out
    assert re.search(r"post\.reference_length +a number +1 +t_ref, the position at which", out)
    assert re.search(r"mixer\.state_size +a whole number +128 +K, rows of the state", out)
    assert "training.clip" in out
    assert not re.search(r"ska\.|gate_rank\.|mixer\.hidden_size|training\.steps", out)
    assert "unknown preset 'mambo2'. Did you mean 'mamba2'" in refused("list", "mambo2")
