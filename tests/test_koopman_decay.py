"""Decays and strengths in spectral Koopman attention, against the weighted least-squares problem of every query."""

import pytest
import torch
from helpers import assert_close, assert_packs, assert_raises, assert_streams, cases, generator

from halflife.analysis import koopman
from halflife.ops import available_backends
from halflife.ops.koopman import convert_state, koopman_attention

HEADS, RANK, WIDTH = 2, 4, 3
EXACT = 1e-9  # float64, where the condition number is up to 1/ε
SETTINGS = {"gamma": 1.2, "mix": 0.6, "ridge": 1e-2, "power": 2}


def inputs(length, decay="scalar", scale=1.0, batch=2, grad=True, dtype=torch.float64):
    draw = generator("koopman decay", length, decay)
    q, k = torch.randn(2, batch, length, HEADS, RANK, generator=draw, dtype=torch.float64)
    v = torch.randn(batch, length, HEADS, WIDTH, generator=draw, dtype=torch.float64)
    shape = (batch, length, HEADS, RANK) if decay == "vector" else (batch, length, HEADS)
    g = -scale * torch.rand(shape, generator=draw, dtype=torch.float64)
    beta = 0.1 + torch.rand(batch, length, HEADS, generator=draw, dtype=torch.float64)
    return [x.to(dtype).requires_grad_(grad) for x in (q, k, v, g, beta)]


def regression(keys, values, g, beta, normalization, ridge):
    """C, M and G̃ of one head after its last token, from the weight of every token in closed form."""
    g = g if g.ndim == 2 else g[:, None].expand_as(keys)
    slowest = g.amax(-1)
    x, u, norms = [], [], []
    for s in range(len(keys)):
        x.append(beta[s].sqrt() * (g[s + 1 :].sum(0) / 2).exp() * keys[s])
        u.append(beta[s].sqrt() * (slowest[s + 1 :].sum() / 2).exp() * values[s])
        norms.append(beta[s] * slowest[s + 1 :].sum().exp() * keys[s].square().sum())
    x, u = torch.stack(x), torch.stack(u)
    gram = x.T @ x
    unit = {"causal": torch.stack(norms).max(), "trace": gram.trace()}[normalization]
    return u.T @ x, x[1:].T @ x[:-1], gram + ridge * unit * torch.eye(RANK).double()


def oracle(q, k, v, g, beta, chunk_size, own=False, normalization="causal", mask=None):
    """Fit the operator of every token from its tokens, one after the other; with `own` from the token itself too."""
    k = k if mask is None else k * mask[..., None, None]
    y = torch.zeros_like(v)
    for b in range(q.shape[0]):
        for t in range(q.shape[1]):
            stop = (t + own) // chunk_size * chunk_size
            for h in range(HEADS if stop else 0):
                read, pairs, gram = regression(
                    k[b, :stop, h], v[b, :stop, h], g[b, :stop, h], beta[b, :stop, h], normalization, SETTINGS["ridge"]
                )
                x = first = torch.linalg.solve(gram, q[b, t, h])
                for _ in range(SETTINGS["power"]):
                    x = SETTINGS["gamma"] * torch.linalg.solve(gram, pairs @ x)
                place = torch.zeros_like(v)
                place[b, t, h] = 1
                y = y + place * (read @ ((1 - SETTINGS["mix"]) * first + SETTINGS["mix"] * x))
    return y


def run(x, **options):
    q, k, v, g, beta = x
    return koopman_attention(q, k, v, g=g, beta=beta, output_final_state=True, **SETTINGS, **options)


def grads(y, leaves):
    weights = torch.randn(y.shape, generator=generator("weights"), dtype=torch.float64).to(y.dtype)
    return torch.autograd.grad((y * weights).sum(), leaves, allow_unused=True, materialize_grads=True)


each_form = cases(
    "decay, options",
    ("scalar", {"chunk_size": 3}),
    ("scalar", {"refresh": "token"}),
    ("vector", {"chunk_size": 2}),
    pytest.param("scalar", {"refresh": "token", "normalization": "trace"}, marks=pytest.mark.slow),
    pytest.param("vector", {"refresh": "token"}, marks=pytest.mark.slow),
    pytest.param("vector", {"chunk_size": 4, "normalization": "trace"}, marks=pytest.mark.slow),
)


@each_form
def test_every_form_solves_the_weighted_regression(decay, options):
    x = inputs(7, decay)
    size = 1 if "refresh" in options else options["chunk_size"]
    expected = oracle(*x, size, normalization=options.get("normalization", "causal"))
    wanted = grads(expected, x)
    for form in ("chunked", "reference"):
        y, _ = run(x, **options, backend=form)
        assert_close(y, expected, EXACT)
        for got, want in zip(grads(y, x), wanted, strict=True):
            assert_close(got, want, 100 * EXACT)


