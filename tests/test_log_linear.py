"""Log-linear attention: token loop, mask and chunks, states, and the layer."""

from itertools import product

import pytest
import torch
from helpers import assert_close, assert_packs, assert_raises, assert_streams, unchecked

import halflife
from halflife.ops import linear_attention, log_linear_attention
from halflife.ops.log_linear.rows import levels

CHUNKED = ("mask", "chunked")
LENGTHS, LEVELS, CHUNKS, CUTS = (1, 2, 5, 16, 33, 50), (2, 3, 8), (1, 4, 16), (0, 1, 7)


def assert_equal(got, expected):
    """Rounding alone: the largest measured error is 3e-15."""
    assert_close(got, expected, 1.2e-14)


def arguments(length, num_levels, batch=2, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(batch, length, 2, size, generator=generator, dtype=dtype) for size in (3, 3, 4))
    g = -0.3 * torch.rand(batch, length, 2, generator=generator, dtype=dtype)
    weights = torch.rand(batch, length, 2, num_levels, generator=generator, dtype=dtype)
    return [x.requires_grad_() for x in (q, k, v, g, weights)]


def test_levels_are_those_of_a_fenwick_tree():
    """From position 13 = 1101₂, the tokens before it are 12; 8 to 11; 0 to 7."""
    found = levels(torch.tensor(13), torch.arange(14), 9).tolist()
    assert found == [4] * 8 + [3] * 4 + [1, 0]
    assert levels(torch.tensor(13), torch.arange(14), 3).tolist() == [3] * 12 + [1, 0]


@pytest.mark.parametrize("backend", ["reference", *CHUNKED])
def test_equals_the_naive_form_of_another_implementation(backend):
    naive = pytest.importorskip("fla.ops.log_linear_attn.naive").naive_log_linear_attn
    inputs = arguments(37, 7)
    o, _ = log_linear_attention(*inputs, scale=1, backend=backend, chunk_size=8)
    assert_equal(o, naive(*inputs))


@pytest.mark.parametrize(("length", "num_levels", "chunk", "cut"), [
    (1, 3, 1, 0), (5, 2, 4, 1), (16, 8, 4, 7), (33, 3, 16, 13), (50, 8, 16, 7), (50, 5, 1, 13), (33, 8, 64, 0),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in product(LENGTHS, LEVELS, CHUNKS, CUTS)),
])  # fmt: skip
@pytest.mark.parametrize("backend", CHUNKED)
def test_pieces_equal_the_token_loop(backend, length, num_levels, chunk, cut):
    """Outputs, final states and gradients of two pieces, with more or fewer levels than the length needs."""
    inputs, cut = arguments(length, num_levels), min(cut, length)
    expected, (state, position) = log_linear_attention(*inputs, backend="reference", output_final_state=True)
    options = {"backend": backend, "chunk_size": chunk, "output_final_state": True}
    first, between = log_linear_attention(*(x[:, :cut] for x in inputs), **options)
    between = between if cut else None
    second, final = log_linear_attention(*(x[:, cut:] for x in inputs), initial_state=between, **options)
    o = torch.cat([first, second], 1)
    assert_equal(o, expected)
    assert_equal(final[0], state)
    assert torch.equal(final[1], position)
    wanted = torch.autograd.grad(expected.square().sum() + state.square().sum(), inputs)
    for gradient, right in zip(
        torch.autograd.grad(o.square().sum() + final[0].square().sum(), inputs), wanted, strict=True
    ):
        assert_equal(gradient, right)


@pytest.mark.parametrize("backend", ["reference", *CHUNKED])
def test_streams_and_packs(backend):
    def run(x, state, **packed):
        options = {"backend": backend, "chunk_size": 4, "output_final_state": True}
        return log_linear_attention(*x, initial_state=state, **options, **packed)

    assert_streams(run, arguments(20, 4), 1.2e-14)
    assert_packs(run, lambda batch, length: arguments(length, 4, batch), 1.2e-14)


@pytest.mark.parametrize("backend", ["reference", *CHUNKED])
def test_equal_weights_are_linear_attention(backend):
    """This also holds where a log-decay of −inf erases the states, and where decays are extreme."""
    q, k, v, g, weights = (x.detach() for x in arguments(50, 4))
    g = g.clone()
    g[:, 7], g[:, 20], g[:, 30:] = -torch.inf, -1e4, 0
    o, _ = log_linear_attention(q, k, v, g, torch.ones_like(weights), backend=backend, chunk_size=8)
    # Differences of cumulative sums of −750 have 4e-14; the bound is 4 times that.
    assert_close(o, linear_attention(q, k, v, g, backend="reference")[0], 1.6e-13)


def test_float32_over_long_sequences():
    """The largest error of 4,096 tokens, relative to the largest output; 4 × 2.4e-6, which was measured."""
    inputs = [x.detach() for x in arguments(4096, 13, batch=1)]
    exact, _ = log_linear_attention(*inputs)
    o, _ = log_linear_attention(*(x.float() for x in inputs))
    assert (o - exact).abs().max() <= 1e-5 * exact.abs().max()


def test_arguments_are_checked():
    q, k, v, g, weights = arguments(5, 3)
    with pytest.raises(ValueError, match=r"g must be \[B, T, H\] = \[2, 5, 2\]; got \[2, 5, 2, 3\]"):
        unchecked(log_linear_attention)(q, k, v, g.unsqueeze(-1).expand_as(q), weights)
    assert_raises(ValueError, r"weights must be \[B, T, H, L\]", log_linear_attention, q, k, v, g, weights[..., :1])
    with pytest.raises(ValueError, match="states"):
        log_linear_attention(q, k, v, g, weights, initial_state=(q, torch.zeros(2, dtype=torch.long)))
    with pytest.raises(ValueError, match="auto, chunked, mask, reference"):
        log_linear_attention(q, k, v, g, weights, backend="native")


@pytest.mark.parametrize("name", ["mamba2+log_linear", "retnet+log_linear", "simple+scalar+log_linear+post"])
def test_models_learn(name):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_layers": 2, "vocab_size": 31, "num_heads": 4, "train_length": 16}
    model = halflife.LanguageModel(halflife.preset(name, **sizes)).double()
    model(torch.randint(31, (2, 40)))[0].square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert model.blocks[0].mixer.log_linear.scale.c.grad.abs().max() > 0


def test_what_has_no_log_linear_form_says_so():
    for name in ("gated_deltanet+log_linear", "gla+log_linear", "rwkv7+log_linear", "mamba2+gate_rank+log_linear"):
        with pytest.raises(ValueError, match=r"log_linear needs|log-linear attention needs|exclude each other"):
            halflife.LanguageModel(halflife.preset(name, hidden_size=32, num_layers=1, vocab_size=31, num_heads=4))
    with pytest.raises(ValueError, match="num_levels must be at least 2"):
        halflife.layers.build("mamba2", hidden_size=32, log_linear={"num_levels": 1})
