"""Conversion of transformers' and fla's models in both directions, and of single mixers of transformers."""

import dataclasses
import json

import pytest
import torch
from foreign_models import LAWS, OPTIONS, VOCAB, build, mixer_of
from helpers import assert_close, assert_raises, assert_same, cases
from safetensors.torch import load_file, save_file
from test_convert_fla import VARIANTS, published
from test_convert_later import mamba3
from transformers import AutoModelForCausalLM

from halflife import LanguageModel, preset
from halflife.analysis.foreign.model import runnable_kernels
from halflife.hf import HalflifeForCausalLM
from halflife.models import checkpoint
from halflife.models.convert import SOURCES, assemble, back_to, convert
from halflife.models.convert.rules import join_convolutions
from halflife.models.load import load_any

LENGTH = 33
# Relative to the largest entry: four times the worst difference over four seeds. Both sides compute in float32.
TOLERANCE = 4 * 3.0e-6
MIXER = 4 * 8.2e-7


def saved(kind, folder, seed=0, **options):
    model = build(kind, seed, **options)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.add_(0.3 * torch.randn_like(weight))
    model.save_pretrained(folder)
    return model


def logits(model, ids):
    with torch.no_grad(), runnable_kernels(model):
        return model(input_ids=ids).logits


def edit(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def tensors(folder):
    return join_convolutions(load_file(folder / "model.safetensors"))


ROPE = {"rope_type": "default", "rope_theta": 1e6}
NO_ROPE = {"rope_type": "default", "rope_theta": None}
MAMBA2 = {"time_step_limit": (0.0, float("inf")), "chunk_size": 256}
WHOLE = [
    ("mamba2", MAMBA2),
    ("mamba2", {**MAMBA2, "n_groups": 1, "tie_word_embeddings": True}),
    ("qwen3_5_text", {}),
    ("mamba2", {**MAMBA2, "time_step_limit": (0.3, 0.6)}),
    ("mamba2", {**MAMBA2, "time_step_limit": (0.6, float("inf"))}),
    ("olmo_hybrid", {}),
    ("qwen3_5_text", {"tie_word_embeddings": True, "head_dim": 16, "linear_num_key_heads": 4}),
    ("qwen3_5_text", {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}}),
    ("olmo_hybrid", {"rope_parameters": NO_ROPE, "linear_allow_neg_eigval": False, "linear_num_key_heads": 1}),
]


@cases("kind, options", *WHOLE)
def test_there_and_back(kind, options, tmp_path):
    """Logits equal those of transformers, in one piece and in two. The way back gives the same file."""
    theirs = saved(kind, tmp_path / "in", **options)
    ours = checkpoint.load(convert(tmp_path / "in", tmp_path / "ours")).eval()
    ids = torch.randint(VOCAB, (2, LENGTH))
    expected = logits(theirs, ids)
    with torch.no_grad():
        assert_close(ours(ids)[0], expected, TOLERANCE)
        _, state = ours(ids[:, :20])
        assert_close(ours(ids[:, 20:], state)[0], expected[:, 20:], TOLERANCE)
    back = convert(tmp_path / "ours", tmp_path / "back", to="transformers")
    assert_same(tensors(back), tensors(tmp_path / "in"))
    again = AutoModelForCausalLM.from_pretrained(back).eval()
    assert type(again) is type(theirs)
    assert_same(logits(again, ids), expected)
    ignored = {"_name_or_path", "max_position_embeddings"}
    first, second = ({k: x for k, x in m.config.to_dict().items() if k not in ignored} for m in (theirs, again))
    assert first == second
    where = HalflifeForCausalLM.from_pretrained(tmp_path / "ours").config
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        assert getattr(where, name) == first[name]
    files = [tmp_path / folder / "generation_config.json" for folder in ("in", "ours", "back")]
    assert len({file.read_bytes() for file in files}) == 1


