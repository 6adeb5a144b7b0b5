"""A cascade of states: token loop, mask and chunks, GateRank as the case of two states, ranks, and the layer."""

from itertools import pairwise, product

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, assert_same, unchecked, with_grads

import halflife
from halflife.analysis.masks import block_ranks, capture_gates, head_masks
from halflife.layers import build
from halflife.layers.memory.cascade import Cascade
from halflife.layers.memory.log_linear import LogLinear
from halflife.ops import cascade, gate_rank
from halflife.ops.backends.native import build as build_of_kernels
from halflife.ops.cascade.forms import weights
from halflife.ops.cascade.op import transitions

EXACT = 4 * 3e-15  # four times the worst measured error, relative to the largest entry
CHUNKED = ("mask", "chunked")
LENGTHS, STATES, CHUNKS, CUTS = (1, 2, 5, 16, 33), (1, 2, 3, 4), (1, 4, 16), (0, 1, 7)


def arguments(length, states, delta, batch=2, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape, of=torch.rand):
        return of(*shape, generator=generator, dtype=torch.float64)

    q, k = (F.normalize(draw(batch, length, 2, 3, of=torch.randn), dim=-1) for _ in range(2))
    v, g = draw(batch, length, 2, 4, of=torch.randn), -0.3 * draw(batch, length, 2, states)
    r, beta = draw(batch, length, 2, states - 1), draw(batch, length, 2)
    return [x.detach().requires_grad_() for x in (q, k, v, g, r, *([beta] if delta else []))]


def compare(backend, length, states, chunk, cut, delta):
    """Outputs, final states and gradients of two pieces against the token loop of the whole."""
    inputs, cut = arguments(length, states, delta), min(cut, length)
    options = {"backend": backend, "chunk_size": chunk, "output_final_state": True}
    expected = cascade(*inputs, backend="reference", output_final_state=True)
    first, between = cascade(*(x[:, :cut] for x in inputs), **options)
    second, final = cascade(*(x[:, cut:] for x in inputs), initial_state=between, **options)
    found = torch.cat([first, second], 1), final
    assert_close(found[0], expected[0], EXACT)
    assert_close(found[1], expected[1], EXACT)
    named = {str(i): x for i, x in enumerate(inputs) if x.numel()}
    assert_close(with_grads(found, named), with_grads(expected, named), EXACT)


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("backend", CHUNKED)
@pytest.mark.parametrize(
    ("length", "states", "chunk", "cut"), [(33, 3, 16, 7), (5, 1, 4, 1), (16, 4, 1, 0), (1, 2, 4, 0)]
)
def test_pieces_equal_the_token_loop(backend, length, states, chunk, cut, delta):
    compare(backend, length, states, chunk, cut, delta)


@pytest.mark.slow
@pytest.mark.parametrize(("delta", "backend"), product([False, True], CHUNKED))
def test_pieces_of_all_sizes_equal_the_token_loop(backend, delta):
    for sizes in product(LENGTHS, STATES, CHUNKS, CUTS):
        compare(backend, *sizes, delta)


@pytest.mark.parametrize("backend", CHUNKED)
def test_packed_sequences_are_independent(backend):
    inputs, bounds = arguments(40, 3, True, batch=1), torch.tensor([0, 3, 3, 20, 40])
    options = {"backend": backend, "chunk_size": 4, "output_final_state": True}
    first, states = cascade(*inputs, cu_seqlens=bounds, **options)
    second, _ = cascade(*inputs, cu_seqlens=bounds, initial_state=states, **options)
    for row, (start, stop) in enumerate(pairwise(bounds.tolist())):
        piece = [x[:, start:stop] for x in inputs]
        o, state = cascade(*piece, backend="reference", output_final_state=True)
        assert_close(states[row : row + 1], state, EXACT)
        if start < stop:
            assert_close(first[:, start:stop], o, EXACT)
            again, _ = cascade(*piece, backend="reference", initial_state=state)
            assert_close(second[:, start:stop], again, EXACT)


