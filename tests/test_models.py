"""Configurations, presets and the language model: JSON, preset names, state, initialisation, damaged checkpoints."""

import dataclasses
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from combinations import SIZES, combinations, exists
from helpers import assert_raises, assert_same, cases
from pairwise import slow_beyond
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

import halflife
from halflife import LanguageModel, ModelConfig, preset
from halflife.models import MODIFIERS, PRESETS, checkpoint
from halflife.ops import fused


def build(name, **options):
    return LanguageModel(preset(name, **{**SIZES, **options}))


def test_every_base_and_many_modifiers_have_a_meaning():
    assert all(map(exists, (*PRESETS, "mamba2+post", "gated_deltanet+post", "retnet+post", "gla+post")))
    assert exists("simple+post+rope")
    assert not any(map(exists, ("llama+post", "mamba2+vector", "hgrn2+post", "retnet+vector", "deltanet+share")))


@pytest.mark.parametrize("base", slow_beyond(["mamba2", "simple", "gated_deltanet", "rwkv7", "llama"], PRESETS))
def test_a_combination_runs_and_survives_json_or_says_why_it_has_no_meaning(base):
    found, refused = combinations(base)
    for name in refused:
        assert_raises(ValueError, r".{20,}", preset, name, **SIZES)
    for name in found:
        config = preset(name, **SIZES)
        assert ModelConfig.from_json(config.to_json()) == config
        logits, state = LanguageModel(config)(torch.randint(SIZES["vocab_size"], (2, 9)))
        assert logits.shape == (2, 9, SIZES["vocab_size"])
        assert torch.isfinite(logits).all()
        assert len(state) == SIZES["num_layers"] + (config.position != "none")


@pytest.mark.parametrize("name", PRESETS)
def test_state_is_of_constant_size(name):
    model = build(name)
    _, state = model(torch.randint(SIZES["vocab_size"], (1, 5)))
    if name in ("llama", "fox"):
        assert model.state_size(8) == 2 * model.state_size(4)
        return
    assert model.state_size(1) == model.state_size(40) == sum(
        x.numel() for layer in state for x in layer.values() if x.is_floating_point()
    )  # fmt: skip


def test_initialisation_is_that_of_the_decay():
    torch.manual_seed(0)
    model = build("mamba2", hidden_size=64, num_heads=64)
    decay = model.blocks[0].mixer.decay
    rate, step = decay.A_log.exp(), torch.nn.functional.softplus(decay.dt_bias)
    assert (rate >= 1).all()
    assert (rate <= 16).all()
    assert rate.max() > 12
    assert (step >= 0.99e-3).all()
    assert (step <= 0.101).all()


