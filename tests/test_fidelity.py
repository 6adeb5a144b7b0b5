"""docs/fidelity.md lists every form that has a name, and no other; its numbers are computed."""

import re
from pathlib import Path
from typing import get_type_hints

import pytest
import torch

from halflife import decay, preset
from halflife.decay import DECAYS, PoST
from halflife.lab.experiments.overrides import constructor_options
from halflife.layers import LAYERS, GateRank
from halflife.models import MODIFIERS, PRESETS
from halflife.models.config import ATTACHMENTS, INITIALIZATIONS
from halflife.runs.task_run import RunConfig

TEXT = (Path(__file__).parent.parent / "docs" / "fidelity.md").read_text()
SUFFIXES = ("_paper", "_released")
NAMES = {name for registry in (PRESETS, MODIFIERS, DECAYS, LAYERS) for name in registry}
SIZES = {"hidden_size": 32, "num_layers": 2, "vocab_size": 31, "num_heads": 4, "train_length": 16}


def named():
    """The words in code that stand for a name of a registry, or that look like one with a suffix."""
    words = set(re.findall(r"`(\w+)`", TEXT)) - {*SUFFIXES, *INITIALIZATIONS}
    return {word for word in words if word in NAMES or word.endswith(SUFFIXES)}


def test_every_form_with_a_suffix_is_in_the_table():
    forms = {name for name in NAMES if name.endswith(SUFFIXES)}
    assert forms == {name for name in named() if name.endswith(SUFFIXES)}


def test_every_form_has_a_recommended_one():
    """The name without its suffix exists and is in the table too."""
    for name in named():
        for suffix in SUFFIXES:
            if name.endswith(suffix):
                assert name.removesuffix(suffix) in named()


def test_options_in_the_table_exist():
    section = TEXT.split("## Options without a name of their own")[1]
    groups = {
        "decay": constructor_options(DECAYS["mamba2"]), "ska": constructor_options(LAYERS["ska"]),
        "gate_rank": constructor_options(GateRank), "post": constructor_options(PoST),
        "training": get_type_hints(RunConfig), "mixer": constructor_options(LAYERS["mamba2"]),
    }  # fmt: skip
    options = re.findall(r"`(decay|ska|gate_rank|post|training|mixer)\.(\w+)`", section)
    assert len(options) == 15
    assert all(option in groups[group] for group, option in options)
    assert all(f"`{choice}`" in section for choice in (*ATTACHMENTS, *INITIALIZATIONS))


@pytest.mark.parametrize("name", ["gated_deltanet+post", "gla+post", "retnet+post", "mamba2+ska", "simple+dplr"])
def test_forms_are_different_models(name):
    """`_paper` or `_released` is another configuration than the form without a suffix."""
    plain = preset(name, **SIZES).to_dict()
    others = [f"{name}{suffix}" for suffix in SUFFIXES if f"{name.split('+')[1]}{suffix}" in MODIFIERS]
    assert others
    for other in others:
        form = preset(other, **SIZES).to_dict()
        assert {key: x for key, x in form.items() if key != "name"} != {k: x for k, x in plain.items() if k != "name"}


def test_numbers_of_the_decays():
    rest = torch.zeros(1, 1, 12)

    def value(name, heads=12, **sizes):
        return decay.build(name, num_heads=heads, head_dim=2, **sizes)(rest[..., :heads]).exp().detach().flatten()

    assert [round(value(name)[0].item(), 3) for name in ("gla", "gla_released")] == [0.958, 0.5]
    medians = [value(name, num_layers=12).quantile(0.5).item() for name in ("tnl", "tnl_released")]
    assert [float(f"{x:.2g}") for x in medians] == [0.014, 0.96]
    slowest = [-1 / value(name, heads=8)[-1].double().log().item() for name in ("retnet", "retnet_paper")]
    assert slowest == pytest.approx([255.5, 4095.5], rel=1e-3)
    assert value("lightnet")[0] == 0
    assert value("lightnet_released")[0] == 0.5
