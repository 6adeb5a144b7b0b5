"""A cut sequence equals the whole one, packed equals separate, and nothing flows backwards or between sequences."""

import pytest
import torch
from helpers import (
    OPS,
    assert_close,
    assert_same,
    bound,
    each_backend,
    each_granularity,
    each_op,
    leaves,
    op_inputs,
    rounded,
    slices,
    widest,
    with_grads,
)
from hypothesis import given, settings
from hypothesis import strategies as st

# float64; four times the worst measured error, relative to the largest entry.
EXACT = 4 * 1.3e-15


def piece(arguments, tokens, state):
    """Return the arguments of one piece of the tokens, with the given initial state."""
    parts = {name: x[:, tokens] for name, x in arguments.items() if name != "initial_state"}
    return {**parts, "initial_state": state}


@settings(max_examples=15, deadline=None, database=None, derandomize=True)
@given(st.lists(st.integers(0, 40), max_size=5).map(sorted), st.sampled_from([1, 4, 16]))
@each_op
@each_granularity
def test_cut_anywhere_equals_uncut(op, granularity, cuts, chunk_size):
    arguments = leaves(op_inputs(op, granularity, 40))
    options = {"output_final_state": True, "chunk_size": chunk_size}
    state, outputs = arguments["initial_state"], []
    for tokens in slices([0, *cuts, 40]):
        o, state = OPS[op](**piece(arguments, tokens, state), **options)
        outputs.append(o)
    got = with_grads((torch.cat(outputs, 1), state), arguments)
    assert_close(got, with_grads(OPS[op](**arguments, **options), arguments), EXACT)


@settings(max_examples=8, deadline=None, database=None, derandomize=True)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=5), st.sampled_from([1, 4, 16]))
@each_op
@each_granularity
@each_backend
def test_packed_equals_separate(op, granularity, backend, lengths, chunk_size):
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    arguments = leaves(widest(backend, op_inputs(op, granularity, bounds[-1], sequences=len(lengths))))
    options = {"output_final_state": True, "chunk_size": chunk_size, "backend": backend}
    packed = OPS[op](**arguments, cu_seqlens=torch.tensor(bounds, dtype=torch.int32), **options)
    separate = [
        OPS[op](**piece(arguments, tokens, arguments["initial_state"][row : row + 1]), **options)
        for row, tokens in enumerate(slices(bounds))
    ]
    joined = torch.cat([o for o, _ in separate], 1), torch.cat([state for _, state in separate])
    assert_close(with_grads(packed, arguments), with_grads(joined, arguments), bound(backend, EXACT))


@each_op
@each_backend
def test_packed_nothing(op, backend):
    arguments = widest(backend, op_inputs(op, "scalar", 0, sequences=2))
    o, state = OPS[op](**arguments, cu_seqlens=torch.tensor([0, 0, 0]), output_final_state=True, backend=backend)
    assert o.shape == arguments["v"].shape
    assert_same(state, arguments["initial_state"])


@each_op
@each_granularity
@each_backend
@pytest.mark.parametrize("cut", [1, 17, 64, 100])
def test_prefix_does_not_move_when_the_suffix_does(op, granularity, backend, cut):
    arguments = rounded(op_inputs(op, granularity, 130), torch.float32)
    before, _ = OPS[op](**arguments, chunk_size=32, backend=backend)
    for x in piece(arguments, slice(cut, None), None).values():
        if x is not None:
            x.mul_(3)
    after, _ = OPS[op](**arguments, chunk_size=32, backend=backend)
    assert_same(after[:, :cut], before[:, :cut])
    assert not torch.equal(after[:, cut:], before[:, cut:])


@each_op
@each_granularity
@each_backend
def test_packed_documents_do_not_leak(op, granularity, backend):
    """The decay is so slow that a leak would be visible. Gradients do not cross either."""
    bounds, others = [0, 20, 57, 90], [0, 2]
    arguments = widest(backend, op_inputs(op, granularity, 90, sequences=3, decay=-1e-4))
    options = {"cu_seqlens": torch.tensor(bounds), "chunk_size": 16, "output_final_state": True, "backend": backend}
    changed = {name: x.clone() for name, x in arguments.items()}
    for name, x in piece(changed, slice(20, 57), changed["initial_state"][1:2]).items():
        x.mul_(2).add_(-0.01 if name == "g" else 0.1)
    changed = leaves(changed)
    (o, state), (o2, state2) = OPS[op](**arguments, **options), OPS[op](**changed, **options)
    for row in others:
        tokens = slices(bounds)[row]
        assert_same({"o": o2[:, tokens], "state": state2[row]}, {"o": o[:, tokens], "state": state[row]})
    loss = o2[:, :20].sum() + o2[:, 57:].sum() + state2[others].sum()
    grads = dict(zip(changed, torch.autograd.grad(loss, list(changed.values())), strict=True))
    for x in piece(grads, slice(20, 57), grads["initial_state"][1]).values():
        assert x.count_nonzero() == 0
