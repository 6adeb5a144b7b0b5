"""Koopman attention as accelerators run it, where the host waits for no value, against the definition."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import assert_close, assert_packs, assert_raises, assert_streams, generator
from pairwise import crossed

from halflife import layers
from halflife.ops import arguments
from halflife.ops.backends import triton
from halflife.ops.koopman import KoopmanCall, attend, koopman_attention
from halflife.ops.koopman.call import NORMALIZATIONS
from halflife.ops.koopman.readout import KoopmanReadout
from halflife.ops.koopman.state import Sums
from halflife.packing import Packing

HEADS, RANK, WIDTH = 2, 5, 3
EXACT = 4 * 2e-9  # float64, with explicit inverses of matrices whose condition number is up to 1/ε
SINGLE = 4 * 1.4e-5  # the kernels in float32
WEIGHTS = [None, "beta", "scalar", "vector"]


@pytest.fixture
def accelerator(monkeypatch):
    """The values of tensors of a CPU are not at hand either."""
    monkeypatch.setattr(arguments, "HOSTS", set())


def inputs(length, weights=None, batch=2, device="cpu"):
    draw = generator("koopman device", length, weights)
    shapes = {"q": (RANK,), "k": (RANK,), "v": (WIDTH,)}
    x = {name: torch.randn(batch, length, HEADS, *shape, generator=draw).double() for name, shape in shapes.items()}
    if weights:
        x["beta"] = torch.rand(batch, length, HEADS, generator=draw).double() + 0.1
    if weights in ("scalar", "vector"):
        x["g"] = -torch.rand(*x["k"].shape[: 3 if weights == "scalar" else 4], generator=draw).double()
        x["g"][:, 4:5, 0] = -torch.inf
    return {name: part.to(device).requires_grad_() for name, part in x.items()}


def op(**settings):
    def run(x, state, **packed):
        return koopman_attention(**x, initial_state=state, output_final_state=True, **settings, **packed)

    return run


def results(x, **settings):
    """Outputs, the state, and the gradients of both."""
    y, state = koopman_attention(**x, output_final_state=True, **settings)
    state.pop("inverse", None)
    parts = [y, *(part for name, part in sorted(state.items()) if name != "pending")]
    draw = generator("gradients")
    loss = sum((part * torch.randn(part.shape, generator=draw).double()).sum() for part in parts)
    given = torch.autograd.grad(loss, list(x.values()), materialize_grads=True)
    return {"y": y, **state, **dict(zip((f"d{name}" for name in x), given, strict=True))}


@crossed(
    strength=1, length=[0, 1, 3, 8, 9, 14], chunk=[1, 3, 4], weights=WEIGHTS, normalization=NORMALIZATIONS,
    operator=["whitened", "main_text"],
)  # fmt: skip
def test_it_is_the_definition(length, chunk, weights, normalization, operator, accelerator):
    settings = {"chunk_size": chunk, "normalization": normalization, "gamma": 1.2, "mix": 0.6, "operator": operator}
    x = inputs(length, weights)
    assert_close(results(x, **settings), results(x, **settings, backend="reference"), EXACT)


@pytest.mark.parametrize("weights", [None, "vector"])
def test_it_streams(weights, accelerator):
    assert_streams(op(chunk_size=3), inputs(8, weights), EXACT)


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("weights", ["beta", "scalar"])
def test_it_packs(chunk, weights, accelerator):
    def draw(batch, length):
        return inputs(length, weights, batch)

    assert_packs(op(chunk_size=chunk, normalization="sequence" if weights == "beta" else "causal"), draw, EXACT)


def test_the_prefix_of_a_call_is_the_definition(accelerator):
    x = inputs(9)
    expected = results(x, mode="prefix", backend="reference")
    assert_close(results(x, mode="prefix"), expected, EXACT)


def test_a_factorisation_that_fails_is_repeated_and_counted(accelerator):
    """The sums of a long text in float32 can be wrong by more than the ridge. Keys that are not finite give NaN."""
    _, state = koopman_attention(**inputs(4), chunk_size=2, output_final_state=True)
    state["gram"] = state["gram"] - 0.0012 * state["norm"][..., None, None] * torch.eye(RANK)
    x = inputs(2)
    result = attend(KoopmanCall(**x, chunk_size=2, initial_state=state))
    assert int(result.retries) > 0
    assert result.y.isfinite().all()
    state["gram"][0, 0, 0, 0] = torch.nan
    y, _ = koopman_attention(**x, chunk_size=2, initial_state=state)
    assert y[0, :, 0].isnan().all()
    assert y[0, :, 1].isfinite().all()


@pytest.mark.parametrize("weights", WEIGHTS)
def test_nothing_is_read_from_the_device(weights):
    """Tensors of the meta device have no values, so a call that reads one fails."""
    x = inputs(9, weights, 1, "meta")
    bounds = Packing(1, 9, torch.empty(4, dtype=torch.int32, device="meta"))
    for packed in ({}, {"cu_seqlens": bounds}):
        y, state = koopman_attention(**x, output_final_state=True, chunk_size=4, **packed)
        again, _ = koopman_attention(**x, initial_state=state, chunk_size=4, **packed)
        (y + again).sum().backward()
    assert_raises(RuntimeError, "meta", y.sum().item)


@pytest.mark.parametrize(
    ("sizes", "power", "dtype"),
    [
        pytest.param((3, 5, 3), 2, torch.float32),
        pytest.param((18, 20, 17), 1, torch.float32, marks=pytest.mark.slow),
        pytest.param((16, 64, 64), 1, torch.float32, marks=pytest.mark.slow),
        pytest.param((16, 16, 16), 0, torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_operators_are_read_by_kernels(sizes, power, dtype):
    """Outputs and all gradients against float64, for a chunk without keys before it and one with keys."""
    pytest.importorskip("triton")
    (size, rank, width), draw = sizes, generator("kernels", sizes, power)

    def randn(*shape):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    keys, values = randn(2, 1, 1, 4 * rank, rank), randn(2, 1, 1, 4 * rank, width)
    sums = keys.mT @ torch.cat([keys, keys.roll(1, -2), values], -1)
    norms = keys.square().sum(-1).amax(-1)
    sums[0], norms[0] = 0, 0
    inputs = randn(1, 2, size, 1, rank).to(dtype), sums, norms, 1 + torch.rand(1, generator=draw), randn(power + 1, 1)
    narrow = [x.detach().to(dtype if x is inputs[0] else torch.float32).requires_grad_() for x in inputs]
    exact = [x.detach().double().requires_grad_() for x in narrow]
    y, failures = triton.read_operators(*narrow, 1e-3, torch.float32)
    readout = KoopmanReadout(exact[3], exact[4] if power else 1.0, 1e-3, power, exact[0][0], "whitened")
    readout.mix = exact[4][..., None, None]
    parts = Sums(*exact[1].split([rank, rank, width], -1), exact[2])
    parts = Sums(*(x.flatten(0, 1) for x in parts._replace(values=parts.values.mT)))
    expected, _ = readout.read(parts, exact[0].permute(1, 0, 3, 2, 4).flatten(0, 1))
    expected = expected.unflatten(0, (2, 1)).permute(1, 0, 3, 2, 4)
    weights = randn(*expected.shape)
    given = torch.autograd.grad((y * weights).sum(), narrow)
    wanted = torch.autograd.grad((expected * weights).sum(), exact, allow_unused=True, materialize_grads=True)
    error = SINGLE if dtype == torch.float32 else 4 * 3.6e-3
    names = ("dq", "dsums", "dnorms", "dgamma", "dweights")
    found, exactly = (dict(zip(names, x, strict=True)) for x in (given, wanted))
    assert int(failures) == 0
    assert_close({"y": y, **found}, {"y": expected, **exactly}, error)


def sums_of(k, v, size):
    """The definition: a sum over all tokens before each chunk, and over those before the last chunk that is not full.

    Returns `[G M Cᵀ]` and m² of each chunk, G, M, C, m² and the last key after the full chunks.
    """
    joined, norms, length = [], [], k.shape[1]
    before = torch.cat([torch.zeros_like(k[:, :1]), k[:, :-1]], 1)
    for stop in [*range(0, max(length, 1), size), length // size * size]:
        keys = k[:, :stop].transpose(1, 2)
        joined.append(keys.mT @ torch.cat([part[:, :stop].transpose(1, 2) for part in (k, before, v)], -1))
        squares = torch.cat([torch.zeros_like(k[:, :1, :, 0]), k[:, :stop].square().sum(-1)], 1)
        norms.append(squares.amax(1))
    rank = k.shape[-1]
    gram, transition, values = joined.pop().split([rank, rank, v.shape[-1]], -1)
    last = k[:, length // size * size - 1] if length >= size else torch.zeros_like(k[:, 0])
    return torch.stack(joined), torch.stack(norms[:-1]), gram, transition, values.mT, norms[-1], last


@pytest.mark.parametrize(
    ("length", "size", "rank", "width", "dtype", "error"),
    [
        (9, 4, 5, 3, torch.float32, 4 * 1.5e-7), (3, 4, 3, 5, torch.float32, 4 * 1.5e-7),
        (40, 17, 16, 16, torch.bfloat16, 4 * 5.6e-3),
        pytest.param(8, 4, 33, 40, torch.float32, 4 * 1.5e-7, marks=pytest.mark.slow),  # columns in two parts
    ],
)  # fmt: skip
def test_sums_by_a_kernel(length, size, rank, width, dtype, error):
    """Outputs and gradients of all of them, and of those that a training step has, against float64."""
    pytest.importorskip("triton")
    draw = generator("sums", length, size)
    given = [torch.randn(2, length, 3, n, generator=draw).to(dtype) for n in (rank, width)]
    joined = torch.cat(given, -1).split([rank, width], -1)  # rows of one tensor, as a projection gives them
    narrow, exact = ([x.detach().to(kind).requires_grad_() for x in joined] for kind in (dtype, torch.float64))
    found = triton.custom_op("koopman_sums")(*narrow, size, max(1, -(-length // size)))
    expected = sums_of(*exact, size)
    weights = [torch.randn(x.shape, generator=draw, dtype=torch.float64) for x in expected]
    names = ("sums", "norms", "gram", "transition", "values", "norm", "last", "dk", "dv")
    for count in (2, 7):
        grads = [
            torch.autograd.grad(sum((x * w).sum() for x, w in zip(out[:count], weights, strict=False)), inputs,
                                retain_graph=True, materialize_grads=True)
            for out, inputs in ((found, narrow), (expected, exact))
        ]  # fmt: skip
        ours, theirs = (dict(zip(names, (*x, *d), strict=True)) for x, d in zip((found, expected), grads, strict=True))
        assert_close(ours, theirs, error)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weights", "dtype"),
    [(None, torch.bfloat16), (None, torch.float32), ("beta", torch.float32), ("scalar", torch.float32)],
)
def test_the_op_by_kernels(weights, dtype):
    """Rows and packed sequences, from no state and from one, against the definition in float64."""
    pytest.importorskip("triton")
    exact = {name: x[:1].detach().to(dtype).double().requires_grad_() for name, x in inputs(5, weights).items()}
    x = {name: part.detach().to(dtype).requires_grad_() for name, part in exact.items()}
    bounds = {"cu_seqlens": torch.tensor([0, 3, 5])}
    for packed in ({}, bounds) if weights else ({},):
        found, expected = (
            results(y, **packed, chunk_size=4, ridge=0.1, gamma=1.2, mix=0.6, backend=backend)
            for y, backend in ((x, "triton"), (exact, "reference"))
        )
        found.pop("pending_decays", None)  # −∞
        error = SINGLE if dtype == torch.float32 else 4 * 3.6e-3
        assert_close(found, {name: expected[name] for name in found}, error)


def compare_compiled():
    """Raise an error if compiled code differs. This runs in another process, without pytest's shape checks."""
    arguments.HOSTS.clear()
    layer = layers.build("ska", hidden_size=16, num_heads=2, rank=6, chunk_size=4).double()
    x, found = torch.randn(2, 9, 16).double(), {}
    for name, run in (("eager", layer), ("compiled", torch.compile(layer, fullgraph=True, backend="aot_eager"))):
        layer.zero_grad()
        y, state = run(x)
        y.square().sum().backward()
        with torch.no_grad():
            token, state = run(x[:, :1], state)
        found[name] = {"y": y, "token": token, **state, "grad": layer.out_proj.weight.grad}
    assert_close(found["compiled"], found["eager"], EXACT)


@pytest.mark.slow
def test_a_layer_compiles_as_one_graph():
    """A pass over chunks with its gradients, and a decoded token."""
    code = "import test_koopman_device as here; here.compare_compiled()"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parent, check=True)
