"""Decays and strengths as options of the SKA layer and as modifiers of presets."""

import pytest
import torch
from helpers import assert_close, assert_packs, assert_raises, assert_streams, generator

import halflife
from halflife import layers
from halflife.analysis.forecast.reading import require_linear_memory
from halflife.analysis.operators import measure_operators
from halflife.lab.experiments.overrides import apply_overrides
from halflife.models.timescales import granularity, timescales
from halflife.ops import koopman_attention
from halflife.packing import Packing
from halflife.training.config import TrainConfig

HIDDEN, LENGTH, HEADS = 16, 13, 2
EXACT = 1e-10


def build(**options):
    torch.manual_seed(0)
    options = {"num_heads": HEADS, "rank": 6, "chunk_size": 3, "decay": "simple", "beta": True, **options}
    layer = layers.build("ska", hidden_size=HIDDEN, **options)
    with torch.no_grad():
        for parameter in (layer.out_proj.weight, layer.beta_proj.weight):
            parameter.normal_()
    return layer.double()


def inputs(batch=2):
    return torch.randn(batch, LENGTH, HIDDEN, generator=generator("ska decay", batch), dtype=torch.float64)


def test_the_layer_is_the_op_with_its_decay_and_strength():
    layer, x = build(decay_options={"p": 0.8}), inputs()
    q, k, v = (p(x).unflatten(-1, (HEADS, -1)) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    f = x @ layer.decay_proj.up.weight.T
    g = torch.nn.functional.logsigmoid(f + layer.decay.delta)
    beta = torch.sigmoid(x @ layer.beta_proj.weight.T)
    y, _ = koopman_attention(q + k, k, v, g=g, beta=beta, **layer.readout.settings(), **layer.options)
    assert_close(layer(x)[0], layer.out_proj((layer.readout.eta[:, None] * y).flatten(-2)), EXACT)
    layer(x)[0].square().sum().backward()
    assert all(p.grad.abs().max() > 0 for p in (layer.decay_proj.up.weight, layer.decay.delta, layer.beta_proj.weight))


@pytest.mark.parametrize(
    "options",
    [
        {"post": {"train_length": 8}},
        *(
            pytest.param(options, marks=pytest.mark.slow)
            for options in (
                {"granularity": "vector"}, {"granularity": "vector", "post": {"train_length": 8}, "refresh": "token"},
                {"refresh": "token"}, {"decay": "lightnet"}, {"decay": "mamba2", "conv_size": 4},
                {"decay": "retnet", "lift": "cg"},
                {"refresh": "token", "normalization": "trace"},
            )
        ),
    ],
)  # fmt: skip
def test_a_decayed_sequence_streams_and_packs_like_the_whole(options):
    layer, x = build(**options), inputs()
    assert_streams(layer, x, EXACT)
    assert_packs(layer, lambda batch, length: torch.randn(batch, length, HIDDEN, dtype=torch.float64), EXACT)


def test_prefix_mode_decays_and_masked_mode_refuses_a_decay():
    layer, x = build(mode="prefix"), inputs()
    q, k, v = (p(x).unflatten(-1, (HEADS, -1)) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    weights, _ = layer.weights(x, {}, Packing(*x.shape[:2]))
    y, _ = koopman_attention(q + k, k, v, mode="prefix", **weights, **layer.readout.settings(), **layer.options)
    assert_close(layer(x)[0], layer.out_proj((layer.readout.eta[:, None] * y).flatten(-2)), EXACT)
    assert_raises(ValueError, "no age", build, mode="masked")


def model_of(name, **options):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_layers": 2, "vocab_size": 31, "num_heads": 2, "train_length": 32}
    model = halflife.LanguageModel(halflife.preset(name, **sizes, **options)).eval()
    model.blocks[1].mixer.options["chunk_size"] = 4
    return model


@pytest.mark.slow
def test_modifiers_and_overrides_choose_the_decay():
    """The spectrum lists the layer's time-scales: 1 / −log 0.99, and PoST's from 1 to 32 tokens."""
    decayed, post = model_of("deltanet+ska_decay"), model_of("deltanet+ska_post:1")
    assert timescales(decayed, [1])[0].layer == 1
    assert timescales(decayed, [1])[0].timescales["1"] == pytest.approx([99.5, 99.5], abs=0.1)
    slow, fast = timescales(post, [1])[0].timescales["1"]
    assert slow == pytest.approx(32, rel=1e-3)
    assert fast == pytest.approx(1, rel=1e-3)
    model = halflife.preset("deltanet+ska", hidden_size=16, num_layers=2, vocab_size=128)
    config = TrainConfig(model=model, steps=1, batch_size=1, learning_rate=1e-3)
    changed = apply_overrides(config, {"ska.decay": "simple", "ska.beta": True, "ska.decay_options": {"p": 0.9}})
    assert changed.model.hybrid["options"]["decay_options"] == {"p": 0.9}
    assert granularity(model_of("simple+ska_decay")) == "heads and key channels"
    assert_raises(ValueError, r"layer 1 \(ska\)", require_linear_memory, decayed)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", ["mamba2+ska_decay", "mamba2+post+ska_post"])
@pytest.mark.parametrize("refresh", ["chunk", "token"])
def test_a_session_ends_where_the_whole_text_does(name, refresh):
    model, ids = model_of(name).double(), torch.randint(31, (1, 30), generator=generator("session"))
    mixer = model.blocks[1].mixer
    mixer.options["refresh"] = mixer.decode_refresh = refresh
    mixer.out_proj.weight.normal_()
    logits, _ = model(ids)
    session = halflife.Session(model, encode=list, decode=str).feed(ids[0, :9].tolist())
    for token in ids[0, 9:].tolist():
        session.feed([token])
    assert_close(session.next_logits, logits[0, -1], EXACT)


@pytest.mark.slow
def test_operators_of_decayed_sums_explain_weighted_values():
    """The share of the values' energy that the regression leaves, by least squares on the weighted tokens."""
    model, ids = model_of("deltanet+ska_decay").double(), torch.randint(31, (1, 14), generator=generator("ids"))
    mixer, seen = model.blocks[1].mixer, {}
    hook = mixer.readout.register_forward_hook(
        lambda module, args, options, result: seen.update(options, k=args[1], v=args[2]), with_kwargs=True
    )
    (layer,) = measure_operators(model, ids)
    hook.remove()
    k, v, g, beta = (seen[name][0, :12].double() for name in ("k", "v", "g", "beta"))  # three chunks of four
    for h, head in enumerate(layer.heads):
        weight = beta[:, h] * torch.stack([g[s + 1 :, h].sum() for s in range(12)]).exp()
        x, u = (weight.sqrt()[:, None] * part[:, h] for part in (k, v))
        unit = 1e-3 * x.square().sum(-1).max()
        gram = x.T @ x + unit * torch.eye(48).double()
        readout = torch.linalg.solve(gram, x.T @ u).T
        left = (u - x @ readout.T).square().sum() / u.square().sum()
        assert head.unexplained == pytest.approx(left.item(), rel=1e-6)
    assert layer.state_size == 2 * 48**2 + 48 * 8 + 48 + 1 + 3 * (48 + 8 + 1)