@pytest.mark.parametrize("delta", [False, True])
def test_two_states_with_hard_resets_are_gate_rank(delta):
    q, k, v, g, r, *beta = arguments(30, 2, delta)
    resets = r[..., 0] < 0.2
    slow = torch.where(resets, g[..., 1], 0)
    expected, (fast_state, slow_state) = gate_rank(
        q, k, v, slow, g[..., 0], *beta, backend="reference", output_final_state=True
    )
    both = torch.stack([g[..., 0], slow], -1)
    o, states = cascade(q, k, v, both, resets.double().unsqueeze(-1), *beta, output_final_state=True)
    assert_close(o, expected, EXACT)
    assert_close(states, torch.stack([fast_state, slow_state], 2), EXACT)


@pytest.mark.parametrize("backend", CHUNKED)
def test_erased_states_are_exact_zeros(backend):
    """Log-decays of −inf, −1000 and 0, and shares of 0 and 1."""
    inputs = [x.detach() for x in arguments(33, 3, True)]
    inputs[3][:, 9], inputs[3][:, 17, :, 1], inputs[3][:, 20:] = -torch.inf, -1000, 0
    inputs[4].round_()
    expected, state = cascade(*inputs, backend="reference", output_final_state=True)
    o, final = cascade(*inputs, backend=backend, chunk_size=8, output_final_state=True)
    assert o.isfinite().all()
    assert_close(o, expected, EXACT)
    assert_close(final, state, EXACT)


@pytest.mark.parametrize("states", [1, 2, 3, 4])
def test_the_rank_of_the_mask_is_the_number_of_states(states):
    """Blocks below the diagonal have rank N at most, and some have rank N."""
    *_, g, r = (x.detach() for x in arguments(64, states, False))
    mask = weights(transitions(g, r).transpose(1, 2)).pairs
    assert block_ranks(mask, 16).max() == states


# ------------------------------------------------------------------------------------- compiled kernels

# Four times the worst measured error, relative to the largest entry.
NATIVE = {torch.float32: 4 * 9.5e-7, torch.bfloat16: 4 * 1.3e-2}
built = pytest.mark.skipif(build_of_kernels.why_not() is not None, reason=f"{build_of_kernels.why_not()}")