def test_bad_checkpoints_are_clear_errors(tmp_path):
    assert_raises(FileNotFoundError, r"config\.json", checkpoint.load, tmp_path)
    checkpoint.save(build("mamba2"), tmp_path)
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    assert_raises(ValueError, "truncated", checkpoint.load, tmp_path)
    weights.unlink()
    assert_raises(FileNotFoundError, "missing", checkpoint.load, tmp_path)
    weights.write_bytes(whole)
    config = tmp_path / "config.json"
    text = config.read_text()
    config.write_text(text.replace('"format": 1', '"format": 99'))
    assert_raises(ValueError, "format 99", checkpoint.load, tmp_path)
    config.write_text(text[: len(text) // 2])
    assert_raises(ValueError, "truncated or no JSON", checkpoint.load, tmp_path)
    config.write_text(text.replace('"num_layers": 2', '"num_layers": 3'))
    with pytest.raises(ValueError, match="another model") as caught:
        checkpoint.load(tmp_path)
    assert "\n" not in str(caught.value)
    for other, message in (("[]", "no checkpoint of halflife"), ('{"format": 1}', "describes no model")):
        config.write_text(other)
        assert_raises(ValueError, message, checkpoint.load, tmp_path)


def test_config_refuses_what_it_does_not_know():
    data = preset("mamba2", **SIZES).to_dict()
    assert_raises(ValueError, "Did you mean 'num_layers'", ModelConfig.from_dict, {**data, "num_layer": 2})
    assert_raises(ValueError, "no JSON", ModelConfig.from_json, "{")
    with pytest.raises(ValueError, match="needs mixer"):
        ModelConfig.from_dict({"vocab_size": 4, "hidden_size": 4, "num_layers": 1})
    with pytest.raises(ValueError, match="num_layers must be at least 1"):
        dataclasses.replace(preset("mamba2", **SIZES), num_layers=0)
    for name, size in (("intermediate_size", 0), ("intermediate_size", -1), ("vocab_size", "50"), ("hidden_size", 8.0)):
        config = preset("mamba2", **SIZES)
        object.__setattr__(config, name, size)  # a constructor checks types here, and not elsewhere
        assert_raises(ValueError, f"{name} must be at least 1 and a whole number; got", config.__post_init__)
    with pytest.raises(ValueError, match="koopman, koopman_gated, koopman_paper, koopman_gated_paper, rwkv7, none"):
        preset("mamba2", **SIZES, mlp="gelu")
    with pytest.raises(dataclasses.FrozenInstanceError):
        preset("mamba2", **SIZES).hidden_size = 3


@cases(
    "name, message",
    ("mamba9", "Did you mean 'mamba[23]'"),
    ("mamba2+pots", "Did you mean 'post'"),
    ("mamba2+post+post", "given twice"),
    ("mamba2+post+post_norm", "exclude each other"),
    ("simple+scalar+vector", "exclude each other"),
    ("simple+share+scalar", "scalar and share exclude each other"),
    ("gla+vector+post", "post and vector exclude each other"),
    ("retnet+lrpe+post_paper", "post_paper and lrpe exclude each other"),
    ("mamba2+ska+attention", "attention and ska exclude each other .* one other mixer"),
    ("echo+ska", "echo has ska in some layers already"),
    ("echo+attention", "echo has ska in some layers already"),
    ("echo+koopman_mlp", "echo has Koopman MLPs already"),
    ("llama+attention", "every layer of llama is softmax attention"),
    ("", "unknown preset"),
)
def test_grammar_errors(name, message):
    assert_raises(ValueError, message, preset, name, **SIZES)


@pytest.mark.parametrize("name", ["echo", "mamba2+ska", "rwkv7+ska", "simple+attention"])
def test_layers_of_a_hybrid(name):
    """One layer in twelve is replaced, never the first, whose values RWKV-7 uses, and the last only of two layers."""
    for depth in (2, 3, 4, 11, 12, 23, 24, 25, 40, 60):
        where = preset(name, **{**SIZES, "num_layers": depth}).hybrid["layers"]
        gaps = {b - a for a, b in pairwise([0, *where, depth])}
        assert len(where) == max(1, depth // 12)
        assert max(gaps) - min(gaps) <= 1
        assert (where[0] > 0, where[-1] < depth - 1) == (True, depth > 2)
    assert_raises(ValueError, "at least two", preset, name, **{**SIZES, "num_layers": 1})


def test_heads_of_a_hybrid():
    """Every mixer has the requested heads. By default a head has 64 channels, and Mamba-2 has twice as many heads."""
    for heads, expected in ((4, (4, 4)), (None, (8, 4))):
        model = LanguageModel(preset("mamba2+ska", **{**SIZES, "hidden_size": 256, "num_heads": heads}))
        assert tuple(block.mixer.num_heads for block in model.blocks) == expected


def test_rwkv7_keeps_its_value_residual_around_other_layers():
    model = build("rwkv7+ska", num_layers=3)
    assert [type(block.mixer).__name__ for block in model.blocks] == ["RWKV7", "SKA", "RWKV7"]
    given, values = [], []
    model.blocks[0].mixer.v_proj.register_forward_hook(lambda _, inputs, v: values.append(v))
    model.blocks[2].mixer.register_forward_pre_hook(lambda _, x, named: given.append(named["shared"]), with_kwargs=True)
    model(torch.randint(SIZES["vocab_size"], (1, 5)))
    assert given[0]["value"] is values[0]


def test_model_errors():
    model = build("mamba2")
    assert_raises(ValueError, r"\[B, T\]", model, torch.zeros(3, dtype=torch.long))
    assert_raises(ValueError, "integers", model, torch.zeros(1, 3))
    assert_raises(ValueError, "1 layers; the model has 2", model, torch.zeros(1, 3, dtype=torch.long), state=({},))
    ids = torch.zeros(1, 3, dtype=torch.long)
    assert_raises(ValueError, "not both", model, ids, cu_seqlens=torch.tensor([0, 3]), attention_mask=torch.ones(1, 3))


def test_modifiers_and_presets_are_described():
    assert all(registry.summary(name).endswith((".", ")")) for registry in (PRESETS, MODIFIERS) for name in registry)
    assert halflife.__version__


@pytest.mark.slow
def test_the_docs_list_every_pair_that_is_refused():
    text = (Path(__file__).parent.parent / "docs" / "design-space.md").read_text()
    listed = set(re.findall(r"`(\w+\+\w+)`", text.split("and is refused")[1])) - {"gla+post"}
    refused = [name for base in PRESETS for name in combinations(base)[1]]
    assert listed == {name for name in refused if name.count("+") == 1}


@pytest.mark.parametrize("name", ["mamba2", "gla", "llama", "mamba2+attention", "mamba2 without MLPs"])
def test_the_sum_at_the_end_of_a_block_joins_the_next_norm(name, monkeypatch):
    """As on a GPU: values, states and gradients are equal to the bit."""
    name, _, rest = name.partition(" ")
    model, ids = build(name, **({"mlp": "none"} if rest else {})), torch.randint(SIZES["vocab_size"], (2, 9))

    def run():
        model.zero_grad()
        logits, state = model(ids)
        logits.square().sum().backward()
        states = {f"{i}.{key}": x for i, layer in enumerate(state) for key, x in layer.items()}
        return {"": logits, **states, **{key: x.grad for key, x in model.named_parameters()}}

    plain, sums = run(), []
    add = fused.add_rms_norm
    monkeypatch.setattr(fused, "add_rms_norm", lambda *given: sums.append(given) or add(*given))
    monkeypatch.setattr(LanguageModel, "_joins", lambda self, x: True)
    assert_same(run(), plain)
    assert len(sums) == len(model.blocks)  # all but the first take a sum, and so does the last norm


def test_who_watches_a_block_sees_its_whole_output():
    model, x = build("mamba2"), torch.empty(1, device="meta")
    assert model._joins(x)
    assert not model._joins(torch.empty(1))
    hook = model.blocks[0].register_forward_hook(lambda *_: None)
    assert not model._joins(x)
    hook.remove()
    model.blocks[1].forward = model.blocks[1].forward
    assert not model._joins(x)
    assert not build("mamba2", norm="rms_plus_one")._joins(x)  # such norms add nothing


HOOKS = {
    "forward": nn.Module.register_forward_hook,
    "backward": nn.Module.register_full_backward_hook,
    "every": lambda _, hook: register_module_forward_hook(hook),
}


@pytest.mark.filterwarnings("ignore:Full backward hook")  # of modules whose inputs want no gradients
@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("name", ["mamba2", "rwkv7"])
def test_hooks_see_on_a_gpu_what_they_see_on_a_cpu(name, kind, monkeypatch):
    """No kernel computes a map or a norm in the place of a module that is watched, or of any if all are."""
    model, ids = build(name), torch.randint(SIZES["vocab_size"], (2, 9))
    watched = {module: key for key, module in model.named_modules() if key != "embedding" and not [*module.children()]}
    seen = set()
    handles = [HOOKS[kind](module, lambda module, *_: seen.add(watched.get(module))) for module in watched]

    def run():
        seen.clear()
        model(ids)[0].sum().backward()
        return {*seen}

    expected = run()
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    found = run()
    for handle in handles:
        handle.remove()
    assert found == expected