@pytest.mark.parametrize("mode", ["prefix", "masked"])
@pytest.mark.parametrize("decay", ["scalar", pytest.param("vector", marks=pytest.mark.slow)])
def test_whole_sequences_decay_to_their_last_token(mode, decay):
    """All queries read the operator of all tokens, the last one included."""
    x = inputs(5, decay)
    mask = torch.tensor([[1, 1, 0, 1, 1], [1, 0, 1, 1, 0]]).double()
    q, *others = x
    last = oracle(q[:, -1:].expand_as(q), *others, 1, own=True, mask=mask)[:, -1:]
    wanted = grads(last, x)
    y, _ = koopman_attention(q[:, -1:], *others[:2], g=others[2], beta=others[3], mode=mode, mask=mask, **SETTINGS)
    assert_close(y, last, EXACT)
    for got, want in zip(grads(y, x), wanted, strict=True):
        assert_close(got, want, 100 * EXACT)


@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow)])
def test_no_decay_and_strength_one_change_no_bit(dtype):
    q, k, v, g, beta = inputs(11, dtype=dtype, grad=False)
    for options in ({"chunk_size": 3}, {"refresh": "token"}, {"mode": "prefix"}):
        plain, state = koopman_attention(q, k, v, output_final_state=True, backend="chunked", **options)
        y, new = koopman_attention(
            q, k, v, g=0 * g, beta=torch.ones_like(beta), output_final_state=True, backend="chunked", **options
        )
        assert torch.equal(y, plain)
        assert all(torch.equal(new[name], state[name]) for name in state)


@pytest.mark.skipif("native" not in available_backends("koopman_attention"), reason="no compiled kernels")
def test_native_kernels_take_strengths_and_refuse_decays():
    q, k, v, g, beta = inputs(9, grad=False, dtype=torch.float32)
    y, _ = koopman_attention(q, k, v, beta=beta, chunk_size=3, ridge=1.0, backend="native")
    assert_close(y, koopman_attention(q, k, v, beta=beta, chunk_size=3, ridge=1.0, backend="chunked")[0], 1e-5)
    assert_raises(ValueError, "do not cover g", koopman_attention, q, k, v, g=g, backend="native")
    assert torch.equal(koopman_attention(q, k, v, g=g)[0], koopman_attention(q, k, v, g=g, backend="chunked")[0])


@cases(
    "decay, form",
    ("scalar", {"backend": "chunked"}),
    pytest.param("scalar", {"backend": "reference"}, marks=pytest.mark.slow),
    pytest.param("vector", {"backend": "reference"}, marks=pytest.mark.slow),
    pytest.param("vector", {"backend": "chunked"}, marks=pytest.mark.slow),
)
def test_extreme_decays_have_finite_gradients(decay, form):
    """A log-decay of −1000 or −∞ at every channel begins a new sequence, with the token that has it."""
    x = inputs(9, decay)
    q, k, v, g, beta = x
    for value in (-1000.0, -torch.inf):
        cut = g.detach().clone()
        cut[:, 4] = value
        cut.requires_grad_()
        y, _ = run([q, k, v, cut, beta], refresh="token", **form)
        alone, _ = run([part[:, 4:] for part in (q, k, v, cut, beta)], refresh="token", **form)
        assert_close(y[:, 5:], alone[:, 1:], EXACT)
        assert all(grad.isfinite().all() for grad in grads(y, [q, k, v, cut, beta]))


def test_tokens_of_strength_zero_count_for_nothing():
    q, k, v, g, beta = inputs(9)
    silent = torch.ones(2, 9, 1).double()
    silent[:, 3] = 0
    y, _ = run([q, k, v, g, beta * silent], chunk_size=2)
    other, _ = run([q, k * (1 + 7 * (1 - silent))[..., None], v, g, beta * silent], chunk_size=2)
    assert torch.equal(y, other)
    assert all(grad.isfinite().all() for grad in grads(y, [q, k, v, g, beta]))


@each_form
def test_streams_and_packed_sequences_equal_whole_ones(decay, options):
    def op(x, state, **packed):
        return run(x, initial_state=state, **options, **packed)

    assert_streams(op, inputs(13, decay), EXACT)
    assert_packs(op, lambda batch, length: inputs(length, decay, batch=batch), EXACT)


