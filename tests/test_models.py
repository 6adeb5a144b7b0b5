"""Configurations, presets and the language model: JSON both ways, grammar, state, initialisation, checkpoints."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from combinations import SIZES, combinations

import halflife
from halflife import LanguageModel, ModelConfig, param_groups, preset
from halflife.models import MODIFIERS, PRESETS, io

MEANINGFUL, MEANINGLESS = combinations()


def build(name, **options):
    return LanguageModel(preset(name, **{**SIZES, **options}))


def test_every_base_and_many_modifiers_have_a_meaning():
    assert set(PRESETS) <= set(MEANINGFUL)
    assert {"mamba2+post", "gated_deltanet+post", "retnet+post", "gla+post", "simple+post+rope"} <= set(MEANINGFUL)
    assert {"llama+post", "mamba2+vector", "hgrn2+post", "retnet+vector", "deltanet+share"} <= set(MEANINGLESS)


@pytest.mark.parametrize("name", MEANINGLESS)
def test_a_combination_without_meaning_says_why(name):
    with pytest.raises(ValueError, match=r".{20,}"):
        preset(name, **SIZES)


@pytest.mark.parametrize("name", MEANINGFUL)
def test_builds_runs_and_survives_json_and_the_meta_device(name):
    config = preset(name, **SIZES)
    assert ModelConfig.from_json(config.to_json()) == config
    with torch.device("meta"):
        model = LanguageModel(config)
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    model.reset_parameters()
    torch.manual_seed(3)
    direct = LanguageModel(config)
    torch.manual_seed(3)
    direct.reset_parameters()
    # The same draws, whichever way it was made; calling it again is a fresh draw of the same law.
    assert all(
        torch.equal(a, b) for a, b in zip(model.state_dict().values(), direct.state_dict().values(), strict=True)
    )
    logits, state = model(torch.randint(SIZES["vocab_size"], (2, 9)))
    assert logits.shape == (2, 9, SIZES["vocab_size"])
    assert torch.isfinite(logits).all()
    assert len(state) == SIZES["num_layers"] + (config.position == "tpe")


@pytest.mark.parametrize("name", PRESETS)
def test_streams_packs_and_pads(name):
    model = build(name).double()
    ids = torch.randint(SIZES["vocab_size"], (3, 21))
    whole, final = model(ids)
    for cuts in ([8], [1, 2, 20]):
        state, pieces = None, []
        for piece in ids.tensor_split(cuts, dim=1):
            logits, state = model(piece, state)
            pieces.append(logits)
        torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-10, atol=1e-12)
        for a, b in zip(state, final, strict=True):
            assert a.keys() == b.keys()
            assert all(torch.allclose(a[key], b[key], atol=1e-12) for key in a)
    lengths = torch.tensor([21, 5, 12])
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    packed = torch.cat([row[:n] for row, n in zip(ids, lengths, strict=True)]).unsqueeze(0)
    packed_logits, packed_state = model(packed, cu_seqlens=cu_seqlens)
    right = torch.arange(21) < lengths.unsqueeze(1)
    for mask, shifted in (
        (right, ids),
        (right.flip(1), torch.stack([r.roll(21 - int(n)) for r, n in zip(ids, lengths, strict=True)])),
    ):
        logits, state = model(shifted, attention_mask=mask)
        torch.testing.assert_close(logits[mask], packed_logits[0], rtol=1e-10, atol=1e-12)
        assert (logits[~mask] == 0).all()
        torch.testing.assert_close(state[-1]["position"], packed_state[-1]["position"])
    for i, n in enumerate(lengths):
        alone, _ = model(ids[i : i + 1, :n])
        torch.testing.assert_close(packed_logits[:, cu_seqlens[i] : cu_seqlens[i + 1]], alone, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["mamba2+post", "gated_deltanet", "simple+vector", "llama"])
def test_learns_sixteen_sequences_by_heart(name):
    model = build(name, mlp="swiglu")
    ids = torch.randint(SIZES["vocab_size"], (16, 12))
    optimizer = torch.optim.AdamW(param_groups(model, 0.0), lr=1e-2)
    for _ in range(120):
        logits, _ = model(ids[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.6  # the first tokens cannot be known


@pytest.mark.parametrize("name", PRESETS)
def test_state_is_float32_and_of_constant_size(name):
    model = build(name).bfloat16()
    ids = torch.randint(SIZES["vocab_size"], (1, 5))
    logits, state = model(ids)
    assert logits.dtype == torch.bfloat16
    if name == "llama":
        assert model.state_floats(8) == 2 * model.state_floats(4)
        return
    assert all(layer["memory"].dtype == torch.float32 for layer in state)
    assert model.state_floats(1) == model.state_floats(40) == sum(
        x.numel() for layer in state for key, x in layer.items() if not key.endswith("position")
    )  # fmt: skip


def test_decay_parameters_stay_float32_and_get_no_weight_decay():
    model = build("mamba2+post").bfloat16()
    names = {name: p for name, p in model.named_parameters() if ".decay." in name or ".skip." in name}
    assert {p.dtype for p in names.values()} == {torch.float32}
    assert len(names) >= 8
    with_decay, without = param_groups(model, 0.1)
    assert with_decay["weight_decay"] == 0.1
    assert without["weight_decay"] == 0
    spared = {id(p) for p in without["params"]}
    assert all(id(p) in spared for p in names.values())
    assert all(id(p) in spared for p in model.parameters() if p.ndim < 2)
    assert id(model.embedding.weight) not in spared
    assert len(with_decay["params"]) + len(without["params"]) == len(list(model.parameters()))
    vector = build("simple+vector")
    delta = vector.blocks[0].mixer.decay.delta
    assert delta.ndim == 2
    assert id(delta) in {id(p) for p in param_groups(vector, 0.1)[1]["params"]}


def test_initialisation_is_that_of_the_decay_not_of_the_framework():
    """The decay keeps its own law inside the model: nothing draws over it."""
    torch.manual_seed(0)
    model = build("mamba2", hidden_size=64, num_heads=64)
    decay = model.blocks[0].mixer.decay
    rate, step = decay.A_log.exp(), torch.nn.functional.softplus(decay.dt_bias)
    assert (rate >= 1).all()
    assert (rate <= 16).all()
    assert rate.max() > 12
    assert (step >= 0.99e-3).all()
    assert (step <= 0.101).all()


COMPILED = """
import sys, torch
sys.path.insert(0, {tests!r})
from combinations import SIZES
from halflife import LanguageModel, preset
torch.manual_seed(0)
model = LanguageModel(preset({name!r}, **{{**SIZES, "num_layers": 1}}))
ids = torch.randint(31, (2, 16))
compiled = torch.compile(model, backend={backend!r})
grads = []
for run in (compiled, model):
    model.zero_grad()
    logits = run(ids)[0]
    logits.square().sum().backward()
    grads.append((logits, *(p.grad.clone() for p in model.parameters())))
