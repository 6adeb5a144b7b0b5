"""Spectral Koopman attention against the paper's long form, a loop over prefixes, numpy, and its other paths."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from helpers import (
    assert_close,
    assert_packs,
    assert_raises,
    assert_same,
    assert_streams,
    cases,
    check_custom_ops,
    generator,
    run_pieces,
    slices,
    unchecked,
)
from pairwise import crossed, slow_beyond

from halflife.ops import available_backends
from halflife.ops.backends.native import build
from halflife.ops.backends.native.koopman import _most_borders, why_not
from halflife.ops.koopman import KoopmanCall, attend, koopman_attention, solve
from halflife.ops.koopman.solve import rank_one
from halflife.ops.koopman.state import COMMITTED

HEADS, RANK, WIDTH = 2, 5, 3

# Four times the worst measured error, relative to the largest entry.
EXACT = 4 * 1.4e-11  # float64: the operator of a few keys has the condition number 1/ε
INVERTED = 4 * 2e-9  # against forms that multiply by explicit inverses, and for gradients
SINGLE = 4 * 3e-5  # float32 against float64, relative to the read-out with K = 0 (the filter may leave very little)
STEPPED = 4 * 7e-4  # the same for 20 keys of one direction with condition number 20/ε; 1e-5 for others
NATIVE = 4 * 1.9e-4  # the compiled kernels in float32, gradients included
# The compiled kernels run where they are built, in float32. The other forms run in float64.
FORMS = [name for name in ("chunked", "reference", "native") if name in available_backends("koopman_attention")]
each_form = pytest.mark.parametrize("backend", FORMS)
each_fast_form = pytest.mark.parametrize("backend", [name for name in FORMS if name != "reference"])


def form_inputs(backend, *args, **options):
    """`inputs` in the dtype that the tests of this backend use."""
    return inputs(*args, dtype=torch.float32 if backend == "native" else torch.float64, **options)


def wide(x):
    """The same tensors in float64, which want gradients where they do."""
    return [part.detach().double().requires_grad_(part.requires_grad) for part in x]


def assert_form(backend, got, expected, tolerance, whole=None):
    """`assert_close`, with the tolerance of float32 for the compiled kernels.

    The power filter may leave next to nothing of a short sequence. Its float32 error is therefore relative to the
    largest entry of `whole`, where this is given.
    """
    if backend != "native":
        assert_close(got, expected, tolerance)
    elif whole is not None:
        assert ((got - expected).abs() <= NATIVE * whole.abs().max()).all()
    else:
        assert_close(got, expected, NATIVE)


def inputs(length, batch=2, dtype=torch.float64, grad=False):
    draw = generator("koopman", length, batch)
    q, k = torch.randn(2, batch, length, HEADS, RANK, generator=draw, dtype=torch.float64)
    v = torch.randn(batch, length, HEADS, WIDTH, generator=draw, dtype=torch.float64)
    return [x.to(dtype).requires_grad_(grad) for x in (q, k, v)]


def op(**options):
    def run(x, state, **packed):
        return koopman_attention(*x, initial_state=state, output_final_state=True, **options, **packed)

    return run


def remembered(state):
    """Remove the inverse factor, which single tokens cache in the state and which follows from the rest of it."""
    return {name: x for name, x in state.items() if name != "inverse"}


def long_form(keys, values, query, gamma, mix, ridge, power):
    """Compute one head as in the paper (Appendix I): whiten, apply the power of the operator, and go back."""
    m = keys.norm(dim=-1).max()
    before = torch.cat([torch.zeros_like(keys[:1]), keys[:-1]])
    gram = keys.T @ keys + ridge * m**2 * torch.eye(RANK, dtype=keys.dtype)
    factor = torch.linalg.cholesky(gram)
    inverse = torch.linalg.inv(factor)
    whitened = gamma * inverse @ (keys.T @ before) @ inverse.T
    filtered = factor @ torch.linalg.matrix_power(whitened, power) @ inverse
    mixed = (1 - mix) * torch.eye(RANK, dtype=keys.dtype) + mix * filtered
    return values.T @ keys @ torch.linalg.inv(gram) @ mixed @ query


def loop(q, k, v, chunk_size, gamma=1.0, mix=1.0, ridge=1e-3, power=2):
    """Solve for the operator of every token from all chunks before its chunk, by the long form."""
    y = []
    for t in range(q.shape[1]):
        stop = t // chunk_size * chunk_size
        rows = [
            long_form(k[b, :stop, h], v[b, :stop, h], q[b, t, h], gamma, mix, ridge, power)
            if stop else 0 * v[b, t, h]
            for b in range(q.shape[0]) for h in range(HEADS)
        ]  # fmt: skip
        y.append(torch.stack(rows).view(q.shape[0], HEADS, WIDTH))
    return torch.stack(y, 1) if y else v[:, :0]


def grads(y, leaves):
    weights = torch.randn(y.shape, generator=generator("weights"), dtype=torch.float64).to(y.dtype)
    loss = (y * weights).sum()
    return torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True, materialize_grads=True)


def assert_loop(backend, length, tokens, settings, **options):
    """Outputs and gradients are those of the loop, in which an operator is of `tokens` tokens."""
    x = form_inputs(backend, length, grad=True)
    exact = wide(x)
    expected = loop(*exact, tokens, **settings)
    y, _ = koopman_attention(*x, backend=backend, **settings, **options)
    assert_form(backend, y, expected, INVERTED)
    for got, wanted in zip(grads(y, x), grads(expected, exact), strict=True):
        assert_form(backend, got, wanted, INVERTED)


@pytest.mark.parametrize("power", [0, 1, 2, 4])
@pytest.mark.parametrize(("gamma", "mix"), [(1.0, 1.0), (1.5, 1.0), (1.2, 0.3), (1.0, 0.0)])
@each_form
def test_four_lines_are_the_papers_long_form(power, gamma, mix, backend):
    settings = {"gamma": gamma, "mix": mix, "power": power}
    assert_loop(backend, 9, 2, settings, chunk_size=2)


@pytest.mark.parametrize("chunk_size", [1, 7, 64])
@pytest.mark.parametrize("refresh", ["chunk", "token"])
@each_fast_form
def test_every_prefix_solved_directly(chunk_size, refresh, backend):
    assert_loop(backend, 23, 1 if refresh == "token" else chunk_size, {}, chunk_size=chunk_size, refresh=refresh)


@crossed(length=[0, 1, 2, 7, 8, 9], chunk_size=[1, 2, 3, 7, 8, 64], normalization=["causal", "sequence", "trace"])
def test_every_form_is_the_reference(length, chunk_size, normalization):
    """Return outputs, final states, and the gradients of both."""
    found, forms = {}, [form for form in FORMS if form != "native" or normalization != "trace"]
    for backend in forms:
        x = form_inputs(backend, length, grad=True)
        y, state = koopman_attention(
            *x, chunk_size=chunk_size, normalization=normalization, output_final_state=True, backend=backend
        )
        state = remembered(state)
        kept = [state[name].flatten() for name in sorted(state) if name != "pending"]
        given = grads(torch.cat([y.flatten(), *kept]), x)
        found[backend] = {"y": y, **state, **dict(zip(("dq", "dk", "dv"), given, strict=True))}
    for backend in forms:
        assert_form(backend, found[backend], found["reference"], EXACT)


def test_settings_of_each_head():
    q, k, v = inputs(8)
    gamma, mix = torch.tensor([1.0, 1.4]), torch.tensor([1.0, 0.2])
    y, _ = koopman_attention(q, k, v, gamma=gamma, mix=mix, chunk_size=2)
    for h in range(HEADS):
        one = [x[:, :, h : h + 1] for x in (q, k, v)]
        alone, _ = koopman_attention(*one, gamma=gamma[h].item(), mix=mix[h].item(), chunk_size=2)
        assert_close(y[:, :, h : h + 1], alone, 1e-6)  # the settings are float32


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_a_weight_of_every_power(backend):
    """The sum of the reads with one power, in the passes over chunks and over single tokens; with all gradients."""
    x = inputs(9, grad=True)
    weights = torch.randn(4, HEADS, dtype=torch.float64, requires_grad=True)
    gamma = torch.tensor([1.1, 1.4], dtype=torch.float64, requires_grad=True)
    given = [*x, weights, gamma]
    expected = sum(
        weight[:, None] * koopman_attention(*x, gamma=gamma, power=power, chunk_size=2, backend="reference")[0]
        for power, weight in enumerate(weights)
    )
    settings = {"gamma": gamma, "mix": weights, "power": 3, "chunk_size": 2}
    y, _ = koopman_attention(*x, **settings, backend=backend)
    assert_close(y, expected, 1e-9)
    for got, wanted in zip(grads(y, given), grads(expected, given), strict=True):
        assert_close(got, wanted, 1e-9)
    assert_close(run_pieces(op(**settings), x, range(10))[0], expected, 1e-9)


def test_weights_of_the_ends_are_a_mixture():
    """Also for the operator of the main text."""
    x, mix = inputs(8), torch.tensor([0.3, 0.9], dtype=torch.float64)
    weights = torch.stack([1 - mix, torch.zeros(2, dtype=torch.float64), mix])
    for operator in ("whitened", "main_text"):
        given, expected = (
            koopman_attention(*x, mix=one, chunk_size=2, backend="chunked", operator=operator)[0]
            for one in (weights, mix)
        )
        assert_close(given, expected, 1e-12)


@pytest.mark.parametrize("mode", ["prefix", "chunk"])
def test_without_power_it_is_ridge_regression(mode):
    """With K = 0 the result is numpy's least-squares solution of the system augmented by the ridge (Prop. I.2)."""
    q, k, v = inputs(14, batch=1)
    if mode == "prefix":
        y, _ = koopman_attention(q[:, 7:], k[:, :7], v[:, :7], power=0, mode="prefix")
    else:
        y = koopman_attention(q, k, v, power=0, chunk_size=7)[0][:, 7:]
    for h in range(HEADS):
        keys, values = k[0, :7, h].numpy(), v[0, :7, h].numpy()
        ridge = np.sqrt(1e-3) * np.linalg.norm(keys, axis=1).max()
        weights = np.linalg.lstsq(
            np.concatenate([keys, ridge * np.eye(RANK)]), np.concatenate([values, np.zeros((RANK, WIDTH))]), rcond=None
        )[0]
        assert_close(y[0, :, h], q[0, 7:, h] @ torch.from_numpy(weights), EXACT)


