"""Spectral Koopman attention against the paper's long form, a loop that solves every prefix, numpy, and itself."""

import numpy as np
import pytest
import torch
from helpers import assert_close, assert_same, generator, slices, unchecked

from halflife.ops import koopman
from halflife.ops.koopman import koopman_attention
from halflife.ops.koopman_state import rank_one

HEADS, RANK, WIDTH = 2, 5, 3

# Four times the worst measured, relative to the largest entry.
EXACT = 4 * 1.4e-11  # float64: an operator of a few keys has the condition 1/ε
INVERTED = 4 * 2e-9  # against forms that multiply by explicit inverses, gradients included
SINGLE = 4 * 3e-5  # float32 against float64, relative to what K = 0 reads: the power filter may leave next to nothing


def inputs(length, batch=2, dtype=torch.float64, grad=False):
    draw = generator("koopman", length, batch)
    q, k = torch.randn(2, batch, length, HEADS, RANK, generator=draw, dtype=torch.float64)
    v = torch.randn(batch, length, HEADS, WIDTH, generator=draw, dtype=torch.float64)
    return [x.to(dtype).requires_grad_(grad) for x in (q, k, v)]


def long_form(keys, values, query, gamma, mix, ridge, power):
    """One head, as the paper writes it (Appendix I): whitened operator, its power, and back."""
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
    """Every token's operator from the chunks before its own, solved anew by the long form."""
    y = []
    for t in range(q.shape[1]):
        stop = t // chunk_size * chunk_size
        rows = [
            long_form(k[b, :stop, h], v[b, :stop, h], q[b, t, h], gamma, mix, ridge, power)
            if stop else q.new_zeros(WIDTH)
            for b in range(q.shape[0]) for h in range(HEADS)
        ]  # fmt: skip
        y.append(torch.stack(rows).view(q.shape[0], HEADS, WIDTH))
    return torch.stack(y, 1) if y else v[:, :0]


def grads(y, leaves):
    weights = torch.randn(y.shape, generator=generator("weights"), dtype=torch.float64).to(y.dtype)
    loss = (y * weights).sum()
    return torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True, materialize_grads=True)


# ---------------------------------------------------------------------------------------- the definition


@pytest.mark.parametrize("power", [0, 1, 2, 4])
@pytest.mark.parametrize(("gamma", "mix"), [(1.0, 1.0), (1.5, 1.0), (1.2, 0.3), (1.0, 0.0)])
@pytest.mark.parametrize("backend", ["chunked", "reference"])
def test_four_lines_are_the_papers_long_form(power, gamma, mix, backend):
    settings = {"gamma": gamma, "mix": mix, "power": power}
    x = inputs(9, grad=True)
    expected = loop(*x, 2, **settings)
    y, _ = koopman_attention(*x, chunk_size=2, backend=backend, **settings)
    assert_close(y, expected, INVERTED)
    for got, wanted in zip(grads(y, x), grads(expected, x), strict=True):
        assert_close(got, wanted, INVERTED)


