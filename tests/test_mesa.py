"""Ridge attention against its token loop and another implementation, and MesaNet's layer."""

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, assert_raises, assert_streams, at, unchecked, with_grads

import halflife
from halflife.layers import build
from halflife.ops import ridge_attention
from halflife.ops.fused import l2_normalize
from halflife.ops.ridge_attention import conjugate_gradients

EXACT = 4 * 2.2e-14  # four times the worst measured error, relative to the largest entry
WORST_OF_THEIRS = 1.3e-4
NAMES = ("q", "k", "v", "g", "beta", "ridge")


def arguments(length, batch=2, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape, of=torch.rand):
        return of(*shape, generator=generator, dtype=torch.float64)

    q, k = (F.normalize(draw(batch, length, 2, 5, of=torch.randn), dim=-1) for _ in range(2))
    g, beta = -0.3 * draw(batch, length, 2), draw(batch, length, 2)
    inputs = (q, k, draw(batch, length, 2, 4, of=torch.randn), g, beta, 0.25 + draw(2, 5))
    return {name: x.requires_grad_() for name, x in zip(NAMES, inputs, strict=True)}


def part(inputs, tokens):
    return {name: x if name == "ridge" else x[:, tokens] for name, x in inputs.items()}


def test_the_definition_is_that_of_another_implementation():
    naive = pytest.importorskip("fla.ops.mesa_net.naive").naive_mesa_net_exact
    inputs = arguments(37)
    inputs["v"] = torch.cat([inputs["v"], inputs["v"][..., :1]], -1)  # the other one needs V = K
    y, state = ridge_attention(**inputs, backend="reference", output_final_state=True)
    lamb = inputs.pop("ridge")
    expected = naive(**inputs, lamb=lamb)  # in float32
    for found, right in zip((y, *state), expected, strict=True):
        assert_close(found.float(), right, 4 * 5e-7)


@pytest.mark.parametrize("iterations", [1, 2])
def test_few_steps_are_those_of_the_authors(iterations):
    """They start at q / (diag G + λ), for tokens one by one as in a full pass."""
    step = pytest.importorskip("fla.ops.mesa_net.naive").naive_mesa_net_decoding_one_step
    inputs = {name: x.detach() for name, x in arguments(20).items()}
    inputs["v"] = torch.cat([inputs["v"], inputs["v"][..., :1]], -1)  # the other one needs V = K
    options = {"iterations": iterations, "tolerance": 0.0, "output_final_state": True}
    whole, _ = ridge_attention(**inputs, **options, chunk_size=8)
    sums, state = (torch.zeros(2, 2, 5, 5), torch.zeros(2, 2, 5, 5)), None
    for t in range(20):
        token = part(inputs, slice(t, t + 1))
        y, state = ridge_attention(**token, **options, initial_state=state)
        assert_close(y, whole[:, t : t + 1], EXACT)
        token = {name: x if name == "ridge" else x[:, 0] for name, x in token.items()}
        lamb = token.pop("ridge")
        expected, *sums = step(
            **token, lamb=lamb, prev_h_kk=sums[0], prev_h_kv=sums[1], max_CG_iteration=iterations
        )  # in float32, with 1e-5 added to denominators
        assert_close(y[:, 0].float(), expected, 4 * WORST_OF_THEIRS)


@pytest.mark.parametrize("cut", [0, 1, 13])
def test_conjugate_gradients_equal_exact_solves(cut):
    """Outputs, sums and gradients of two pieces; without a tolerance, K steps solve the systems."""
    inputs = arguments(33)
    expected = ridge_attention(**inputs, backend="reference", output_final_state=True)
    options = {"tolerance": 1e-15, "output_final_state": True, "chunk_size": 8}
    first, between = ridge_attention(**part(inputs, slice(cut)), **options)
    second, final = ridge_attention(**part(inputs, slice(cut, None)), initial_state=between, **options)
    found, expected = ((y, torch.cat(sums, -1)) for y, sums in ((torch.cat([first, second], 1), final), expected))
    assert_close(with_grads(found, inputs), with_grads(expected, inputs), EXACT)