def test_normalising_by_the_sequence_is_a_ridge():
    """Dividing keys and queries by the largest norm m, with ridge ε, equals raw ones with the ridge ε m²."""
    q, k, v = inputs(12, batch=1)
    y, _ = koopman_attention(q, k, v, chunk_size=3, normalization="sequence")
    m = k.square().sum(-1).amax(1, keepdim=True).sqrt().unsqueeze(-1)
    padded = [torch.cat([q / m, torch.zeros_like(q[:, :1])], 1), torch.cat([k / m, 0 * k[:, :1]], 1)]
    for t in range(3, 12):
        stop = t // 3 * 3
        for h in range(HEADS):
            keys = padded[1][0, :stop, h]
            before = torch.cat([torch.zeros_like(keys[:1]), keys[:-1]])
            inverse = torch.linalg.inv(keys.T @ keys + 1e-3 * torch.eye(RANK, dtype=keys.dtype))
            x = inverse @ padded[0][0, t, h]
            for _ in range(2):
                x = inverse @ (keys.T @ before) @ x
            assert_close(y[0, t, h], v[0, :stop, h].T @ keys @ x, INVERTED)


@pytest.mark.parametrize("chunk_size", [1, 3, 4, 16])
@each_fast_form
def test_streams_like_the_full_pass(chunk_size, backend):
    run = op(chunk_size=chunk_size, gamma=1.1, mix=0.8, backend=backend)
    assert_streams(run, form_inputs(backend, 11, grad=True), NATIVE if backend == "native" else EXACT)