@pytest.mark.parametrize("decay", ["scalar", pytest.param("vector", marks=pytest.mark.slow)])
@pytest.mark.parametrize("normalization", ["causal", pytest.param("trace", marks=pytest.mark.slow)])
def test_pending_tokens_enter_with_their_decays(decay, normalization):
    """A state by chunk goes on by token, as the same tokens do that were read by token from the start."""
    x = inputs(8, decay, grad=False)
    first, second = ([part[:, tokens] for part in x] for tokens in (slice(5), slice(5, 8)))
    options = {"normalization": normalization}
    _, state = run(first, chunk_size=3, **options)
    y, end = run(second, initial_state=convert_state(state, 1, normalization), refresh="token", **options)
    whole, expected = run(x, refresh="token", **options)
    assert_close(y, whole[:, 5:], EXACT)
    for name in ("gram", "transition", "values", "norm"):
        assert_close(end[name], expected[name], EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("decay", ["scalar", "vector"])
@pytest.mark.parametrize("normalization", ["sequence", "paper"])
@pytest.mark.parametrize("size", [{"chunk_size": 3}, {"refresh": "token"}])
def test_norms_of_whole_sequences_do_not_decay(decay, normalization, size):
    """Packed, with an empty sequence, by chunk and by the token loop: outputs, states and gradients."""
    x = [part.detach()[:1].requires_grad_() for part in inputs(14, decay)]
    bounds, results = torch.tensor([0, 5, 5, 14]), []
    for form in ({"backend": "chunked"}, {"backend": "reference"}):
        y, state = run(x, cu_seqlens=bounds, normalization=normalization, **size, **form)
        assert state is not None
        results.append((y, *(state[name] for name in ("gram", "values", "norm")), *grads(y, x)))
    for got, want in zip(*results, strict=True):
        assert_close(got, want, 100 * EXACT)
    longest = torch.stack([(x[4][0, 5:, h] * x[1][0, 5:, h].square().sum(-1)).max() for h in range(HEADS)])
    if normalization == "paper":
        assert_close(results[0][3][2], longest, EXACT)


def test_bad_weights_are_refused_by_name():
    q, k, v, g, beta = inputs(4, grad=False)
    _, state = koopman_attention(q, k, v, g=g, chunk_size=3, output_final_state=True)
    for message, options in (
        ("must not be positive", {"g": -g}), ("g must be None", {"g": g[..., :1]}), ("beta must be", {"beta": -beta}),
        ("needs g", {"initial_state": state, "chunk_size": 3}), ("ridge must", {"ridge": -1.0}),
    ):  # fmt: skip
        assert_raises(ValueError, message, koopman_attention, q, k, v, **options)


@pytest.mark.parametrize("decay", ["scalar", "vector"])
def test_decayed_operators_have_norm_one_and_bounded_readouts(decay):
    """σ_max(A_w) ≤ 1, and `‖C G̃⁻¹‖ ≤ ‖U‖ / (2 √ε m)`, the bound of a ridge regression of U, for fast decays too."""
    ridge = 1e-4
    for scale in (0.01, 1.0, 30.0):
        _, k, v, g, beta = inputs(12, decay, scale, grad=False)
        eye = torch.eye(RANK).double().view(1, RANK, 1, RANK).expand(2, -1, HEADS, -1)
        readout, state = koopman_attention(
            eye, k, v, g=g, beta=beta, ridge=ridge, power=0, mode="prefix", output_final_state=True
        )
        assert state is not None
        assert (koopman.sigma_max(koopman.Operator.of_state(state, ridge)) <= 1 + 1e-9).all()
        energy = (beta.unsqueeze(-1) * v.square()).sum((1, 3))  # no decayed value has more
        bound = energy.sqrt() / (2 * (ridge * state["norm"]).sqrt())
        assert (torch.linalg.matrix_norm(readout.permute(0, 2, 3, 1), 2) <= bound).all()


def test_columns_of_c_that_decay_alone_would_be_read_with_one_over_the_ridge():
    """One pair whose key `(1, 1)/√2` has faded to the weights 1 and 1/4, read at the query that it does not match."""
    ridge, z = 1e-3, torch.tensor([1.0, 1.0]).double() / 2**0.5
    weights = torch.tensor([1.0, 0.25]).double()
    x = weights.sqrt() * z
    gram = torch.outer(x, x) + ridge * torch.eye(2).double()
    across = torch.tensor([-0.5, 1.0]).double()
    columns = (weights * z) @ torch.linalg.solve(gram, across)
    k, g = z.view(1, 1, 1, 2).repeat(1, 2, 1, 1), torch.zeros(1, 2, 1, 2).double()
    k[:, 1], g[:, 1] = 0, weights.log()
    v = torch.ones(1, 2, 1, 1).double()
    y, _ = koopman_attention(across.view(1, 1, 1, 2), k, v, g=g, ridge=ridge, power=0, mode="prefix")
    assert columns < -0.1 / ridge
    assert abs(y.item()) < 1e-9
