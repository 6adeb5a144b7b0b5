"""The Triton kernels of Mamba-3's passes equal the float64 definitions, with all gradients."""

import sys

import pytest
import torch
from helpers import assert_close, generator
from pairwise import crossed, slow_beyond

if sys.platform != "linux":
    pytest.skip("triton has Linux wheels only", allow_module_level=True)

from test_triton_passes import DEVICE, DTYPES, check, strided

from halflife import layers
from halflife.ops import trapezoid
from halflife.ops.backends import triton
from halflife.ops.backends.triton.mimo import ranks
from halflife.ops.backends.triton.passes import angles, weights
from halflife.ops.backends.triton.passes import trapezoid as kernels
from halflife.packing import Packing

LAYER = 4 * 1e-6  # four times the worst error measured of a layer in float32, relative to the largest entry
BOUNDS = [None, [0, 1, 1, 3, 12, 21]]


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch):
    """A program then has few tokens, so that tiles are many and the last one is not full."""
    for module in (angles, weights, kernels, ranks):
        monkeypatch.setattr(module, "TILE", 128)


def drawn(sizes, bounds, length=21, states=()):
    """Random tensors, of two rows or of packed sequences; those of `states` have one row for each sequence."""
    batch, sequences = (2, 2) if bounds is None else (1, len(bounds) - 1)
    draw = generator(str(sizes))
    shapes = {name: (sequences if name in states else batch, *size) for name, size in sizes.items()}
    packing = Packing(batch, length, None if bounds is None else torch.tensor(bounds, device=DEVICE))
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}, packing


@crossed(strength=1, dtype=DTYPES, bounds=BOUNDS, state=[True, False], heads=[True, False], pairs=[3, 20])
def test_running_angles(dtype, bounds, state, heads, pairs):
    """Of rates that all heads share, under a tanh, and of rates of each head, compared as points of a circle."""
    rate = (21, 3, pairs) if heads else (21, pairs)
    tensors, packing = drawn({"step": (21, 3), "rate": rate, "first": (3, pairs)}, bounds, states=("first",))
    tensors["step"] = tensors["step"].abs() * 4
    if not state:
        del tensors["first"]

    def run(backend, step, rate, first=None):
        angle, last = trapezoid.running_angles(step, strided(rate), first, not heads, packing, backend)
        points = [f(2 * torch.pi * x) for x in (angle, last) for f in (torch.sin, torch.cos)]
        return [x.to(angle.dtype) for x in points]

    check(run, tensors, dtype, wide=("step", "first"))


@crossed(strength=1, dtype=DTYPES, bounds=BOUNDS, state=[True, False])
def test_weights(dtype, bounds, state):
    sizes = {"g": (21, 3), "step": (21, 3), "share": (21, 3), "first": (3,)}
    tensors, packing = drawn(sizes, bounds, states=("first",))
    tensors["g"] = -tensors["g"].abs()
    if not state:
        del tensors["first"]

    def run(backend, g, step, share, first=None):
        return trapezoid.trapezoid_weights(g, step, strided(share), first, packing, backend)

    check(run, tensors, dtype, wide=("g", "step", "first"))


@crossed(
    strength=1, dtype=DTYPES, bounds=BOUNDS, state=[True, False], rank=[1, 2], groups=[1, 2, 0], pairs=[3, 4],
    whole=[True, False],
)  # fmt: skip
def test_queries_and_keys(dtype, bounds, state, rank, groups, pairs, whole):
    """With norms of groups, whose heads have biases, or of heads with channels of their own (no groups)."""
    heads, size, value = 4, 8, 5
    rank = rank if groups else 1
    channels = rank * (groups or heads) * size
    sizes = {
        "c": (21, channels), "b": (21, channels), "v": (21, heads, value), "angle": (21, heads, pairs),
        "key": (rank * heads, size), "value": (heads, value),
    }  # fmt: skip
    tensors, packing = drawn(sizes, bounds, states=("key", "value"))
    draw = generator("parameters")
    if groups:
        parameters = {"wq": (size,), "bq": (rank * heads, size), "wk": (size,), "bk": (rank * heads, size)}
        tensors |= {name: torch.randn(shape, generator=draw) for name, shape in parameters.items()}
    if not state:
        del tensors["key"], tensors["value"]

    def run(backend, c, b, v, angle, key=None, value=None, wq=None, bq=None, wk=None, bk=None):
        norms = ((wq, bq), (wk, bk)) if groups else (None, None)
        return trapezoid.trapezoid_keys(
            strided(c), strided(b), v, angle, *norms, (key, value), 1e-5, whole, packing, backend
        )  # fmt: skip

    check(run, tensors, dtype, wide=("angle", "key", "wq", "bq", "wk", "bk"))


@crossed(strength=1, dtype=DTYPES, gated=[True, False], skips=[True, False], length=[21, 1])
def test_outputs(dtype, gated, skips, length):
    sizes = {"o": (length, 3, 5), "v": (length, 3, 5), "dot": (length, 3), "gain": (length, 3), "z": (length, 15)}
    tensors, _ = drawn(sizes, None)
    tensors["skip"] = torch.randn(3)
    for name in ("z",) * (not gated) + ("skip",) * (not skips):
        del tensors[name]

    def run(backend, o, v, dot, gain, skip=None, z=None):
        z = None if z is None else strided(z)
        return [trapezoid.trapezoid_output(o, v, dot, gain, skip, z, backend)]

    check(run, tensors, dtype, wide=("dot", "gain", "skip"))