@pytest.mark.parametrize("length", [0, 1, 2, 7, 8, 9])
@pytest.mark.parametrize("chunk_size", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("normalization", ["causal", "sequence"])
def test_chunked_is_the_reference(length, chunk_size, normalization):
    options = {"chunk_size": chunk_size, "normalization": normalization, "output_final_state": True}
    y, state = koopman_attention(*inputs(length), **options)
    expected, last = koopman_attention(*inputs(length), backend="reference", **options)
    assert_close(y, expected, EXACT)
    assert_close(state, last, EXACT)


def test_settings_of_each_head():
    q, k, v = inputs(8)
    gamma, mix = torch.tensor([1.0, 1.4]), torch.tensor([1.0, 0.2])
    y, _ = koopman_attention(q, k, v, gamma=gamma, mix=mix, chunk_size=2)
    for h in range(HEADS):
        one = [x[:, :, h : h + 1] for x in (q, k, v)]
        alone, _ = koopman_attention(*one, gamma=gamma[h].item(), mix=mix[h].item(), chunk_size=2)
        assert_close(y[:, :, h : h + 1], alone, 1e-6)  # the settings are float32


def test_without_power_it_is_ridge_regression():
    """K = 0 is the least-squares solution of the system augmented by the ridge, by numpy (Proposition I.2)."""
    q, k, v = inputs(7, batch=1)
    y, _ = koopman_attention(q, k, v, power=0, mode="prefix")
    for h in range(HEADS):
        keys, values = k[0, :, h].numpy(), v[0, :, h].numpy()
        ridge = np.sqrt(1e-3) * np.linalg.norm(keys, axis=1).max()
        weights = np.linalg.lstsq(
            np.concatenate([keys, ridge * np.eye(RANK)]), np.concatenate([values, np.zeros((RANK, WIDTH))]), rcond=None
        )[0]
        assert_close(y[0, :, h], q[0, :, h] @ torch.from_numpy(weights), EXACT)


def test_normalising_by_the_sequence_is_a_ridge():
    """Keys and queries divided by the largest norm, ridge ε, is raw keys and queries with the ridge ε m²."""
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


def test_the_whitened_operator_never_expands():
    """σ_max(A_w) ≤ 1 for any keys: the paper's spectral normalisation cannot act (math.md §5)."""
    for trial in range(200):
        draw = generator("contraction", trial)
        keys = torch.randn(1 + trial % 17, RANK, generator=draw, dtype=torch.float64) * 10 ** (trial % 5 - 2)
        before = torch.cat([torch.zeros_like(keys[:1]), keys[:-1]])
        m = keys.norm(dim=-1).max()
        factor = torch.linalg.cholesky(keys.T @ keys + 1e-3 * m**2 * torch.eye(RANK, dtype=torch.float64))
        inverse = torch.linalg.inv(factor)
        assert torch.linalg.matrix_norm(inverse @ keys.T @ before @ inverse.T, 2) <= 1


# --------------------------------------------------------------------------------------------- streaming


@pytest.mark.parametrize("chunk_size", [1, 3, 4, 16])
def test_streams_like_the_full_pass_at_every_cut(chunk_size):
    x = inputs(11, grad=True)
    options = {"chunk_size": chunk_size, "gamma": 1.1, "mix": 0.8, "output_final_state": True}
    whole, last = koopman_attention(*x, **options)
    for cut in range(12):
        first, state = koopman_attention(*(t[:, :cut] for t in x), **options)
        second, state = koopman_attention(*(t[:, cut:] for t in x), initial_state=state, **options)
        y = torch.cat([first, second], 1)
        assert_close(y, whole, EXACT)
        assert_close(state, last, EXACT)
        if cut in (4, 5):
            for got, wanted in zip(grads(y, x), grads(whole, x), strict=True):
                assert_close(got, wanted, EXACT)


@pytest.mark.parametrize("growing", [False, True])
def test_an_operator_a_token_by_rank_one_updates(growing):
    """Every token against the loop, with norms that sometimes grow, and always."""
    q, k, v = inputs(24)
    if growing:
        k = k / k.norm(dim=-1, keepdim=True) * torch.arange(1, 25, dtype=torch.float64)[:, None, None]
    state, outputs = None, []
    for t in range(24):
        y, state = koopman_attention(
            *(x[:, t : t + 1] for x in (q, k, v)), refresh="token", initial_state=state, output_final_state=True
        )
        outputs.append(y)
    assert_close(torch.cat(outputs, 1), loop(q, k, v, 1), EXACT)
    assert_close(koopman_attention(q, k, v, refresh="token")[0], loop(q, k, v, 1), EXACT)


@pytest.mark.parametrize("rank", [1, 2, 8, 64])
def test_rank_one_update(rank):
    a = torch.randn(3, rank, rank, generator=generator("rank one", rank), dtype=torch.float64)
    z = torch.randn(3, rank, generator=generator("rank one z", rank), dtype=torch.float64)
    gram = a @ a.mT + 0.1 * torch.eye(rank, dtype=torch.float64)
    expected = torch.linalg.cholesky(gram + z.unsqueeze(-1) * z.unsqueeze(-2))
    assert_close(rank_one(torch.linalg.cholesky(gram), z), expected, 4 * 1e-13)


def test_a_prefix_is_the_next_chunk():
    """One operator for a whole prefix, read by queries of their own, with a state before it and one after it."""
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


def test_a_state_has_as_many_numbers_as_the_paper_says():
    _, state = koopman_attention(*inputs(130), chunk_size=64, output_final_state=True)
    committed = sum(state[name][0].numel() for name in ("gram", "transition", "values", "last", "norm"))
    assert committed == HEADS * (2 * RANK**2 + WIDTH * RANK + RANK + 1)
    assert state["pending"].tolist() == [2, 2]


# ------------------------------------------------------------------------------------- packing and masks


@pytest.mark.parametrize("chunk_size", [1, 2, 5])
def test_packed_equals_separate(chunk_size):
    """Twice in a row, so that states with unequal pending chunks are tested."""
    options = {"chunk_size": chunk_size, "output_final_state": True}
    state, alone = None, [None] * 4
    for lengths in ([5, 0, 1, 7], [2, 3, 0, 4]):
        bounds = torch.tensor([0, *lengths]).cumsum(0)
        x = inputs(sum(lengths), batch=1)
        y, state = koopman_attention(*x, cu_seqlens=bounds, initial_state=state, **options)
        for row, tokens in enumerate(slices(bounds.tolist())):
            expected, alone[row] = koopman_attention(*(t[:, tokens] for t in x), initial_state=alone[row], **options)
            assert_close(y[:, tokens], expected, EXACT)
            assert_close({name: part[row : row + 1] for name, part in state.items()}, alone[row], EXACT)
    reference, _ = koopman_attention(*x, cu_seqlens=bounds, backend="reference", **options)
    assert_close(koopman_attention(*x, cu_seqlens=bounds, **options)[0], reference, EXACT)


@pytest.mark.parametrize("chunk_size", [1, 4])
def test_later_tokens_move_nothing_and_other_documents_neither(chunk_size):
    """To the bit, and the gradient across is exactly 0."""
    q, k, v = inputs(17, batch=1, dtype=torch.float32)
    changed = [torch.cat([x[:, :9], x[:, 9:] + 1], 1).requires_grad_() for x in (q, k, v)]
    before, _ = koopman_attention(q, k, v, chunk_size=chunk_size)
    after, _ = koopman_attention(*changed, chunk_size=chunk_size)
    assert_same(after[:, :9], before[:, :9])
    assert all(g[:, 9:].count_nonzero() == 0 for g in grads(after[:, :9], changed))
    bounds = torch.tensor([0, 9, 17])
    packed, _ = koopman_attention(*changed, chunk_size=chunk_size, cu_seqlens=bounds)
    assert all(g[:, :9].count_nonzero() == 0 for g in grads(packed[:, 9:], changed))


def test_normalising_by_the_sequence_leaks_the_future():
    q, k, v = inputs(12, dtype=torch.float32)
    longer = torch.cat([k[:, :-1], 10 * k[:, -1:]], 1)
    leaks = [koopman_attention(q, x, v, chunk_size=2, normalization="sequence")[0][:, :11] for x in (k, longer)]
    assert (leaks[0] - leaks[1]).abs().max() > 1e-3


@pytest.mark.parametrize("mode", ["masked", "chunk"])
def test_a_mask_leaves_tokens_out_of_the_sums(mode):
    """Left-out tokens are as if their keys were zero: no pair crosses them; their own output still is theirs."""
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


# ---------------------------------------------------------------------------------------------- numerics


@pytest.mark.parametrize("scale", [1e-12, 1e-6, 1.0, 1e6, 1e12])
@pytest.mark.parametrize("kind", ["random", "zero", "one direction", "mixed"])
def test_extreme_keys_give_finite_outputs_and_gradients(scale, kind):
    q, k, v = inputs(20, dtype=torch.float32)
    if kind == "zero":
        k = k * 0
    elif kind == "one direction":
        k = k[:, :1].expand_as(k)
    elif kind == "mixed":
        exponents = torch.linspace(-6, 6, 20) - np.clip(np.log10(scale), -6, 6)
        k = k * 10.0 ** exponents[:, None, None]
    x = [(scale * q).requires_grad_(), (scale * k).requires_grad_(), v.clone().requires_grad_()]
    y, _ = koopman_attention(*x, chunk_size=3, gamma=1.5)
    assert y.isfinite().all()
    assert all(g.isfinite().all() for g in grads(y, x))
    if kind == "random":  # the scale of keys and queries drops out
        assert_close(y, koopman_attention(q, k, v, chunk_size=3, gamma=1.5)[0], 10 * SINGLE)


@pytest.mark.parametrize("length", [3, 40])
def test_float32_and_autocast(length):
    exact, _ = koopman_attention(*inputs(length), chunk_size=2)
    single, _ = koopman_attention(*inputs(length, dtype=torch.float32), chunk_size=2)
    ridge, _ = koopman_attention(*inputs(length), chunk_size=2, power=0)
    assert (single - exact).abs().max() <= SINGLE * ridge.abs().max()
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(koopman_attention(*inputs(length, dtype=torch.float32), chunk_size=2)[0], single)
    narrow, state = koopman_attention(*inputs(length, dtype=torch.bfloat16), chunk_size=2, output_final_state=True)
    assert narrow.dtype == torch.bfloat16
    assert all(x.dtype == torch.float32 for x in state.values() if x.is_floating_point())


def test_a_factorisation_that_fails_is_repeated_and_counted():
    """A ridge below the rounding errors of a long sum: not silent, and not NaN."""
    q, k, v = inputs(400, batch=1, dtype=torch.float32)
    k = k[:, :1].expand_as(k) + 1e-5 * k
    before = koopman.retries
    y, _ = koopman_attention(q, k, v, ridge=1e-12, chunk_size=50)
    assert koopman.retries > before
    assert y.isfinite().all()
    k[:, 3] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        koopman_attention(q, k, v, chunk_size=50)


def test_gradcheck():
    x = inputs(6, batch=1, grad=True)
    settings = [torch.tensor([1.1, 1.4], dtype=torch.float64, requires_grad=True),
                torch.tensor([0.3, 0.9], dtype=torch.float64, requires_grad=True)]  # fmt: skip

    def run(q, k, v, gamma, mix):
        return koopman_attention(q, k, v, gamma=gamma, mix=mix, chunk_size=2, ridge=0.1)[0]

    assert torch.autograd.gradcheck(run, [*x, *settings])


# ------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mode": "prefixed"}, "unknown mode.*chunk, prefix, masked"),
        ({"refresh": "never"}, "unknown refresh"),
        ({"normalization": "batch"}, "unknown normalization"),
        ({"backend": "triton"}, "unknown backend"),
        ({"mode": "masked"}, "needs a mask"),
        ({"mask": torch.ones(2, 3)}, r"mask must be \[B, T\]"),
        ({"chunk_size": 0}, "chunk_size ≥ 1"),
        ({"power": -1}, "power ≥ 0"),
        ({"ridge": 0}, "ridge > 0"),
        ({"cu_seqlens": torch.tensor([0, 4])}, "batch size 1"),
        ({"initial_state": {}}, r"initial_state\['gram'\] must be .* got nothing"),
    ],
)
def test_bad_arguments(change, message):
    with pytest.raises(ValueError, match=message):
        koopman_attention(*inputs(4), **change)


def test_bad_shapes():
    q, k, v = inputs(4)
    for arguments, message in (
        ((q[..., :2], k, v), "q and k"), ((q, k, v[:, :2]), "v must be"), ((q[:, :2], k, v), "one length"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            unchecked(koopman_attention)(*arguments)
    _, state = koopman_attention(q, k, v, chunk_size=2, output_final_state=True)
    with pytest.raises(ValueError, match="pending_keys"):
        koopman_attention(q, k, v, chunk_size=4, initial_state=state)