for a, b in zip(*grads):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
"""


@pytest.mark.parametrize("name", ["mamba2+post", "gated_deltanet"])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_equals_eager(name, backend):
    """In a process of its own: the shape checks that pytest switches on are nothing that a compiler could trace."""
    code = COMPILED.format(tests=str(Path(__file__).parent), name=name, backend=backend)
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_checkpoints_round_trip(tmp_path):
    model = build("mamba2+post", tie_embeddings=False)
    io.save(model, tmp_path)
    loaded = io.load(tmp_path)
    ids = torch.randint(SIZES["vocab_size"], (1, 7))
    assert loaded.config == model.config
    assert torch.equal(loaded(ids)[0], model(ids)[0])
    assert not list(tmp_path.glob(".*"))


def test_bad_checkpoints_are_clear_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        io.load(tmp_path)
    io.save(build("mamba2"), tmp_path)
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="truncated"):
        io.load(tmp_path)
    weights.unlink()
    with pytest.raises(FileNotFoundError, match="missing"):
        io.load(tmp_path)
    weights.write_bytes(whole)
    config = tmp_path / "config.json"
    text = config.read_text()
    config.write_text(text.replace('"format": 1', '"format": 99'))
    with pytest.raises(ValueError, match="format 99"):
        io.load(tmp_path)
    config.write_text(text[: len(text) // 2])
    with pytest.raises(ValueError, match="truncated or no JSON"):
        io.load(tmp_path)
    config.write_text(text.replace('"num_layers": 2', '"num_layers": 3'))
    with pytest.raises(ValueError, match="another model"):
        io.load(tmp_path)


def test_config_refuses_what_it_does_not_know():
    data = preset("mamba2", **SIZES).to_dict()
    with pytest.raises(ValueError, match="Did you mean 'num_layers'"):
        ModelConfig.from_dict({**data, "num_layer": 2})
    with pytest.raises(ValueError, match="no JSON"):
        ModelConfig.from_json("{")
    with pytest.raises(ValueError, match="needs mixer"):
        ModelConfig.from_dict({"vocab_size": 4, "hidden_size": 4, "num_layers": 1})
    with pytest.raises(ValueError, match="num_layers must be at least 1"):
        dataclasses.replace(preset("mamba2", **SIZES), num_layers=0)
    with pytest.raises(ValueError, match="swiglu, rwkv7, none"):
        preset("mamba2", **SIZES, mlp="gelu")
    with pytest.raises(dataclasses.FrozenInstanceError):
        preset("mamba2", **SIZES).hidden_size = 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mamba9", "Did you mean 'mamba[23]'"),
        ("mamba2+pots", "Did you mean 'post'"),
        ("mamba2+post+post", "given twice"),
        ("mamba2+post+post_norm", "exclude each other"),
        ("simple+scalar+vector", "exclude each other"),
        ("", "unknown preset"),
    ],
)
def test_grammar_errors(name, message):
    with pytest.raises(ValueError, match=message):
        preset(name, **SIZES)


def test_model_errors():
    model = build("mamba2")
    with pytest.raises(ValueError, match=r"\[B, T\]"):
        model(torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match="integers"):
        model(torch.zeros(1, 3))
    with pytest.raises(ValueError, match="1 layers; the model has 2"):
        model(torch.zeros(1, 3, dtype=torch.long), state=({},))
    ids = torch.zeros(1, 3, dtype=torch.long)
    with pytest.raises(ValueError, match="not both"):
        model(ids, cu_seqlens=torch.tensor([0, 3]), attention_mask=torch.ones(1, 3))


def test_modifiers_and_presets_are_described():
    assert all(registry.summary(name).endswith((".", ")")) for registry in (PRESETS, MODIFIERS) for name in registry)
    assert halflife.__version__


def test_the_docs_list_every_pair_that_is_refused():
    text = (Path(__file__).parent.parent / "docs" / "design-space.md").read_text()
    listed = set(re.findall(r"`(\w+\+\w+)`", text.split("and is refused")[1])) - {"gla+post"}
    assert listed == {name for name in MEANINGLESS if name.count("+") == 1}
