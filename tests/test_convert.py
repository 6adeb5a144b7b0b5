"""Conversion of transformers' weights in both directions, compared with transformers itself; folders; errors; CLI."""

import json
import re

import pytest
import torch
import torch.nn.functional as F
from foreign_models import mixer_of
from helpers import assert_close, assert_raises, assert_same, cases, unchecked
from safetensors.torch import load_file, save_file
from test_convert_fla import published
from transformers import AutoModelForCausalLM, Mamba2Config, Mamba2ForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from halflife import LanguageModel, preset
from halflife.cli import main
from halflife.models import checkpoint
from halflife.models.convert import SOURCES, convert
from halflife.models.load import load_any

LENGTH, VOCABULARY = 33, 50

# Relative to the largest entry: four times the worst difference over four seeds. Both sides compute in float32.
TOLERANCE = 4 * 9.3e-7


def randomise(module):
    """Replace the weights that are 1 or 0, because these would hide a term."""
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module.eval()


def mamba2(folder, dtype=torch.float32, shards="1GB", **options):
    """Build a small Mamba-2 with transformers and save it with transformers."""
    options = {"n_groups": 2, "tie_word_embeddings": False, **options}
    model = Mamba2ForCausalLM(Mamba2Config(
        vocab_size=VOCABULARY, hidden_size=32, num_heads=8, head_dim=8, state_size=16, num_hidden_layers=2,
        layer_norm_epsilon=1e-4, **options,
    ))  # fmt: skip
    model = randomise(model).to(dtype)
    model.save_pretrained(folder, max_shard_size=shards)
    return model


def ids():
    return torch.randint(VOCABULARY, (2, LENGTH))


def edit(file, **changes):
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_mamba2_in_bfloat16(tmp_path):
    """Decays become float32. Written in bfloat16 again, the weights agree to the bit, and so do the logits."""
    theirs = mamba2(tmp_path / "in", torch.bfloat16)
    convert(tmp_path / "in", tmp_path / "ours")
    folder = convert(tmp_path / "ours", tmp_path / "back", to="transformers")
    after = load_file(folder / "model.safetensors")
    wide = {name for name in after if name.endswith(("A_log", "dt_bias", ".D"))}
    assert {name for name in after if after[name].dtype == torch.float32} == wide
    assert_same({name: x.bfloat16() for name, x in after.items()}, load_file(tmp_path / "in" / "model.safetensors"))
    back, tokens = AutoModelForCausalLM.from_pretrained(folder), ids()
    assert back.dtype == torch.bfloat16
    assert_same(back(tokens).logits, theirs(tokens).logits)


def test_shards_are_read_like_one_file(tmp_path):
    mamba2(tmp_path / "in", shards="20KB")
    assert len(list((tmp_path / "in").glob("model-*.safetensors"))) > 2
    torch.manual_seed(0)
    mamba2(tmp_path / "whole")
    sharded, whole = (convert(tmp_path / name, tmp_path / f"{name}-out") for name in ("in", "whole"))
    assert_same(load_file(sharded / "model.safetensors"), load_file(whole / "model.safetensors"))


def test_settings_that_transformers_ignores_are_ignored(tmp_path):
    """norm_before_gate, which Mamba-Codestral sets, has no effect. A tied head may be stored a second time."""
    theirs, source = mamba2(tmp_path / "in", tie_word_embeddings=True), tmp_path / "in"
    edit(source / "config.json", norm_before_gate=True, time_step_limit=[0.0, float("inf")])
    weights = load_file(source / "model.safetensors")
    save_file(
        {**weights, "lm_head.weight": weights["backbone.embeddings.weight"].clone()}, source / "model.safetensors"
    )
    tokens = ids()
    assert_close(checkpoint.load(convert(source, tmp_path / "out"))(tokens)[0], theirs(tokens).logits, TOLERANCE)
    save_file({**weights, "lm_head.weight": weights["backbone.embeddings.weight"] + 1}, source / "model.safetensors")
    assert_raises(ValueError, r"ties the embeddings, but lm_head\.weight", convert, source, tmp_path / "again")


def test_mamba2_of_fla(tmp_path):
    """fla's has the kind and tensors of transformers', and other names of settings. Its gate may follow the norm."""
    theirs, source = mamba2(tmp_path / "in", time_step_limit=[0.01, 0.05]), tmp_path / "in"
    config = json.loads((source / "config.json").read_text())
    names = {"layer_norm_epsilon": "norm_eps", "time_step_limit": "dt_limit"}
    config = {names.get(name, name): value for name, value in config.items()} | {"rmsnorm": True}
    (source / "config.json").write_text(json.dumps({**config, "norm_before_gate": False}))
    tokens, model = ids(), checkpoint.load(convert(source, tmp_path / "out"))
    assert_close(model(tokens)[0], theirs(tokens).logits, TOLERANCE)
    edit(source / "config.json", norm_before_gate=True)
    before = checkpoint.load(convert(source, tmp_path / "before"))
    mixer = before.blocks[0].mixer
    assert [type(block.mixer.norm).__name__ for block in before.blocks] == ["NormBeforeGate"] * 2
    y, z = torch.randn(2, 1, 3, 64)
    normed = F.rms_norm(y.view(1, 3, 2, 32), (32,), eps=1e-4).flatten(-2) * mixer.norm.weight
    assert_close(mixer.norm(y, z), normed * F.silu(z), TOLERANCE)
    edit(source / "config.json", rmsnorm=False)
    assert_raises(ValueError, "rms_norm", convert, source, tmp_path / "none")