@pytest.mark.parametrize("power", [0, 2])
def test_gradients_flow_through_rank_one_updates(power):
    """Token by token, all inputs and settings get gradients, through the factor of the token before."""
    x = inputs(9, grad=True)
    settings = {name: torch.tensor([a, b], dtype=torch.float64, requires_grad=True) for name, a, b in
                (("gamma", 1.1, 1.4), ("mix", 0.3, 0.9))}  # fmt: skip
    run = op(refresh="token", power=power, **settings)
    whole, last = run(x, None)
    y, state = run_pieces(run, x, range(10))
    leaves = [*x, *settings.values()]
    for got, wanted in zip(grads(y, leaves), grads(whole, leaves), strict=True):
        assert_close(got, wanted, EXACT)
    for name in COMMITTED:
        for got, wanted in zip(grads(state[name], x), grads(last[name], x), strict=True):
            assert_close(got, wanted, EXACT)


@pytest.mark.parametrize("growing", [False, True])
@each_fast_form
def test_an_operator_a_token_by_rank_one_updates(growing, backend):
    """Every token equals the loop, with norms that sometimes grow and with norms that always grow."""
    q, k, v = form_inputs(backend, 24)
    if growing:
        k = k / k.norm(dim=-1, keepdim=True) * torch.arange(1, 25, dtype=k.dtype)[:, None, None]
    options = {"refresh": "token", "backend": backend}
    y, _ = run_pieces(op(**options), (q, k, v), range(25))
    expected = loop(*wide((q, k, v)), 1)
    assert_form(backend, y, expected, EXACT)
    assert_form(backend, koopman_attention(q, k, v, **options)[0], expected, EXACT)


@torch.no_grad()
def test_rank_one_updates_do_not_drift():
    """After 2,000 tokens in float32, the updated factor and a new factorisation both give exact outputs."""
    x, state = inputs(2001, batch=1, dtype=torch.float32), None
    options = {"refresh": "token", "output_final_state": True}
    for t in range(2000):
        _, state = koopman_attention(*(part[:, t : t + 1] for part in x), initial_state=state, **options)
    last = [part[:, 2000:] for part in x]
    followed, anew = (koopman_attention(*last, initial_state=s, **options)[0] for s in (state, remembered(state)))
    exact, _ = koopman_attention(*(part.double() for part in x), refresh="token")
    ridge, _ = koopman_attention(*(part.double() for part in x), refresh="token", power=0)
    for y in (followed, anew):
        assert (y - exact[:, 2000:]).abs().max() <= SINGLE * ridge[:, 2000:].abs().max()


