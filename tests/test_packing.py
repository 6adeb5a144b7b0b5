"""`Packing`: where the sequences of a batch lie, checked and read from the device once."""

import pytest
import torch
from helpers import assert_raises, cases

from halflife import LanguageModel, ops, preset
from halflife.packing import Packing

BOUNDS = torch.tensor([0, 3, 3, 10])


@pytest.fixture
def reads(monkeypatch):
    """The number of times that boundaries are read from their device, as a list of one entry a read."""
    found, read = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: found.append(1) or read(x))
    return found


def test_packed_sequences():
    packing = Packing.of(BOUNDS, 1, 10)
    assert (packing.num_sequences, packing.bounds, packing.counts) == (3, [0, 3, 3, 10], [3, 0, 7])
    assert list(packing.pieces())[2] == (slice(2, 3), slice(3, 10))
    assert packing.lengths(BOUNDS.device).tolist() == [3, 0, 7]
    assert packing.sequence.tolist() == [0] * 3 + [2] * 7
    start = torch.tensor([5, 0, 1])
    assert packing.positions(None, BOUNDS.device).tolist() == [[*range(1, 4), *range(1, 8)]]
    assert packing.positions(start, BOUNDS.device).tolist() == [[*range(6, 9), *range(2, 9)]]
    x, first = torch.arange(1.0, 11).view(1, 10, 1), torch.tensor([[-1.0], [-2.0], [-3.0]])
    before, last = packing.delay(x, first)
    assert before.flatten().tolist() == [-1, 1, 2, -3, 4, 5, 6, 7, 8, 9]
    assert last.flatten().tolist() == [3, -2, 10]
    assert packing.repeated(2).bounds == [0, 6, 6, 20]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.uint16], ids=str)
def test_boundaries_of_any_integer_dtype(dtype):
    """torch adds such boundaries with overflow, or not at all."""
    packing = Packing.of(torch.tensor([0, 30, 200], dtype=dtype), 1, 200)
    assert packing.positions(None, BOUNDS.device).tolist() == [[*range(1, 31), *range(1, 171)]]
    assert packing.repeated(300).bounds == [0, 9000, 60000]


def test_rows():
    packing = Packing.of(None, 2, 3)
    assert (packing.num_sequences, packing.counts, list(packing.pieces())) == (2, [3, 3], [(slice(None), slice(0, 3))])
    assert packing.lengths(BOUNDS.device).tolist() == [3, 3]
    assert packing.positions(None, BOUNDS.device).tolist() == [1, 2, 3]
    assert packing.positions(torch.tensor([4, 0]), BOUNDS.device).tolist() == [[5, 6, 7], [1, 2, 3]]
    assert packing.positions(None, BOUNDS.device) is packing.positions(None, BOUNDS.device)
    start = torch.tensor([4, 0])
    assert packing.ends(None, BOUNDS.device).tolist() == [3, 3]
    assert packing.ends(start, BOUNDS.device).tolist() == [7, 3]
    for of in (packing.positions, packing.ends):  # shared by layers with the same start, and by no others
        assert of(start, BOUNDS.device) is of(start, BOUNDS.device)
        assert of(start + 1, BOUNDS.device).tolist() == (of(start, BOUNDS.device) + 1).tolist()
    before, last = packing.delay(torch.arange(1.0, 7).view(2, 3, 1), None)
    assert (before.flatten().tolist(), last.flatten().tolist()) == ([0, 1, 2, 0, 4, 5], [3, 6])
    assert packing.repeated(3).length == 9


@cases(
    "packed, batch, error, message",
    ([0, 10], 1, TypeError, "cu_seqlens must be a torch.Tensor of integers; got list"),
    (torch.tensor([0.0, 10.0]), 1, ValueError, "cu_seqlens must be integers; got torch.float32"),
    (torch.tensor([[0, 10]]), 1, ValueError, r"integers \[N \+ 1\]"),
    (torch.tensor([0, 7, 3, 10]), 1, ValueError, r"must rise from 0 to T = 10; got \[0, 7, 3, 10\]"),
    (torch.tensor([0, 9]), 1, ValueError, "must rise from 0 to T = 10"),
    (torch.tensor([0, 10]), 2, ValueError, "batch size 1"),
    (Packing(1, 9), 1, ValueError, r"this Packing of 1 rows of 9 tokens is not for tokens \[1, 10\]"),
    (Packing(1, 9, torch.tensor([0, 9])), 1, ValueError, r"this Packing of 1 sequences in 9 tokens"),
)
def test_what_is_no_packing_is_refused(packed, batch, error, message):
    assert_raises(error, message, Packing.of, packed, batch, 10)


def test_boundaries_are_checked_and_read_once(reads):
    """Three ops, two of which need the boundaries as numbers; a packing is returned itself."""
    packing = Packing.of(BOUNDS, 1, 10)
    assert Packing.of(packing, 1, 10) is packing
    q, gate = torch.randn(1, 10, 2, 16), -torch.rand(1, 10, 2)
    for backend in ("chunked", "reference"):
        ops.linear_attention(q, q, q, gate, cu_seqlens=packing, backend=backend)
        ops.gate_rank(q, q, q, gate, gate, cu_seqlens=packing, backend=backend, reset_law="printed")
    ops.causal_conv1d(q.flatten(2), torch.randn(32, 4), cu_seqlens=packing)
    assert len(reads) == 1


@pytest.mark.parametrize("op", ["log_linear_attention", "ridge_attention", "koopman_attention"])
def test_every_op_takes_a_packing(op):
    q, beta = torch.randn(1, 10, 2, 4, dtype=torch.float64), torch.rand(1, 10, 2, dtype=torch.float64)
    more = {
        "log_linear_attention": (-beta, torch.rand(1, 10, 2, 4, dtype=torch.float64)),
        "ridge_attention": (-beta, beta, torch.ones(2, 4, dtype=torch.float64)),
        "koopman_attention": (),
    }[op]
    y, _ = getattr(ops, op)(q, q, q, *more, cu_seqlens=Packing.of(BOUNDS, 1, 10))
    assert torch.equal(y, getattr(ops, op)(q, q, q, *more, cu_seqlens=BOUNDS)[0])


@pytest.mark.parametrize("name", ["mamba2+post+gate_rank", "gated_deltanet", "rwkv7", "gla", "mamba3", "simple+rope"])
def test_a_model_reads_the_boundaries_once(name, monkeypatch):
    """On a GPU each read would wait for the device."""
    model = LanguageModel(preset(name, hidden_size=32, num_layers=4, vocab_size=8, num_heads=2))
    read, tolist = [], torch.Tensor.tolist

    def spy(x):
        read.append(x)
        return tolist(x)

    monkeypatch.setattr(torch.Tensor, "tolist", spy)
    bounds = torch.tensor([0, 3, 3, 9])
    model(torch.zeros(1, 9, dtype=torch.long), cu_seqlens=bounds)
    assert sum(x is bounds for x in read) == 1
    assert len(read) == 1