@crossed(strength=1, dtype=DTYPES, rank=[2, 1, 3], size=[5, 16], length=[5, 0])
def test_products_of_ranks(dtype, rank, size, length):
    sizes = dict.fromkeys(("q", "k", "before"), (2, length, rank, 2, size))
    sizes |= {"weight": (2, length, 2), "gain": (2, length, 2), "skip": (2,)}

    def run(backend, q, k, **others):
        return trapezoid.mimo_products(strided(q.flatten(2)).view_as(q), k, **others, backend=backend)

    check(run, sizes, dtype, wide=("weight", "gain", "skip"))


@crossed(strength=1, dtype=DTYPES, rank=[2, 1, 3], size=[5, 16], length=[5, 0])
def test_outputs_of_ranks(dtype, rank, size, length, monkeypatch):
    """A program goes over several tiles, of which the last one is not full."""
    monkeypatch.setattr(ranks, "PROGRAMS", 2)
    monkeypatch.setattr(ranks, "OF_OUTPUTS", 64)
    sizes = {"y": (2, length, rank, 2, size)} | dict.fromkeys(("before", "x", "z"), (2, length, 2, size))
    sizes |= dict.fromkeys(("later", "now"), (2, length, 2, rank, rank))
    sizes |= dict.fromkeys(("values", "gates", "outputs"), (rank, 2, size))

    def run(backend, y, x, z, **others):
        z = strided(z.flatten(2)).unflatten(2, z.shape[2:])
        return [trapezoid.mimo_output(y, x=x, z=z, **others, backend=backend)]

    check(run, sizes, dtype, wide=("later", "now", "values", "gates", "outputs"))


def test_long_sums_of_angles_lose_nothing():
    """A thousand turns in float32 stay exact, as in `test_mamba3`."""
    step, rate = 0.4 * torch.rand(1, 3000, 1), torch.randn(1, 3000, 3)
    angle, last = trapezoid.running_angles(step, rate, None, True, None, "triton")
    exact = (step.unsqueeze(-1) * rate.unsqueeze(2).tanh() / 2).double().cumsum(1)
    difference = torch.cat([angle - exact, last.unsqueeze(1) - exact[:, -1:]], 1)
    assert (difference - difference.round()).abs().max() <= 4 * 1e-6


LAYERS = {
    "mamba3": {"state_size": 4, "num_groups": 2},
    "mamba3, two states": {"state_size": 4, "gate_rank": {}},
    "mamba3, norm and learned rate": {"state_size": 4, "rate_floor": None, "output_norm": True},
    "mamba3, rank 2": {"state_size": 4, "rank": 2},
    "mamba3_echo": {"state_size": 4},
}


@pytest.mark.parametrize("name", slow_beyond(["mamba3", "mamba3_echo"], LAYERS))
@crossed(strength=1, bounds=[None, [0, 5, 5, 9]], cut=[False, True])
def test_layers(name, bounds, cut):
    """Whole layers with all kernels, in one piece, or continued from the states of the first piece."""
    layer = layers.build(name.split(",")[0], hidden_size=12, num_heads=2, chunk_size=16, **LAYERS[name])
    x = torch.randn(2 if bounds is None else 1, 9, 12, generator=generator(name))
    bounds = None if bounds is None else torch.tensor(bounds)
    found = []
    for backend in ("triton", "reference"):
        exact = backend == "reference"
        layer = (layer.double() if exact else layer).to("cpu" if exact else DEVICE)
        for part in layer.modules():
            for kind in ("backend", "pass_backend"):
                if hasattr(part, kind):
                    setattr(part, kind, backend)
        given = x.to(next(layer.parameters())).requires_grad_()
        places = None if bounds is None else bounds.to(given.device)
        y, state = layer(given, None, places)
        if cut:
            more, state = layer(given.flip(1), state, places)
            y = y * more
        loss = y.square().sum() + sum(part.square().sum() for kind, part in state.items() if kind == "memory")
        gradients = torch.autograd.grad(loss, [given, *layer.parameters()])
        names = ["x", *(key for key, _ in layer.named_parameters())]
        state = {key: part for key, part in state.items() if key not in ("position", "angle")}
        all_of = {"y": y, **state, **{f"d{key}": d for key, d in zip(names, gradients, strict=True)}}
        found.append({key: part.detach().double().cpu() for key, part in all_of.items()})
    assert_close(*found, LAYER)


X = torch.randn(2, 3, 4)
ROWS = torch.randn(2, 3, 2, 4, 5)
PARAMETERS = torch.randn(2), torch.randn(4, 2), torch.randn(2), torch.randn(4, 2)
GIVEN = {
    "running_angles": (X[..., :2], X, torch.randn(2, 2, 4, dtype=torch.float64), None, True),
    "trapezoid_weights": (-X.exp(), X.exp(), X - 1, X[:, 0], None),
    "trapezoid_keys": (
        X, X + 1, X.unsqueeze(-1), X.unsqueeze(-1), *PARAMETERS, torch.randn(2, 4, 2), None, None, 1e-5, True,
    ),
    "trapezoid_output": (X.unsqueeze(-1), X.unsqueeze(-1) + 1, X + 2, X - 1, X[0, 0], X - 2),
    "mimo_products": (ROWS, ROWS + 1, ROWS - 1, X, X + 2, X[0, 0]),
    "mimo_output": (
        ROWS, ROWS[:, :, 0], ROWS[:, :, 1], ROWS[:, :, 1] + 1, *torch.randn(2, 2, 3, 4, 2, 2), *torch.randn(3, 2, 4, 5),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GIVEN)
def test_as_custom_ops(name):
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    given = [x.detach().clone().requires_grad_() if isinstance(x, torch.Tensor) else x for x in GIVEN[name]]
    torch.library.opcheck(triton.custom_op(name).packet, given, test_utils=checks)