def test_tokens_one_by_one_and_packed():
    inputs = {name: x.detach() for name, x in arguments(12, batch=1).items()}
    ridge = inputs.pop("ridge")

    def run(x, state, **options):
        return ridge_attention(**x, ridge=ridge, initial_state=state, output_final_state=True, **options)

    assert_streams(run, inputs, EXACT)
    packed, _ = run(inputs, None, cu_seqlens=torch.tensor([0, 5, 5, 12]))
    for tokens in (slice(5), slice(5, 12)):
        assert_close(packed[:, tokens], run(at(inputs, tokens), None)[0], EXACT)


def test_a_tolerance_ends_the_iteration_of_each_vector():
    """A vector of zeros needs no step, and the others stop at their own tolerance."""
    matrix = torch.diag(torch.arange(1.0, 9.0, dtype=torch.float64))
    b = torch.randn(3, 8, dtype=torch.float64)
    b[1] = 0
    calls = []

    def product(x):
        calls.append(x)
        return x @ matrix

    x = conjugate_gradients(product, matrix.diagonal() + torch.rand(8), b, iterations=30, tolerance=3e-2)
    assert len(calls) < 8
    assert x[1].count_nonzero() == 0
    assert ((x @ matrix - b).norm(dim=-1) <= 3e-2 * b.norm(dim=-1)).all()


def test_arguments_are_checked():
    inputs, op = arguments(5), unchecked(ridge_attention)
    for changed, message in (
        ({"ridge": -inputs["ridge"]}, "ridge must be positive"),
        ({"ridge": inputs["ridge"][:, :2]}, r"ridge must be \[H, K\]"),
        ({"g": inputs["g"].unsqueeze(-1).expand_as(inputs["q"])}, r"g must be \[B, T, H\]"),
        ({"iterations": 0}, "iterations ≥ 1"),
        ({"initial_state": (inputs["q"], inputs["v"])}, r"initial_state must be \(G, C\)"),
        ({"backend": "native"}, "auto, chunked, reference"),
    ):
        assert_raises(ValueError, message, op, **{**inputs, **changed})


def test_the_layer_is_its_equations():
    torch.manual_seed(0)
    layer = build("mesa", hidden_size=12, num_heads=2, tolerance=1e-15).double()
    x = torch.randn(2, 9, 12, dtype=torch.float64)
    q, k, v = layer.qkv_proj(x).split(12, -1)
    taps, both = layer.conv.weight, F.pad(torch.cat([q, k], -1), (0, 0, 3, 0))
    both = F.silu(sum(both[:, i : i + 9] * taps[:, i] for i in range(4)))
    q, k = (l2_normalize(part.unflatten(-1, (2, 6))) for part in both.split(12, -1))
    g, beta = F.logsigmoid(layer.decay_proj(x)), layer.beta_proj(x).sigmoid()
    ridge = F.softplus(layer.ridge.logit) + 0.25
    assert_close(ridge, torch.ones_like(ridge), 1e-6)
    o, _ = ridge_attention(q, k, v.unflatten(-1, (2, 6)), g, beta, ridge, backend="reference")
    expected = layer.out_proj((F.rms_norm(o, (6,), eps=1e-5) * layer.gate.weight).flatten(-2))
    assert_close(layer(x)[0], expected, 1e-12)


def test_options_that_define_it_cannot_change():
    for options, message in (
        ({"granularity": "vector"}, "granularity is 'scalar' in MesaNet"),
        ({"gate_rank": {}}, "gate_rank needs .* update 'ridge'"),
        ({"decay": None}, "needs a decay"),
    ):
        assert_raises(ValueError, message, build, "mesa", hidden_size=12, num_heads=2, **options)


@pytest.mark.parametrize("position", ["lrpe", "half_lrpe"])
def test_the_ridge_has_a_number_for_every_row_of_a_key(position):
    layer = halflife.layers.build("mesa", hidden_size=32, num_heads=2, position=position)
    assert_streams(layer, torch.randn(1, 6, 32), 4e-5)
