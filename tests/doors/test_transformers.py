"""What transformers promises of a model: its classes, its files, its configuration and its outputs."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from combinations import SIZES
from helpers import add_noise, assert_close, assert_raises
from pairwise import slow_beyond
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    DynamicCache,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from halflife.hf import AUTO_MAP, HalflifeConfig, HalflifeForCausalLM
from halflife.hf.cache import CACHE
from halflife.models import PRESETS

NAMES = [*PRESETS, "mamba2+post", "mamba2+gate_rank", "mamba2+ska", "mamba2+koopman_mlp"]
FEW = ["mamba2", "mamba3", "gla", "gated_deltanet", "rwkv7", "echo", "mamba2+post"]
TINY = {**SIZES, "hidden_size": 16, "num_heads": 2}
TOLERANCE = 1.2e-12  # float64: four times the largest error over all models, 3.0e-13


def build(name="mamba2", auto=AutoModelForCausalLM, settings=None, **options):
    config = HalflifeConfig.from_preset(name, **{**TINY, **options})
    config.pad_token_id = 0
    for key, value in (settings or {}).items():
        setattr(config, key, value)
    return add_noise(auto.from_config(config), 0.2).eval().double()


def padded(*lengths, side="right"):
    """Rows of the given lengths, and their mask."""
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    for row, length in zip(ids, lengths, strict=True):
        row[slice(0, length) if side == "right" else slice(-length, None)] = torch.randint(1, 31, (length,))
    return ids, (ids > 0).long()


@pytest.mark.parametrize("name", slow_beyond(FEW, NAMES))
def test_a_model_is_a_base_model_with_a_head(name):
    model = build(name)
    ids, mask = padded(5, 9)
    base = model.base_model
    assert base is model.model is model.get_decoder()
    assert all(isinstance(block, GradientCheckpointingLayer) for block in base.blocks)
    hidden = base(input_ids=ids, attention_mask=mask).last_hidden_state
    assert torch.equal(model.lm_head(hidden), model(ids, attention_mask=mask).logits)
    assert isinstance(model.get_output_embeddings(), torch.nn.Linear)
    tied = model.lm_head.weight is model.get_input_embeddings().weight
    assert tied == model.config.tie_word_embeddings
    assert model._tied_weights_keys == {"lm_head.weight": "model.embedding.weight"}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", slow_beyond(FEW, NAMES))
def test_hidden_states_stand_on_the_graph_of_the_output(name, side):
    model = build(name)
    ids, mask = padded(5, 9, side=side)
    out = model(ids, attention_mask=mask, output_hidden_states=True)
    plain = model(ids, attention_mask=mask).logits
    assert_close(out.logits, plain, TOLERANCE)
    grads = torch.autograd.grad(out.logits.square().sum(), out.hidden_states)
    for grad in grads:
        assert grad[mask.bool()].any()
        assert not grad[~mask.bool()].any()


@pytest.mark.parametrize("auto", [AutoModelForSequenceClassification, AutoModelForTokenClassification])
@pytest.mark.parametrize("name", slow_beyond(FEW, NAMES))
def test_classes_of_padded_rows_are_those_of_each_row(name, auto):
    model = build(name, auto, {"num_labels": 3})
    labels = torch.tensor([2, 0])
    for side in ("left", "right"):
        ids, mask = padded(5, 9, side=side)
        out = model(ids, attention_mask=mask)
        for row in range(2):
            alone = model(ids[row][mask[row].bool()].unsqueeze(0)).logits[0]
            found = out.logits[row] if out.logits.ndim == 2 else out.logits[row][mask[row].bool()]
            assert_close(found, alone, TOLERANCE)
        if auto is AutoModelForSequenceClassification:
            expected = torch.nn.functional.cross_entropy(out.logits, labels)
            assert_close(model(ids, attention_mask=mask, labels=labels).loss, expected, TOLERANCE)


def test_each_class_opens_what_another_one_saved(tmp_path):
    model, ids = build(tie_embeddings=False).float(), torch.randint(31, (1, 6))
    model.save_pretrained(tmp_path / "causal")
    hidden = model.model(ids).last_hidden_state
    assert torch.equal(AutoModel.from_pretrained(tmp_path / "causal")(ids).last_hidden_state, hidden)
    scorer = AutoModelForSequenceClassification.from_pretrained(tmp_path / "causal", num_labels=3)
    assert scorer(ids).logits.shape == (1, 3)
    assert torch.equal(scorer.model(ids).last_hidden_state, hidden)
    scorer.save_pretrained(tmp_path / "scorer")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "scorer")
    assert torch.equal(again(ids).logits, scorer(ids).logits)
    AutoModel.from_pretrained(tmp_path / "causal").save_pretrained(tmp_path / "base")
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "base").model(ids).last_hidden_state, hidden)


def test_the_configuration_has_the_usual_names():
    config = AutoConfig.for_model("halflife", vocab_size=100, num_hidden_layers=3)
    assert (config.vocab_size, config.num_hidden_layers, config.model["num_layers"]) == (100, 3, 3)
    assert build().config.num_attention_heads == 2
    assert HalflifeConfig().num_attention_heads >= 1
    assert pickle.loads(pickle.dumps(config)).to_dict() == config.to_dict()
    assert_raises(ValueError, "hidden_size", AutoConfig.for_model, "halflife", hidden_size=-3)


def test_a_copy_is_another_model():
    model, ids = build(), torch.randint(31, (1, 6))
    other = copy.deepcopy(model)
    assert torch.equal(other(ids).logits, model(ids).logits)
    with torch.no_grad():
        other.get_input_embeddings().weight.add_(1)
        other.model.blocks[0].mixer_norm.weight.zero_()
    assert other.lm_head.weight is other.get_input_embeddings().weight
    assert not torch.equal(other(ids).logits, model(ids).logits)
    assert other.to_halflife()(ids)[0].equal(other(ids).logits)


def test_a_cache_of_keys_and_values_is_refused():
    model, ids = build(), torch.randint(31, (1, 6))
    for cache in (DynamicCache(), ()):
        assert_raises(TypeError, "state in the place of keys and values; got", model, ids, **{CACHE: cache})


def test_a_state_has_two_names():
    """That of transformers since 5.24 and that before; both at once are refused."""
    model, ids = build(), torch.randint(31, (1, 6))
    state = model(ids[:, :4]).get(CACHE)
    old, new = (model(ids[:, 4:], **{name: state}).logits for name in ("past_key_values", "cache"))
    assert torch.equal(old, new)
    assert not torch.equal(old, model(ids[:, 4:]).logits)
    assert_raises(ValueError, "two names of one argument", model, ids, past_key_values=state, cache=state)


OPEN = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
print(model(torch.arange(6)[None]).logits.sum().item())
"""


@pytest.mark.slow
def test_a_folder_opens_in_a_program_that_does_not_import_this_package(tmp_path, monkeypatch):
    model = build().float()
    model.config.auto_map = AUTO_MAP
    model.save_pretrained(tmp_path / "model")
    assert len((tmp_path / "model" / "halflife_model.py").read_text().splitlines()) == 2
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    done = subprocess.run(
        [sys.executable, "-c", OPEN, tmp_path / "model"], capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(model(torch.arange(6)[None]).logits.sum().item(), rel=1e-6)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model")  # without remote code where it is registered
    assert isinstance(again, HalflifeForCausalLM)