@cases(
    "kind, rope",
    ("qwen3_5_text", None),
    ("qwen3_5_text", {"rope_theta": 50.0}),
    ("qwen3_5_text", {"partial_rotary_factor": 0.5}),
    ("olmo_hybrid", None),
    ("olmo_hybrid", {"rope_theta": 50.0, "partial_rotary_factor": 0.5}),
)
def test_settings_of_rope_that_are_missing_are_those_of_transformers(kind, rope, tmp_path):
    saved(kind, tmp_path)
    edit(tmp_path, rope_parameters=rope)
    ids = torch.randint(VOCAB, (1, LENGTH))
    with torch.no_grad():
        ours = load_any(tmp_path).eval()(ids)[0]
    assert_close(ours, logits(AutoModelForCausalLM.from_pretrained(tmp_path).eval(), ids), TOLERANCE)


def test_qwen3_5_in_bfloat16_and_with_images(tmp_path):
    """The text model of a checkpoint that also holds a tower for images and a head for several tokens."""
    theirs = saved("qwen3_5_text", tmp_path / "text").bfloat16()
    weights = {name.replace("model.", "model.language_model."): x for name, x in theirs.state_dict().items()}
    extra = {"model.visual.a": torch.ones(2), "mtp.b": torch.ones(2)}
    (tmp_path / "in").mkdir()
    save_file({**weights, **extra}, tmp_path / "in" / "model.safetensors")
    text = json.loads((tmp_path / "text" / "config.json").read_text())
    (tmp_path / "in" / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": text}))
    convert(tmp_path / "in", tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "back", to="transformers")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert_same({name: x.bfloat16() for name, x in back.items()}, theirs.state_dict())


@cases(
    "kind, changes, message",
    ("qwen3_5_text", {"hidden_act": "gelu"}, "hidden_act = gelu"),
    ("qwen3_5_text", {"attention_bias": True}, "attention_bias"),
    ("qwen3_5_text", {"layer_types": ["linear_attention"] * 3 + ["sliding_attention"]}, "sliding_attention"),
    ("qwen3_5_text", {"layer_types": ["linear_attention"]}, "has 1 layers"),
    ("qwen3_5_text", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_parameters = .*yarn"),
    ("olmo_hybrid", {"logit_softcapping": 3.0}, "unknown settings.*: logit_softcapping"),
    ("olmo_hybrid", {"linear_num_key_heads": 3}, "linear_num_value_heads / linear_num_key_heads"),
)
def test_what_cannot_be_represented_is_named(kind, changes, message, tmp_path):
    config = {**OPTIONS[kind], **changes}
    assert_raises(ValueError, message, SOURCES[kind], config, {})


@cases(
    "name, options, message",
    ("gla", {}, "mixer 'mamba2' only, and for hybrids of .*this one has gla"),
    ("gated_deltanet", {}, "this one has gated_deltanet"),
    ("gated_deltanet+attention:1", {}, "OLMo Hybrid has norms_after = True in blocks.1; this model has False"),
    ("gated_deltanet+post+attention:1", {}, "Mamba2Decay as blocks.0.mixer.decay; this model has PoST"),
    ("gated_deltanet+attention:1", {"norm": "rms_plus_one"}, r"Qwen3.5 has splits = .16, 16, 16, 16. in"),
    ("gated_deltanet+attention:1", {"mlp": "koopman"}, "OLMo Hybrid has mlp 'swiglu'; this model has 'koopman'"),
)
def test_models_without_a_place_are_refused(name, options, message, tmp_path):
    config = preset(name, hidden_size=16, num_layers=2, num_heads=2, train_length=8, **options)
    checkpoint.save(LanguageModel(config), tmp_path / "ours")
    assert_raises(ValueError, message, convert, tmp_path / "ours", tmp_path / "out", to="transformers")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("groups", [2, 4])
def test_groups_of_queries_are_kept(groups, tmp_path):
    """A converted model shares queries as the original does; one whose heads have a query each has as many groups."""
    saved("qwen3_5_text", tmp_path / "in")
    ours = checkpoint.load(convert(tmp_path / "in", tmp_path / "ours"))
    assert ours.config.mixer_options["num_key_heads"] == 2
    if groups == 4:
        options = {name: x for name, x in ours.config.mixer_options.items() if name != "num_key_heads"}
        ours = LanguageModel(dataclasses.replace(ours.config, mixer_options=options))
    checkpoint.save(ours, tmp_path / "trained")
    convert(tmp_path / "trained", tmp_path / "back", to="transformers")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "back").eval()
    assert again.config.linear_num_key_heads == groups
    ids = torch.randint(VOCAB, (2, LENGTH))
    with torch.no_grad():
        assert_close(logits(again, ids), ours(ids)[0], TOLERANCE)


MIXERS = [
    ("qwen3_5_moe_text", {}), ("kimi_linear", {}), ("bamba", {"time_step_limit": (0.3, 0.6)}), ("granitemoehybrid", {}),
    ("nemotron_h", {"time_step_min": 0.6}), ("zamba2", {"time_step_min": 0.6}), ("falcon_h1", {}),
    ("falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": True}),
    ("falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_n_groups": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "options"), MIXERS)
