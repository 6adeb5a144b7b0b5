"""FSDP1, FSDP2, accelerate and transformers' Trainer shard any model over processes."""

import pytest
import torch
from combinations import SIZES, combinations
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

from halflife import LanguageModel, preset
from halflife.hf import HalflifeForCausalLM
from halflife.models import checkpoint


@pytest.mark.slow  # test_registry.py has one of each kind
@pytest.mark.parametrize("name", combinations()[0])
def test_every_parameter_has_an_axis_to_shard(name):
    with torch.device("meta"):
        model = LanguageModel(preset(name, **SIZES))
    assert all(x.ndim for x in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize("written", ["checkpoint.save", "save_pretrained"])
def test_checkpoints_from_before_theta_had_an_axis(written, tmp_path):
    model, ids = LanguageModel(preset("mamba2+post", **SIZES)).eval(), torch.arange(8).unsqueeze(0)
    if written == "checkpoint.save":
        checkpoint.save(model, tmp_path)
    else:
        HalflifeForCausalLM.of(model).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {key: x.squeeze() if key.endswith("theta") else x for key, x in load_file(file).items()}
    assert sum(not x.ndim for x in tensors.values()) == SIZES["num_layers"]
    save_file(tensors, file, {"format": "pt"})
    expected, _ = model(ids)
    assert torch.equal(checkpoint.load(tmp_path)(ids)[0], expected)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(whole(ids).logits, expected)
    assert torch.equal(AutoModel.from_pretrained(tmp_path)(ids).last_hidden_state, model.hidden(ids)[0])
    whole.save_pretrained(tmp_path / "again")
    assert all(x.ndim for x in load_file(tmp_path / "again" / "model.safetensors").values())
