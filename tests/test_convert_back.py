"""Models of fla, converted there and back: the tensors agree to the bit."""

import json

import pytest
import torch
from helpers import assert_raises, assert_same, cases
from safetensors.torch import load_file, save_file
from test_convert_fla import VARIANTS, published
from test_convert_later import kda, mamba3

from halflife import LanguageModel, preset
from halflife.models.convert import SOURCES, assemble, back_to, convert

CASES = [
    *((name, changes) for name, changes in VARIANTS if changes.get("fuse_norm", True)),
    ("kda", {}),
    ("mamba3", {}),
]
CASES += [("kda", {"num_v_heads": None}), ("mamba3", {"is_mimo": True, "is_outproj_norm": True, "rope_fraction": 1.0})]
FIXTURES = {"kda": kda, "mamba3": mamba3}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "changes"), CASES)
def test_there_and_back(kind, changes):
    config, weights = FIXTURES[kind](**changes) if kind in FIXTURES else published(kind, **changes)
    model = assemble(*SOURCES[kind](config, weights))
    their_config, back = back_to("fla", model)
    assert_same({name: x.to(weights[name].dtype) for name, x in back.items()}, weights)
    again, tensors = SOURCES[kind](their_config, back)
    ids = torch.randint(19, (2, 9))
    assert_same(assemble(again, tensors)(ids)[0], model(ids)[0])


@pytest.mark.slow
def test_folders(tmp_path):
    config, weights = published("gla", torch.float32)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    save_file(weights, tmp_path / "in" / "model.safetensors")
    convert(tmp_path / "in", tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "back", to="fla")
    assert_same(load_file(tmp_path / "back" / "model.safetensors"), weights)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"] == "gla"


@cases(
    "name, options, message",
    ("mamba2", {}, "fla has models for mixers gla, gated_deltanet, kda, mamba3, rwkv7; this one has 'mamba2'"),
    ("gated_deltanet+post", {}, "fla's gated_deltanet has Mamba2Decay as blocks.0.mixer.decay; this model has PoST"),
    ("gated_deltanet", {"mlp": "koopman"}, "fla's gated_deltanet has mlp 'swiglu'; this model has 'koopman'"),
    ("mamba3", {"mlp": "none"}, "rates that depend on the input .rate_floor.*this model has rate_floor None"),
    ("gated_deltanet", {"mixer_options": {"conv_size": 0}}, "use_short_conv = False"),
    ("rwkv7+post", {}, "RWKV7Decay as blocks.0.mixer.decay; this model has PoST"),
)
def test_models_that_fla_lacks_are_refused(name, options, message):
    model = LanguageModel(preset(name, hidden_size=16, num_layers=1, num_heads=2, train_length=8, **options))
    assert_raises(ValueError, message, back_to, "fla", model)