def test_a_mixer_equals_that_of_transformers(kind, options, tmp_path):
    theirs = saved(kind, tmp_path / "in", **options)
    assert_raises(ValueError, f"a {kind} has layers that halflife lacks", convert, tmp_path / "in", tmp_path / "whole")
    ours = mixer_of(tmp_path / "in", 0).eval()
    decoder = theirs.get_decoder()
    mixer = decoder.layers[0].get_submodule(LAWS[kind][0])
    x = torch.randn(2, LENGTH, 32)
    with torch.no_grad(), runnable_kernels(theirs):
        expected = mixer(x)
        assert_close(ours(x)[0], expected[0] if isinstance(expected, tuple) else expected, MIXER)
    assert_raises(ValueError, "layer 9 has no mixer with a decay; .* are 0", mixer_of, tmp_path / "in", 9)


MIMO = {"is_mimo": True, "is_outproj_norm": True, "rope_fraction": 1.0}
CASES = [(name, changes) for name, changes in VARIANTS if changes.get("fuse_norm", True)]
CASES += [("mamba3", {}), ("mamba3", MIMO)]


@pytest.mark.parametrize(("kind", "changes"), CASES)
def test_fla_there_and_back(kind, changes):
    config, weights = mamba3(**changes) if kind == "mamba3" else published(kind, **changes)
    model = assemble(*SOURCES[kind](config, weights))
    their_config, back = back_to("fla", model)
    assert_same({name: x.to(weights[name].dtype) for name, x in back.items()}, weights)
    again, tensors = SOURCES[kind](their_config, back)
    ids = torch.randint(19, (2, 9))
    assert_same(assemble(again, tensors)(ids)[0], model(ids)[0])


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
    (
        "mamba2",
        {},
        "for mixers gla, gated_deltanet, kda, deltanet, deltaproduct, comba, retnet, mamba3, rwkv7; this .* 'mamba2'",
    ),
    ("gated_deltanet+post", {}, "fla's gated_deltanet has Mamba2Decay as blocks.0.mixer.decay; this model has PoST"),
    ("gated_deltanet", {"mlp": "koopman"}, "fla's gated_deltanet has mlp 'swiglu'; this model has 'koopman'"),
    ("mamba3+post", {"mlp": "none"}, "rates that depend on the input .rate_floor.*this model has rate_floor None"),
    ("gated_deltanet", {"mixer_options": {"conv_size": 0}}, "use_short_conv = False"),
    ("gla", {"mixer_options": {"decay_options": {"tau": 8.0}}}, "tau = 16.0 in blocks.0.mixer.decay; .* has 8.0"),
    ("gla", {"mixer_options": {"decay_rank": 8}}, "in blocks.0.mixer.decay_proj.down"),
    ("rwkv7+post", {}, "RWKV7Decay as blocks.0.mixer.decay; this model has PoST"),
)
def test_models_that_fla_lacks_are_refused(name, options, message):
    model = LanguageModel(preset(name, hidden_size=16, num_layers=1, num_heads=2, train_length=8, **options))
    assert_raises(ValueError, message, back_to, "fla", model)