@cases(
    "setting, value",
    ("use_bias", True),
    ("use_conv_bias", False),
    ("hidden_act", "gelu"),
    ("rms_norm", False),
    ("expand", 4),
)
def test_settings_that_we_do_not_have_are_refused(setting, value, tmp_path):
    mamba2(tmp_path / "in")
    edit(tmp_path / "in" / "config.json", **{setting: value})
    assert_raises(ValueError, setting, convert, tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@cases(
    "name, options, message",
    ("mamba2", {"mlp": "swiglu"}, "mlp 'none'"),
    ("mamba2", {"norm": "layer"}, "norm 'rms'"),
    ("mamba2", {"embedding_norm": True}, "embedding_norm False"),
    ("mamba2+tpe", {}, "position 'none'"),
    ("mamba2", {"norm_eps": 1e-6}, "has eps = 1e-06 in blocks.0.mixer.norm; this model has 1e-05"),
    ("mamba2", {"mixer_options": {"decay": "mamba2_no_a"}}, "Mamba2Decay as blocks.0.mixer.decay"),
    ("mamba2", {"mixer_options": {"head_dim": 5}}, "expand"),
    ("mamba2+post", {}, "Mamba2Decay as blocks.0.mixer.decay; this model has PoST"),
    ("mamba2", {"mixer_options": {"output_norm": "none"}}, "mixer.norm; this model has GateWithoutNorm"),
    (
        "mamba2",
        {"mixer_options": {"num_heads": 2, "norm_per_head": True}},
        "has groups = 1 in blocks.0.mixer.norm; this model has 2",
    ),
    ("gla", {}, "mixer 'mamba2' only"),
)
def test_models_that_transformers_does_not_have_are_refused(name, options, message, tmp_path):
    config = preset(name, **{"hidden_size": 16, "num_layers": 1, "mlp": "none", **options})
    checkpoint.save(LanguageModel(config), tmp_path / "ours")
    assert_raises(ValueError, message, convert, tmp_path / "ours", tmp_path / "out", to="transformers")
    assert not (tmp_path / "out").exists()


def qwen(folder, key_heads=2, value_heads=4):
    model = randomise(Qwen3NextForCausalLM(Qwen3NextConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, linear_num_key_heads=key_heads, linear_num_value_heads=value_heads, linear_key_head_dim=8,
        linear_value_head_dim=6, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8,
        shared_expert_intermediate_size=8, intermediate_size=16, rms_norm_eps=1e-4,
    )))  # fmt: skip
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(("key_heads", "value_heads"), [(2, 4), (4, 4), (1, 2)])
def test_qwen3_nexts_mixer_equals_transformers(key_heads, value_heads, tmp_path, monkeypatch):
    plain = unchecked(qwen3_next.torch_chunk_gated_delta_rule)  # otherwise transformers calls fla's Triton kernel
    monkeypatch.setattr(qwen3_next, "torch_chunk_gated_delta_rule", plain)
    theirs = qwen(tmp_path / "in", key_heads, value_heads)
    ours = mixer_of(tmp_path / "in", 1)
    x = torch.randn(2, LENGTH, 32)
    expected = theirs.model.layers[1].linear_attn(x)
    assert_close(ours(x)[0], expected, TOLERANCE)


def test_qwen3_nexts_other_parts_are_refused(tmp_path):
    source, out = tmp_path / "in", tmp_path / "out"
    qwen(source)
    assert_raises(ValueError, "read it in place", load_any, source)
    assert_raises(ValueError, r"a qwen3_next has layers that halflife lacks", convert, source, out)
    message = "layer 3 has no mixer with a decay; the layers with one are 0, 1, 2"
    assert_raises(ValueError, message, mixer_of, source, 3)
    edit(source / "config.json", linear_num_value_heads=3)
    assert_raises(ValueError, "linear_num_value_heads", mixer_of, source, 1)
    assert not out.exists()


def gla(folder, weights=lambda weights: weights, **changes):
    config, tensors = published("gla", torch.float32)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    save_file(weights(tensors), folder / "model.safetensors")
    return folder


