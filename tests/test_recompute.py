"""What the backward pass computes again: no gradient changes by a bit, and as many bytes fewer are kept."""

import pytest
import torch

from halflife.models import PRESETS, LanguageModel, preset
from halflife.ops import linear
from halflife.ops.backends import dispatch, recompute
from halflife.ops.backends.dispatch import run_pass
from halflife.training.config import ExecutionConfig
from halflife.training.estimate import LiveBytes

SIZES = {"vocab_size": 32, "hidden_size": 64, "num_layers": 2}
PACKED = torch.tensor([0, 5, 100, 128])


def gradients(model, rows, bounds, call, bf16=False):
    """The gradients of a pass, and the bytes that live between its forward and its backward half."""
    model.zero_grad()
    ids = torch.randint(32, (rows, 128), generator=torch.Generator().manual_seed(1))
    with LiveBytes([ids, *model.parameters(), *model.buffers()]) as counter:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            hidden, state = model.hidden(ids, cu_seqlens=bounds, call=call)
        final = sum(x.double().sum() for part in state for x in part.values() if x.requires_grad)
        loss = hidden.double().square().sum() + final
        del hidden, state, final
        kept = counter.live
        loss.backward()
    return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}, kept


def same(model, rows, bounds, kinds, bf16=False):
    """The share of the bytes that is kept with `kinds`, where no gradient differs by a bit."""
    expected, whole = gradients(model, rows, bounds, None, bf16)
    found, held = gradients(model, rows, bounds, recompute.calling(kinds), bf16)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected), kinds
    return held / whole


slow = pytest.mark.slow
# The largest shares with all kinds are 0.72, 0.72, 0.72, 0.71, 0.95, 0.65 and 0.93.
MODELS = [
    ("mamba2", 0.75), ("gated_deltanet", 0.75), pytest.param("mamba2+post+gate_rank", 0.75, marks=slow),
    ("mamba2+ska", 0.75), pytest.param("rwkv7", 0.96, marks=slow), pytest.param("gla", 0.7, marks=slow),
    pytest.param("llama", 0.95, marks=slow), pytest.param("mesa", 1, marks=slow), pytest.param("kda", 1, marks=slow),
]  # fmt: skip


@pytest.mark.parametrize(("name", "most"), MODELS)
@pytest.mark.parametrize("backend", ["auto", pytest.param("chunked", marks=slow)])
def test_gradients_are_equal_to_the_bit(name, most, backend):
    torch.manual_seed(0)
    model = LanguageModel(preset(name, **SIZES, mixer_options={"backend": backend}))
    assert same(model, 1, PACKED, dispatch.KINDS) < most
    for kind in dispatch.KINDS:
        assert same(model, 2, None, [kind]) < 1.001  # where nothing is of the kind, a scalar more


def test_under_autocast():
    torch.manual_seed(0)
    assert same(LanguageModel(preset("mamba2", **SIZES)), 2, None, dispatch.KINDS, bf16=True) < 0.8


def test_an_autocast_of_the_backward_pass_is_not_the_regions():
    dtypes = []

    def function(x):
        y = x @ x
        dtypes.append(y.dtype)
        return y.exp()

    x = torch.randn(4, 4, requires_grad=True)
    with recompute.recomputing(["op"]):
        loss = dispatch.again.run(function, [x]).sum()
    with torch.autocast("cpu", torch.bfloat16):
        loss.backward()
    assert dtypes == [torch.float32, torch.float32]


def test_a_region_runs_once_for_all_that_was_saved_of_it():
    calls = []

    def function(x, weight):
        calls.append(x)
        return (x * weight).exp(), x.sin()

    x, weight = torch.randn(5, requires_grad=True), torch.randn(5, requires_grad=True)
    expected = torch.autograd.grad((function(x, weight)[0].square() * function(x, weight)[1].cos()).sum(), (x, weight))
    calls.clear()
    with recompute.recomputing(["op"]):
        a, b = dispatch.again.run(function, [x, weight])
        loss = (a.square() * b.cos()).sum()
    del a, b
    for again in range(2):  # a second backward pass computes it once more
        found = torch.autograd.grad(loss, (x, weight), retain_graph=True)
        assert all(map(torch.equal, found, expected))
        assert len(calls) == 2 + again


def test_results_that_were_changed_in_place_are_kept():
    x = torch.randn(2, 4096, requires_grad=True)
    with recompute.recomputing(["norms"]):
        y = run_pass("l2_normalize", "chunked", (x * 1.0,), 1e-6)
        z = y.mul_(2)
        loss = z.square().sum()
    (found,) = torch.autograd.grad(loss, x)
    y = 2 * run_pass("l2_normalize", "chunked", (x,), 1e-6)
    (expected,) = torch.autograd.grad(y.square().sum(), x)
    assert torch.equal(found, expected)


def test_an_input_that_was_changed_in_place_is_an_error():
    x = torch.randn(2, 4096)
    weight = torch.ones(4096, requires_grad=True)
    with recompute.recomputing(["norms"]):
        loss = run_pass("rms_norm", "chunked", (x, weight), 1e-6).square().sum()
    x.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()


def test_unknown_kinds_are_named():
    with pytest.raises(ValueError, match=r"norm.*norms"):
        ExecutionConfig(recompute=("norm",))


@pytest.mark.parametrize("bf16", [True, False])
@pytest.mark.parametrize("name", ["mamba2", "llama", *[pytest.param(name, marks=slow) for name in PRESETS]])
def test_blocks_run_again_where_a_gpu_would(name, bf16, monkeypatch):
    """From the first step on, with maps of one input in one product, under autocast and in a model of 16 bits."""

    def step(again):
        call = recompute.calling(["blocks"]) if again else lambda block, *args, **options: block(*args, **options)
        return gradients(model, 1, None, call, not bf16)[0]

    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    monkeypatch.setattr(linear, "PAYING_TOKENS", 0)
    torch.manual_seed(0)
    model = LanguageModel(preset(name, **SIZES)).to(torch.bfloat16 if bf16 else torch.float32)
    for _ in range(2):  # the second time it is known which maps read one input
        found, expected = step(True), step(False)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