@torch.no_grad()
def test_the_tokens_of_a_chunk_share_a_factorisation(monkeypatch):
    """With one operator per chunk, a step is O(r²) except where a chunk ends and where the next one begins."""
    x, whole = inputs(21), koopman_attention(*inputs(21), chunk_size=5)[0]
    first, state = koopman_attention(*(part[:, :6] for part in x), chunk_size=5, output_final_state=True)
    calls, cholesky, outputs = [], solve.cholesky, [first]
    monkeypatch.setattr(solve, "cholesky", lambda gram: calls.append(t) or cholesky(gram))
    for t in range(6, 21):
        one = [part[:, t : t + 1] for part in x]
        y, state = koopman_attention(*one, chunk_size=5, initial_state=state, output_final_state=True)
        outputs.append(y)
    assert calls == [6, 9, 10, 14, 15, 19, 20]
    assert_close(torch.cat(outputs, 1), whole, EXACT)


@torch.no_grad()
def test_a_factorisation_is_reused_for_the_same_sums_only():
    """It is not used after a change in place, with another ridge or norm, or where gradients flow."""
    x = inputs(6)
    _, state = koopman_attention(*(part[:, :5] for part in x), chunk_size=4, output_final_state=True)
    one = [part[:, 5:] for part in x]

    def read(state, **options):
        fresh = {name: part.clone() for name, part in state.items()}
        y, expected = (koopman_attention(*one, chunk_size=4, initial_state=s, **options)[0] for s in (state, fresh))
        assert_same(y, expected)
        return y

    found = [read(state), read(state, ridge=0.1), read({**state, "norm": 2 * state["norm"]})]
    with torch.inference_mode():
        assert_same(read(state), found[0])
    with torch.enable_grad():
        leaf = {**state, "gram": state["gram"].requires_grad_()}
        (grad,) = torch.autograd.grad(read(leaf).sum(), leaf["gram"])
        assert grad.any()
    state["gram"].requires_grad_(False).mul_(2)
    found.append(read(state))
    assert all((a - b).abs().max() > 1e-6 for i, a in enumerate(found) for b in found[:i])


@pytest.mark.parametrize("rank", [1, 2, 8, 64])
def test_rank_one_update(rank):
    a = torch.randn(3, rank, rank, generator=generator("rank one", rank), dtype=torch.float64)
    z = torch.randn(3, rank, generator=generator("rank one z", rank), dtype=torch.float64)
    gram = a @ a.mT + 0.1 * torch.eye(rank, dtype=torch.float64)
    before, expected = (torch.linalg.inv(torch.linalg.cholesky(a)).mT for a in (gram, gram + z[..., None] * z[:, None]))
    assert_close(rank_one(before, z), expected, 4 * 1e-13)


def test_a_prefix_is_the_next_chunk():
    """A whole prefix has one operator, which other queries read. There is a state before it and one after it."""
    q, k, v = inputs(9)
    more = inputs(4, batch=2)
    y, state = koopman_attention(more[0], k, v, mode="prefix", output_final_state=True)
    padded = [torch.cat([a, b], 1) for a, b in zip((q, k, v), more, strict=True)]
    assert_close(y, koopman_attention(*padded, chunk_size=9)[0][:, 9:], EXACT)
    first, before = koopman_attention(q[:, :4], k[:, :4], v[:, :4], mode="prefix", output_final_state=True)
    assert first.shape == (2, 4, HEADS, WIDTH)
    again, last = koopman_attention(
        more[0], k[:, 4:], v[:, 4:], mode="prefix", initial_state=before, output_final_state=True
    )
    assert_close(again, y, EXACT)
    assert_close(last, state, EXACT)


@pytest.mark.parametrize(("keys", "queries"), [(0, 3), (1, 1), (9, 70), (70, 9), (130, 140)])
@pytest.mark.parametrize("begun", [False, True])
@each_fast_form
def test_a_prefix_in_every_form(keys, queries, begun, backend):
    """Outputs, states and gradients, after waiting tokens, with more or fewer queries than keys, and with a mask."""
    q, k, v = form_inputs(backend, max(keys, queries), grad=True)
    settings = [torch.tensor([0.9, 1.1]), torch.tensor([0.6, 1.0])]
    mask = torch.rand(2, keys, generator=generator("prefix mask", keys)) < 0.8
    state = koopman_attention(*inputs(11), chunk_size=8, output_final_state=True)[1] if begun else None

    def run(x, backend):
        q, k, v, gamma, mix, *first = x
        options = {"mode": "masked", "mask": mask, "chunk_size": 8, "output_final_state": True, "backend": backend}
        initial = {**state, **dict(zip(SUMS, first, strict=True))} if begun else None
        y, last = koopman_attention(
            q[:, :queries], k[:, :keys], v[:, :keys], gamma=gamma, mix=mix, initial_state=initial, **options
        )
        used = sum((x * torch.linspace(0.5, 1, x.numel()).view(x.shape)).sum() for x in (last["gram"], last["norm"]))
        names = ["q", "k", "v", "gamma", "mix", *SUMS]
        return y, last, dict(zip(names, grads(torch.cat([y.flatten(), used.view(1)]), x), strict=False))

    SUMS = ["gram", "transition", "values", "norm", "last", "pending_keys", "pending_values"]
    leaves = [q, k, v, *settings, *(state[name] for name in SUMS if begun)]
    leaves = [x.detach().to(q.dtype).requires_grad_() for x in leaves]
    got, expected = run(leaves, backend), run(wide(leaves), "reference")
    for part, other in zip(got, expected, strict=True):
        assert_form(backend, part, other, INVERTED)


