"""docs/fidelity.md lists every form that has a name; its numbers are computed; released initial values."""

import math
import re
from dataclasses import fields
from typing import get_type_hints

import pytest
import torch
from fidelity_rows import DOCS, check_row

from halflife import LanguageModel, decay, preset
from halflife.decay import DECAYS, PoST
from halflife.lab.experiments.overrides import constructor_options
from halflife.layers import LAYERS, GateRank
from halflife.layers.options import Place, Run
from halflife.models import MODIFIERS, PRESETS
from halflife.models.config import ATTACHMENTS, INITIALIZATIONS
from halflife.runs.task_run import RunConfig
from halflife.training.checkpoints import CheckpointStore
from halflife.training.config import ExecutionConfig, TrainConfig
from halflife.training.fit import Objective, _arguments
from halflife.training.trainer import HalflifeTrainer

TEXT = (DOCS / "fidelity.md").read_text()
SUFFIXES = ("_paper", "_released")
NAMES = {name for registry in (PRESETS, MODIFIERS, DECAYS, LAYERS) for name in registry}
SIZES = {"hidden_size": 32, "num_layers": 2, "vocab_size": 31, "num_heads": 4, "train_length": 16}


def named():
    """The words in code that stand for a name of a registry, or that look like one with a suffix."""
    code = {word for words in re.findall(r"`([\w+]+)`", TEXT) for word in words.split("+")}
    words = code - {*SUFFIXES, *set(INITIALIZATIONS) - NAMES}
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


def test_rows_need_a_place_and_checked_numbers():
    check_row("PoST, §5.4", "16 heads of `a_64+b`, T 0.5", ("16 heads", "T 0.5"))
    for place, parts in (("somewhere", ("16", "0.5")), ("§5.4", ("16",)), ("§5.4", ("16", "0.6"))):
        with pytest.raises(AssertionError):
            check_row(place, "16 heads of `a_64+b`, T 0.5", parts)


def test_options_in_the_table_exist():
    section = TEXT.split("## Options without a name of their own")[1]
    groups = {
        "decay": constructor_options(DECAYS["mamba2"]), "ska": constructor_options(LAYERS["ska"]),
        "gate_rank": constructor_options(GateRank), "post": constructor_options(PoST),
        "training": get_type_hints(RunConfig), "mixer": constructor_options(LAYERS["mamba2"]),
    }  # fmt: skip
    options = re.findall(r"`(decay|ska|gate_rank|post|training|mixer)\.(\w+)`", section)
    assert len(options) == 19
    assert all(option in groups[group] for group, option in options)
    assert all(f"`{choice}`" in section for choice in (*ATTACHMENTS, *INITIALIZATIONS))


def test_the_design_space_has_all_options_of_ska():
    table = (DOCS / "design-space.md").read_text().split("| axis of SKA |")[1].split("\n\n")[0]
    own = set(constructor_options(LAYERS["ska"])) - {part.name for kind in (Place, Run) for part in fields(kind)}
    assert own <= set(re.findall(r"`(\w+)`", table))


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


SIZES_RELEASED = {"hidden_size": 64, "num_layers": 4, "vocab_size": 997, "num_heads": 4}


def weights(name, **options):
    torch.manual_seed(0)
    return dict(LanguageModel(preset(name, **SIZES_RELEASED, **options)).named_parameters())


def test_released_mamba2():
    """Maps and taps have a standard deviation of 0.02; output projections are uniform in ±1/√(fan-in · layers)."""
    found = weights("mamba2", initialization="mamba2_released")
    for key in ("embedding.weight", "blocks.1.mixer.in_proj.weight", "blocks.1.mlp.up.weight"):
        assert found[key].std().item() == pytest.approx(0.02, rel=0.05)
    assert found["blocks.1.mixer.conv.weight"].std().item() == pytest.approx(0.02, rel=0.15)
    assert not found["blocks.1.mixer.conv.bias"].any()
    projection = found["blocks.3.mixer.out_proj.weight"]
    bound = 1 / math.sqrt(projection.shape[1] * SIZES_RELEASED["num_layers"])
    assert 0.99 * bound < projection.abs().max() <= bound
    decay = found["blocks.1.mixer.decay.A_log"].exp()
    assert ((decay >= 1) & (decay <= 16)).all()
    assert weights("mamba2")["blocks.1.mixer.in_proj.weight"].std() > 0.05


def test_released_gated_deltanet():
    """All maps, also the output projection, and the taps have a standard deviation of 0.02."""
    found = weights("gated_deltanet", initialization="gated_deltanet_released")
    matrices = {key: x for key, x in found.items() if x.dim() == 2 and x.numel() > 1000}
    assert "blocks.1.mixer.o_proj.weight" in matrices or "blocks.1.mixer.out_proj.weight" in matrices
    assert all(x.std().item() == pytest.approx(0.02, rel=0.08) for x in matrices.values())


def test_released_rwkv7():
    """Embeddings alone change."""
    found, plain = weights("rwkv7", initialization="rwkv7_released"), weights("rwkv7")
    assert 0.99e-4 < found["embedding.weight"].abs().max() <= 1e-4
    assert torch.equal(found["blocks.1.mixer.k_proj.weight"], plain["blocks.1.mixer.k_proj.weight"])


def test_unknown_initialization():
    with pytest.raises(ValueError, match=r"unknown initialization 'mamba2'.*mamba2_released"):
        preset("mamba2", **SIZES_RELEASED, initialization="mamba2")


def test_the_optimiser_has_the_settings_of_the_run(tmp_path):
    """Both β, ε, and the factor of the released RWKV-7 with PoST."""
    config = TrainConfig(
        model=preset("rwkv7+post_released", **SIZES_RELEASED), steps=2, batch_size=2, learning_rate=1e-3,
        betas=(0.8, 0.99), epsilon=1e-18,
    )  # fmt: skip
    objective = Objective(LanguageModel(config.model))
    store, arguments = CheckpointStore(tmp_path), _arguments(config, tmp_path, ExecutionConfig())
    trainer = HalflifeTrainer(config, store, model=objective, args=arguments)
    groups = trainer.create_optimizer().param_groups
    assert all((group["betas"], group["eps"]) == ((0.8, 0.99), 1e-18) for group in groups)
    assert [group["lr"] for group in groups] == pytest.approx([1e-3, 1e-3, 2e-3])
    with pytest.raises(ValueError, match="epsilon must be positive"):
        TrainConfig(model=config.model, steps=1, batch_size=1, learning_rate=1e-3, epsilon=0)