def compare_native(length, states, chunk, delta, dtype=torch.float32, erased=False, cu_seqlens=None):
    """Outputs, final states and all gradients against the token loop in float64, from the same rounded inputs."""
    inputs = [x.detach() for x in arguments(length, states, delta, batch=2 if cu_seqlens is None else 1)]
    if erased:
        inputs[3][:, 0], inputs[3][:, length // 2, :, 0], inputs[3][:, 2 * length // 3 :] = -torch.inf, -1000, 0
        inputs[4].round_()
    sequences = 2 if cu_seqlens is None else len(cu_seqlens) - 1
    state = torch.randn(sequences, 2, states, 3, 4, generator=torch.Generator().manual_seed(1))
    results = []
    for backend, wide in (("native", dtype), ("reference", torch.float64)):
        leaves = [x.to(dtype).to(wide).requires_grad_() for x in inputs]
        first = state.to(torch.float32 if backend == "native" else wide).requires_grad_()
        found = cascade(*leaves, backend=backend, chunk_size=chunk, initial_state=first, cu_seqlens=cu_seqlens,
                        output_final_state=True)  # fmt: skip
        named = {str(i): x for i, x in enumerate(leaves) if x.numel()} | {"state": first}
        results.append({name: x.double() for name, x in with_grads(found, named).items()})
    assert_close(*results, NATIVE[dtype])


@built
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize(("length", "states", "chunk", "dtype", "erased"), [
    (33, 3, 16, torch.float32, False), (70, 2, 64, torch.float32, True), (1, 8, 16, torch.float32, False),
    (50, 5, 16, torch.bfloat16, False),
])  # fmt: skip
def test_kernels_equal_the_token_loop(delta, length, states, chunk, dtype, erased):
    compare_native(length, states, chunk, delta, dtype, erased)


@built
@pytest.mark.slow
@pytest.mark.parametrize(("delta", "dtype", "erased"), product([False, True], NATIVE, [False, True]))
def test_kernels_of_all_sizes_equal_the_token_loop(delta, dtype, erased):
    for length, states, chunk in product((1, 2, 16, 33, 150), (1, 2, 3, 8), (16, 64, 128)):
        compare_native(length, states, chunk, delta, dtype, erased)


@built
def test_kernels_take_packed_sequences():
    compare_native(40, 3, 16, True, cu_seqlens=torch.tensor([0, 3, 3, 20, 40]))


@built
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("dtype", NATIVE)
def test_single_tokens_take_the_native_step(delta, dtype):
    inputs = [x.detach().to(dtype) for x in arguments(9, 3, delta)]
    state, outputs = None, []
    for t in range(9):
        o, state = cascade(*(x[:, t : t + 1] for x in inputs), initial_state=state, output_final_state=True)
        outputs.append(o.double())
    wide = [x.double() for x in inputs]
    expected, final = cascade(*wide, backend="reference", output_final_state=True)
    assert_close(torch.cat(outputs, 1), expected, NATIVE[dtype])
    assert_close(state.double(), final, 4 * 2e-7)


@built
@pytest.mark.parametrize("heads", [1, 3])
def test_threads_change_no_bit(heads):
    inputs = [x.detach().float().repeat_interleave(2, 2)[:, :, :heads] for x in arguments(200, 3, True)]
    before, results = torch.get_num_threads(), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        leaves = [x.clone().requires_grad_() for x in inputs]
        found = cascade(*leaves, backend="native", output_final_state=True)
        results.append(with_grads(found, {str(i): x for i, x in enumerate(leaves)}))
    torch.set_num_threads(before)
    assert_same(*results)


def test_kernels_refuse_what_they_cannot_do():
    inputs = [x.detach() for x in arguments(3, 9, False)]
    with pytest.raises(ValueError, match=r"float32|at most 8 states"):
        cascade(*inputs, backend="native")
    assert cascade(*inputs)[0].dtype == torch.float64


def test_arguments_are_checked():
    q, k, v, g, r, beta = (x.detach() for x in arguments(5, 3, True))
    with pytest.raises(ValueError, match=r"r \[B, T, H, N − 1\]"):
        unchecked(cascade)(q, k, v, g, r[..., :1])
    with pytest.raises(ValueError, match="positive"):
        unchecked(cascade)(q, k, v, -g, r)
    with pytest.raises(ValueError, match="initial_state must be"):
        unchecked(cascade)(q, k, v, g, r, beta, initial_state=torch.zeros(2, 2, 2, 3, 4))


# ----------------------------------------------------------------------------------------------- layer

SIZES = {"hidden_size": 32, "num_layers": 2, "vocab_size": 31, "num_heads": 4, "train_length": 16}


@pytest.mark.parametrize("name", ["mamba2+cascade", "gated_deltanet+cascade+post", "simple+scalar+cascade"])
@pytest.mark.parametrize("resets", ["hard", "soft"])
def test_models_stream(name, resets):
    torch.manual_seed(0)
    options = {"cascade": {"resets": resets, "reset_rate": 0.4}}
    model = halflife.LanguageModel(halflife.preset(name, **SIZES, mixer_options=options)).double()
    ids = torch.randint(31, (2, 40))
    whole, _ = model(ids)
    first, state = model(ids[:, :13])
    assert_close(torch.cat([first, model(ids[:, 13:], state)[0]], 1), whole, 1e-12)
    whole.square().sum().backward()
    gates = model.blocks[0].mixer.cascade.gates
    assert all(gate.bias.grad.isfinite().all() for gate in gates)


def test_a_layer_with_two_states_is_that_of_gate_rank():
    def layer(**options):
        torch.manual_seed(0)
        return build("mamba2", hidden_size=32, num_heads=4, **options).double()

    wide, two = layer(gate_rank={"reset_rate": 0.3}), layer(cascade={"num_states": 2, "reset_rate": 0.3})
    names = {"gate_rank.slow_gate": "cascade.gates.0", "gate_rank": "cascade"}
    state = {}
    for key, x in wide.state_dict().items():
        old = next((old for old in names if key.startswith(old)), "")
        state[names.get(old, "") + key.removeprefix(old)] = x
    two.load_state_dict(state)
    x = torch.randn(2, 40, 32, dtype=torch.float64)
    assert_close(two(x)[0], wide(x)[0], 1e-12)


def test_closed_soft_gates_have_a_gradient():
    """A hard gate that is closed at every token has none."""
    for resets, learns in (("hard", False), ("soft", True)):
        torch.manual_seed(0)
        layer = build("mamba2", hidden_size=32, num_heads=4, cascade={"resets": resets})
        with torch.no_grad():
            for gate in layer.cascade.gates:
                gate.bias.fill_(-20.0 if resets == "hard" else -3.0)
        layer(torch.randn(2, 16, 32))[0].square().sum().backward()
        found = max(gate.bias.grad.abs().max().item() for gate in layer.cascade.gates)
        assert (found > 0) == learns


def test_options_without_meaning_are_errors():
    for options, message in (
        ({"cascade": {"num_states": 1}}, "at least 2 states; got num_states = 1"),
        ({"cascade": {"resets": "some"}}, "one of hard, soft; got 'some'"),
        ({"cascade": {}, "gate_rank": {}}, "one kind of states; got gate_rank and cascade"),
        ({"cascade": {"reset_rate": 2}}, "between 0 and 1; got 2"),
    ):
        with pytest.raises(ValueError, match=message):
            build("mamba2", hidden_size=32, **options)
    with pytest.raises(ValueError, match="cascade needs a scalar decay"):
        build("linear", hidden_size=32, granularity="vector", cascade={})


@pytest.mark.parametrize(("kind", "options", "block", "rank"), [
    (Cascade, {"num_states": 3, "resets": "soft"}, 16, 3), (Cascade, {"num_states": 2, "reset_rate": 0.4}, 16, 2),
    (LogLinear, {}, 16, 1), (LogLinear, {}, 11, 3),
])  # fmt: skip
def test_the_mask_of_a_layer_is_what_it_applies(kind, options, block, rank):
    """With log-linear attention, blocks of 2^n tokens are on one level, and others have a rank up to log T."""
    torch.manual_seed(0)
    module = kind(32, 2, **options).double()
    x, g = torch.randn(1, 40, 32, dtype=torch.float64), -0.3 * torch.rand(1, 40, 2, dtype=torch.float64)
    q, k, v = (torch.randn(1, 40, 2, 5, dtype=torch.float64) for _ in range(3))
    o, _ = module(x, q, k, v, g, None, {}, None, scale=1)
    mask = torch.mul(*module.masks(x, g))
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    assert_close(o.transpose(1, 2), (q @ k.transpose(-1, -2) * mask) @ v, EXACT)
    assert block_ranks(mask, block).max() == rank


def test_the_masks_of_a_model_have_the_ranks_of_its_states():
    torch.manual_seed(0)
    options = {"cascade": {"num_states": 3, "resets": "soft"}}
    model = halflife.LanguageModel(halflife.preset("mamba2+cascade", **SIZES, mixer_options=options))
    gates = capture_gates(model, torch.randint(31, (2, 48)))
    assert [head.rank_max for layer in gates for head in head_masks(layer, 16)] == [3] * 8