LAST = "model.layers.1.attn.o_proj.weight"
BROKEN = [
    (lambda x: {n: y for n, y in x.items() if n != LAST}, rf"{LAST} is missing"),
    (lambda x: {**x, "model.layers.1.attn.D": torch.ones(4)}, r"model\.layers\.1\.attn\.D is unknown"),
    (lambda x: {**x, LAST: x[LAST][:5].clone()}, rf"{LAST} is \[5, 32\] instead of \[32, 32\]"),
    (lambda x: {**x, LAST: x[LAST].char()}, rf"{LAST} is torch\.int8 instead of a float"),
    (lambda x: {"a": x[LAST]}, r"is missing; .* more$"),
]


@pytest.mark.parametrize(("weights", "message"), BROKEN)
def test_weights_that_do_not_fit_are_named(weights, message, tmp_path):
    assert_raises(ValueError, message, convert, gla(tmp_path / "in", weights), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def no_weights(folder):
    (folder / "model.safetensors").unlink()


def pickle(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def truncated(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:2000])


def index(weight_map):
    def write(folder):
        (folder / "model.safetensors").rename(folder / "shard.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return write


WRONG = [
    (lambda folder: (folder / "config.json").unlink(), FileNotFoundError, r"config\.json"),
    (lambda folder: (folder / "config.json").write_text("[]"), ValueError, "no JSON object"),
    (lambda folder: (folder / "config.json").write_text("{"), ValueError, "truncated or no JSON"),
    (
        lambda folder: edit(folder / "config.json", model_type="gpt2"),
        ValueError,
        "gla, gated_deltanet, kda, delta_net, gated_deltaproduct, comba, retnet, qwen3_5_text, qwen3_5, olmo_hybrid, "
        "mamba2, mamba3, rwkv7",
    ),
    (lambda folder: edit(folder / "config.json", model_type=["gla"]), ValueError, "Choose from: gla"),
    (lambda folder: edit(folder / "config.json", format=1), ValueError, "already"),
    (no_weights, FileNotFoundError, r"model\.safetensors is missing"),
    (pickle, ValueError, r"pytorch_model\.bin, a pickle"),
    (truncated, ValueError, "truncated or no safetensors"),
    (index({LAST: "shard.safetensors"}), ValueError, "do not agree"),
    (index({LAST: "absent.safetensors"}), FileNotFoundError, r"absent\.safetensors is missing"),
    (index(None), ValueError, "no weight_map"),
]


@pytest.mark.parametrize(("damage", "error", "message"), WRONG)
def test_folders_that_are_wrong(damage, error, message, tmp_path):
    damage(gla(tmp_path / "in"))
    assert_raises(error, message, convert, tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_was_asked_for_makes_no_sense(tmp_path):
    source = gla(tmp_path / "in")
    assert_raises(ValueError, "mixers are taken of qwen3_next, .*; got a gla", mixer_of, source, 0)
    assert_raises(ValueError, "Choose from: halflife, transformers, fla", convert, source, tmp_path / "out", to="jax")
    assert_raises(ValueError, "only a halflife checkpoint", convert, source, tmp_path / "out", to="transformers")
    assert_raises(FileExistsError, r"config\.json already", convert, source, source)
    (source / "config.json").write_text('{"d_model": 16, "ssm_cfg": {"layer": "Mamba2"}}')  # as of mamba-ssm
    assert_raises(ValueError, "a model without a model_type, .* one of halflife, gla", load_any, source)


def test_command(tmp_path, capsys, refused):
    source, out = gla(tmp_path / "in"), tmp_path / "out"
    main(["convert", str(source), str(out)])
    assert str(out) in capsys.readouterr().out
    assert sorted(file.name for file in out.iterdir()) == ["config.json", "model.safetensors"]
    model = checkpoint.load(out)
    direct, weights = SOURCES["gla"](
        json.loads((source / "config.json").read_text()), load_file(source / "model.safetensors")
    )
    assert model.config == direct
    assert_same(model.state_dict(), weights)
    refused("convert", str(source), str(out))


def test_the_help_names_every_kind(capsys):
    with pytest.raises(SystemExit):
        main(["convert", "--help"])
    words = set(re.findall(r"\w+", capsys.readouterr().out))
    mixers = [SOURCES[name].mixer or name for name in SOURCES if SOURCES[name].library == "fla"]
    assert {*SOURCES, *mixers} <= words


def test_the_folder_of_a_comparison_names_one_of_its_models(tmp_path):
    (run := tmp_path / "runs" / "retnet" / "lr0.01-seed0").mkdir(parents=True)
    (tmp_path / "runs" / "config.json").write_text('{"models": ["retnet"]}')
    (run / "model.safetensors").touch()
    assert_raises(ValueError, f"such as {run}", load_any, tmp_path / "runs")
    assert_raises(ValueError, f"such as {run}", convert, tmp_path / "runs", tmp_path / "out")