@pytest.mark.parametrize("chunk_size", [1, 2, 5, 7, 64])
@each_fast_form
def test_packed_equals_separate(chunk_size, backend):
    """A second call continues from the first, so that states with unequal numbers of pending tokens are tested."""
    options = {"chunk_size": chunk_size, "backend": backend}
    tolerance = NATIVE if backend == "native" else EXACT
    state, alone = assert_packs(op(**options), lambda batch, length: form_inputs(backend, length, batch), tolerance)
    for row, own in enumerate(alone):
        assert_close({name: part[row : row + 1] for name, part in state.items()}, remembered(own), tolerance)
    x, bounds = form_inputs(backend, 9, 1), torch.tensor([0, 2, 5, 5, 9])
    reference, _ = koopman_attention(*x, cu_seqlens=bounds, **(options | {"backend": "reference"}))
    ridge, _ = koopman_attention(*x, cu_seqlens=bounds, power=0, **options)
    assert_form(backend, koopman_attention(*x, cu_seqlens=bounds, **options)[0], reference, EXACT, whole=ridge)


@pytest.mark.parametrize("chunk_size", [1, 4, 7, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_later_tokens_and_other_documents_change_nothing(chunk_size, dtype):
    """Outputs do not change by a bit when later tokens or other documents do. The gradient across is exactly 0."""
    q, k, v = inputs(17, batch=1, dtype=dtype)
    before, _ = koopman_attention(q, k, v, chunk_size=chunk_size)
    for cut in range(17):
        changed = [torch.cat([x[:, :cut], x[:, cut:] + 1], 1).requires_grad_() for x in (q, k, v)]
        after, _ = koopman_attention(*changed, chunk_size=chunk_size)
        assert_same(after[:, :cut], before[:, :cut])
        assert all(g[:, cut:].count_nonzero() == 0 for g in grads(after[:, :cut], changed))
    changed, bounds = [x.clone().requires_grad_() for x in (q, k, v)], torch.tensor([0, 9, 17])
    packed, _ = koopman_attention(*changed, chunk_size=chunk_size, cu_seqlens=bounds)
    assert all(g[:, :9].count_nonzero() == 0 for g in grads(packed[:, 9:], changed))


def test_normalising_by_the_sequence_leaks_the_future():
    q, k, v = inputs(12, dtype=torch.float32)
    longer = torch.cat([k[:, :-1], 10 * k[:, -1:]], 1)
    leaks = [koopman_attention(q, x, v, chunk_size=2, normalization="sequence")[0][:, :11] for x in (k, longer)]
    assert (leaks[0] - leaks[1]).abs().max() > 1e-3


@pytest.mark.parametrize("mode", ["masked", "chunk"])
def test_a_mask_leaves_tokens_out_of_the_sums(mode):
    """Excluded tokens have no effect, as if their keys were zero. No pair crosses them, and they still get outputs."""
    q, k, v = inputs(10)
    mask = torch.ones(2, 10)
    mask[:, 3:6] = 0
    zeroed = k * mask[..., None, None]
    if mode == "masked":
        y, _ = koopman_attention(q, k, v, mode="masked", mask=mask)
        keys, values = zeroed[0, :, 0], v[0, :, 0]
        assert_close(y[0, 0, 0], long_form(keys, values, q[0, 0, 0], 1, 1, 1e-3, 2), EXACT)
        return
    y, state = koopman_attention(q, k, v, mask=mask, chunk_size=2, output_final_state=True)
    expected, last = koopman_attention(q, zeroed, v, chunk_size=2, output_final_state=True)
    assert_same(y, expected)
    assert_same(state, last)


@pytest.mark.parametrize("chunk_size", [1, 3])
@each_fast_form
def test_a_mask_of_packed_sequences(chunk_size, backend):
    """In pieces of a sequence, masked tokens may be pending or last. Any mask value but 0 includes a token."""
    bounds, state, alone = torch.tensor([0, 4, 4, 11]), None, [None] * 3
    for seed in range(2):
        x = form_inputs(backend, 11, batch=1)
        mask = torch.rand(1, 11, generator=generator("packed mask", seed)) < 0.5
        options = {"chunk_size": chunk_size, "output_final_state": True}
        y, state = koopman_attention(
            *x, mask=2.0 * mask, cu_seqlens=bounds, initial_state=state, backend=backend, **options
        )
        for row, tokens in enumerate(slices(bounds.tolist())):
            own = [part[:, tokens] for part in x]
            expected, alone[row] = koopman_attention(
                *own, mask=mask[:, tokens], initial_state=alone[row], backend="reference", **options
            )
            assert_form(backend, y[:, tokens], expected, EXACT, whole=y)
            assert_form(
                backend, {name: part[row : row + 1] for name, part in state.items()}, remembered(alone[row]), EXACT
            )


def test_what_a_mask_leaves_out_may_be_anything():
    q, k, v = inputs(10)
    mask = torch.ones(2, 10, dtype=torch.bool)
    mask[:, 4] = False
    wrong = k.clone()
    wrong[:, 4] = torch.inf
    assert_same(koopman_attention(q, wrong, v, mask=mask, chunk_size=2)[0],
                koopman_attention(q, k, v, mask=mask, chunk_size=2)[0])  # fmt: skip


def extreme(kind, scale, length):
    """Return float32 queries, keys and values with gradients; keys and queries are of a `kind`, times `scale`."""
    q, k, v = inputs(length, dtype=torch.float32)
    if kind == "zero":
        k = k * 0
    elif kind == "one direction":
        k = k[:, :1].expand_as(k)
    elif kind == "mixed":  # norms within one sequence go from one end of the scale to the other
        exponents = torch.linspace(-6, 6, length) - np.clip(np.log10(scale), -6, 6)
        k = k * 10.0 ** exponents[:, None, None]
    elif kind == "mixed, falling":
        k = k * 10.0 ** -torch.linspace(0, 12, length)[:, None, None]
    return [(scale * q).requires_grad_(), (scale * k).requires_grad_(), v.clone().requires_grad_()]


SCALES = (1e-12, 1e-6, 1.0, 1e6, 1e12)
KINDS = ("random", "zero", "one direction", "mixed", "mixed, falling")


@crossed(scale=SCALES, kind=KINDS, length=[0, 1, 4, 20], chunk_size=[1, 3])
@each_fast_form
def test_extreme_keys_give_finite_outputs_and_gradients(scale, kind, length, chunk_size, backend):
    """Some sequences have fewer keys than the rank."""
    x, options = extreme(kind, scale, length), {"chunk_size": chunk_size, "gamma": 1.5, "backend": backend}
    y, state = koopman_attention(*x, output_final_state=True, **options)
    assert y.isfinite().all()
    assert all(part.isfinite().all() for part in state.values())
    assert all(g.isfinite().all() for g in grads(y, x))
    if kind == "random":  # the scale of keys and queries drops out
        assert_close(y, koopman_attention(*extreme(kind, 1, length), **options)[0], 10 * SINGLE)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("kind", KINDS)
def test_extreme_keys_one_at_a_time(scale, kind):
    """Rank-one updates, with new factorisations where norms grow, agree with the float64 loop."""
    x = extreme(kind, scale, 20)
    y, _ = run_pieces(op(refresh="token"), x, range(21))
    assert y.isfinite().all()
    assert all(g.isfinite().all() for g in grads(y, x))
    exact = [part.detach().double() for part in x]
    expected, _ = koopman_attention(*exact, refresh="token")
    ridge, _ = koopman_attention(*exact, refresh="token", power=0)
    assert (y - expected).abs().max() <= STEPPED * ridge.abs().max()


@pytest.mark.parametrize("length", [3, 40])
def test_float32_and_autocast(length):
    exact, _ = koopman_attention(*inputs(length), chunk_size=2)
    single, _ = koopman_attention(*inputs(length, dtype=torch.float32), chunk_size=2)
    ridge, _ = koopman_attention(*inputs(length), chunk_size=2, power=0)
    assert (single - exact).abs().max() <= SINGLE * ridge.abs().max()
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(koopman_attention(*inputs(length, dtype=torch.float32), chunk_size=2)[0], single)
    rounded = inputs(length, dtype=torch.bfloat16)
    narrow, state = koopman_attention(*rounded, chunk_size=2, output_final_state=True)
    assert narrow.dtype == torch.bfloat16
    assert all(x.dtype == torch.float32 for x in state.values() if x.is_floating_point())
    # The op computes in float32, so that only the output is rounded, by 2^−9.
    wide, _ = koopman_attention(*(x.float() for x in rounded), chunk_size=2)
    assert ((narrow - wide).abs() <= 2**-8 * wide.abs()).all()


@each_fast_form
def test_a_factorisation_that_fails_is_repeated_and_counted(backend):
    """The ridge is below the rounding errors of a long sum. The result is no NaN, and the retries are counted."""
    q, k, v = inputs(400, batch=1, dtype=torch.float32)
    k = k[:, :1].expand_as(k) + 1e-5 * k
    result = attend(KoopmanCall(q, k, v, ridge=1e-12, chunk_size=50), backend)
    assert result.retries > 0
    assert result.y.isfinite().all()
    assert attend(KoopmanCall(q, k, v, chunk_size=50), backend).retries == 0
    k[:, 3] = torch.nan
    assert_raises(ValueError, "not finite", koopman_attention, q, k, v, chunk_size=50, backend=backend)


@pytest.mark.parametrize("normalization", ["causal", pytest.param("sequence", marks=pytest.mark.slow), "trace"])
@pytest.mark.parametrize("fast", slow_beyond([True], [True, False]))
def test_gradcheck(normalization, fast):
    """Along random directions, and entry by entry."""
    x = inputs(6, batch=1, grad=True)
    settings = [torch.tensor([1.1, 1.4], dtype=torch.float64, requires_grad=True),
                torch.tensor([0.3, 0.9], dtype=torch.float64, requires_grad=True)]  # fmt: skip

    def run(q, k, v, gamma, mix):
        options = {"gamma": gamma, "mix": mix, "chunk_size": 2, "ridge": 0.1, "normalization": normalization}
        return koopman_attention(q, k, v, **options)[0]

    assert torch.autograd.gradcheck(run, [*x, *settings], fast_mode=fast)


needs_native = pytest.mark.skipif("native" not in FORMS, reason="the native kernels are not built here")


def everything(x, **options):
    """Outputs, the final state, and the gradients of one loss of them."""
    gamma, mix = (torch.tensor(pair, requires_grad=True) for pair in ([1.1, 1.4], [0.3, 0.9]))
    heads = x[0].shape[2]
    y, state = koopman_attention(*x, gamma=gamma[:heads], mix=mix[:heads], output_final_state=True, **options)
    parts = torch.cat([y.flatten(), *(state[name].to(y.dtype).flatten() for name in COMMITTED)])
    given = grads(parts, [*x, gamma, mix])
    return {"y": y, **state, **dict(zip(("dq", "dk", "dv", "dgamma", "dmix"), given, strict=True))}


@needs_native
@pytest.mark.parametrize("form", [{}, {"refresh": "token"}, {"mode": "prefix"}])
@pytest.mark.parametrize("normalization", ["causal", "sequence"])
def test_native_gives_the_same_bits_for_one_thread_and_two(form, normalization):
    """With two heads, which go to one thread each, and with one, whose chunks the threads share."""
    options = {"chunk_size": 4, "normalization": normalization, "backend": "native", **form}
    threads = torch.get_num_threads()
    for heads in (1, 2):
        found = []
        for count in (1, 2, 2):
            torch.set_num_threads(count)
            x = [part[:, :, :heads].requires_grad_() for part in inputs(150, batch=1, dtype=torch.float32)]
            found.append(everything(x, **options))
        torch.set_num_threads(threads)
        assert_same(found[1], found[0])
        assert_same(found[2], found[0])


@needs_native
@pytest.mark.parametrize("form", [{}, {"refresh": "token"}, {"mode": "prefix"}])
@pytest.mark.parametrize(("rank", "width"), [(1, 7), (80, 16), (16, 80)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_takes_any_head_size(form, rank, width, dtype):
    """Products of bfloat16 tokens are exact, and the rest is float32: results are rounded once, by 2^−9."""
    draw = generator("native", rank, width)
    shapes = (rank, rank, width)
    x = [torch.randn(2, 37, 2, n, generator=draw).to(dtype).requires_grad_() for n in shapes]
    options = {"chunk_size": 5, "ridge": 0.1, **form}
    got = everything(x, backend="native", **options)
    expected = everything(x, backend="chunked", **options)
    assert_close(got, expected, 2**-8 if dtype == torch.bfloat16 else NATIVE)


@each_fast_form
@pytest.mark.parametrize("form", [{}, {"refresh": "token"}, {"mode": "prefix"}, {"normalization": "sequence"}])
def test_keys_whose_squares_are_no_normal_numbers(form, backend):
    """They count as zero: the squared norm is 1e-40, whose inverse is infinite in float32."""
    q, k, v = inputs(12, dtype=torch.float32)
    k = (1e-20 * k).requires_grad_()
    y, state = koopman_attention(q, k, v, chunk_size=4, backend=backend, output_final_state=True, **form)
    y.sum().backward()
    assert y.abs().max() <= 1e-15
    assert k.grad.isfinite().all()
    with torch.no_grad():
        one = [part[:, :1] for part in (q, k, v)]
        assert koopman_attention(*one, chunk_size=4, initial_state=state, backend=backend, **form)[0].isfinite().all()


@needs_native
@torch.no_grad()
@pytest.mark.parametrize("refresh", ["chunk", "token"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_steps_are_those_of_python(refresh, dtype):
    """Outputs and states of single tokens, for keys that end a chunk too."""
    x, states = inputs(20, dtype=dtype), {"native": None, "chunked": None}
    options = {"chunk_size": 4, "refresh": refresh, "gamma": 1.2, "mix": 0.4, "output_final_state": True}
    outputs = {backend: [] for backend in states}
    for t in range(20):
        one = [part[:, t : t + 1] for part in x]
        for backend, state in states.items():
            y, states[backend] = koopman_attention(*one, initial_state=state, backend=backend, **options)
            outputs[backend].append(y.float())
    y, expected = (torch.cat(outputs[backend], 1) for backend in ("native", "chunked"))
    assert_close(y, expected, 2**-8 if dtype == torch.bfloat16 else NATIVE)
    assert_close(states["native"], states["chunked"], NATIVE)


@needs_native
@pytest.mark.parametrize(("refresh", "step"), [("chunk", "wait"), ("token", "enter")])
def test_native_ops_are_well_formed(refresh, step):
    """Calls of a sequence with its gradients, and of single tokens without."""
    x, options = inputs(9, dtype=torch.float32, grad=True), {"chunk_size": 2, "refresh": refresh, "backend": "native"}
    found = check_custom_ops(lambda: everything(x, **options))
    assert found == {"koopman", "koopman_backward"}
    with torch.no_grad():
        found = check_custom_ops(lambda: run_pieces(op(**options), x, [0, 3, 4, 5]))
    assert found == {"koopman", f"koopman_{step}"}


@needs_native
def test_the_most_sums_that_are_saved_follow_from_shapes(monkeypatch):
    """While torch.compile traces, their number is unknown: it depends on the counts of pending tokens."""
    build.load()
    real, saved = torch.ops.halflife.koopman, []
    monkeypatch.setattr(torch.ops.halflife, "koopman", lambda *given: saved.append(real(*given)) or saved[-1])
    for length, bounds, chunk_size in ((300, None, 1), (300, None, 4), (300, [0, 7, 300], 4), (9, None, 64)):
        x = inputs(length, batch=1, dtype=torch.float32, grad=True)
        call = KoopmanCall(*x, chunk_size=chunk_size, cu_seqlens=None if bounds is None else torch.tensor(bounds))
        attend(call, "native")
        assert len(saved[-1][-3]) == _most_borders(call, prefix=False)
    assert _most_borders(call, prefix=True) == 1


@needs_native
def test_native_says_what_it_does_not_take():
    assert_raises(
        ValueError, "float32, bfloat16 and float16; got float64", koopman_attention, *inputs(4), backend="native"
    )


def test_native_refuses_options_that_it_does_not_know():
    """A later field of the call must not be read and ignored."""

    @dataclass(frozen=True)
    class Later(KoopmanCall):
        twist: float = 0.0

    x = inputs(4, dtype=torch.float32)
    assert "twist=1.0" in why_not("koopman_attention", torch.device("cpu"), Later(*x, twist=1.0))
    assert "twist" not in (why_not("koopman_attention", torch.device("cpu"), Later(*x)) or "")


@cases(
    "change, message",
    ({"mode": "prefixed"}, "unknown mode.*chunk, prefix, masked"),
    ({"refresh": "never"}, "unknown refresh"),
    ({"normalization": "batch"}, "unknown normalization"),
    ({"backend": "cuda"}, "unknown backend"),
    ({"mode": "masked"}, "needs a mask"),
    ({"mask": torch.ones(2, 3)}, r"mask must be None or \[B, T\] = \[2, 4\]"),
    ({"chunk_size": 0}, "chunk_size must be an integer of at least 1"),
    ({"power": -1}, "power must be an integer of at least 0; got -1"),
    ({"gamma": torch.ones(3)}, r"gamma must be a number or \[1\] or \[H\] = \[2\]; got \[3\]"),
    ({"gamma": torch.ones(1, 2)}, r"gamma must be .*; got \[1, 2\]"),
    ({"mix": torch.ones(3)}, r"mix must be .* got \[3\]"),
    ({"mix": torch.ones(2, 2)}, r"mix must be .*\[K \+ 1, H\] = \[3, 2\]; got \[2, 2\]"),
    ({"mix": torch.ones(3, 2), "backend": "native"}, "auto, chunked, reference"),
    ({"ridge": 0}, "ridge must be greater than 0; got 0"),
    ({"cu_seqlens": torch.tensor([0, 4])}, "batch size 1"),
    ({"initial_state": {}}, r"initial_state\['gram'\] must be .* got nothing"),
)
def test_bad_arguments(change, message):
    assert_raises(ValueError, message, koopman_attention, *inputs(4), **change)


def test_bad_shapes():
    q, k, v = inputs(4)
    for arguments, message in (
        ((q[..., :2], k, v), "k must be"), ((q, k, v[:, :2]), "v must be"), ((q[:, :2], k, v), "one length"),
    ):  # fmt: skip
        assert_raises(ValueError, message, unchecked(koopman_attention), *arguments)
    _, state = koopman_attention(q, k, v, chunk_size=2, output_final_state=True)
    assert_raises(ValueError, "pending_keys", koopman_attention, q, k, v, chunk_size=4, initial_state=state)


def test_counts_of_pending_tokens_in_another_dtype():
    """A state that was stored may have them in int32."""
    q, k, v = torch.randn(3, 1, 6, 2, 5)
    _, state = koopman_attention(q, k, v, chunk_size=4, output_final_state=True)
    narrow = {**state, "pending": state["pending"].int()}
    for count in (1, 6):
        tokens = [x[:, :count] for x in (q, k, v)]
        expected, after = koopman_attention(*tokens, chunk_size=4, initial_state=state, output_final_state=True)
        found, last = koopman_attention(*tokens, chunk_size=4, initial_state=narrow, output_final_state=True)
        assert_same({"y": found, **last}, {"y": expected, **after})
