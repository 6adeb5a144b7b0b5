"""Gradients of the parts of a tensor are written beside each other, and are those of `Tensor.split`."""

import sys

import pytest
import torch
from pairwise import slow_beyond
from torch.testing import assert_close

from halflife.ops import causal_conv1d, fused, linear_attention
from halflife.ops.backends import split as module
from halflife.ops.backends.split import Silu, Split, split_silu
from halflife.ops.linear import _Product

if sys.platform != "linux":
    pytest.skip("triton has Linux wheels only", allow_module_level=True)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = (64, 128, 3)  # of a gate, of what is convolved, and of decays


def parts_of(h, by, sizes=SIZES):
    return h.split(sizes, -1) if by is None else by(h, sizes)


def losses(z, x, f, y):
    """The loss of a layer by kernels, from the parts of a projection and the values y."""
    parts, _ = causal_conv1d(
        x, torch.linspace(-1, 1, 512, device=DEVICE).view(128, 4), splits=(64, 64), backend="triton"
    )
    gated = fused.rms_norm_of_gated(y + parts[0], z, torch.ones(64, device=DEVICE), 1, 1e-5, backend="triton")
    return (gated * parts[1]).sum() + f.exp().sum()


@pytest.fixture
def given():
    draw = torch.Generator().manual_seed(0)
    x, weight, others, y = (
        torch.randn(size, generator=draw).to(DEVICE) for size in ((2, 9, 8), (195, 8), (5, 8), (2, 9, 64))
    )
    return x, weight.requires_grad_(), others.requires_grad_(), y


@pytest.fixture
def copied(monkeypatch):
    """The channels of each copy of gradients."""
    found, plain = [], torch.cat

    def cat(tensors, *args, **options):
        found.append(sum(x.shape[-1] for x in tensors))
        return plain(tensors, *args, **options)

    monkeypatch.setattr(module.torch, "cat", cat)
    return found


def test_kernels_write_their_parts_in_place(given, copied):
    """What torch computes is copied, in each of several backward passes."""
    x, weight, _, y = given
    want = torch.autograd.grad(losses(*parts_of(x @ weight.T, None), y), weight)
    loss = losses(*parts_of(x @ weight.T, Split.apply), y)
    del copied[:]
    for _ in range(2):
        assert_close(torch.autograd.grad(loss, weight, retain_graph=True), want, rtol=0, atol=0)
    assert copied == [3, 3]


def test_parts_of_a_part(given, copied):
    """Of the product of two maps, of which one is split again."""
    x, weight, others, y = given

    def loss(by):
        h, rest = _Product.apply(x, weight, others)
        return losses(*parts_of(h, by), y) + rest.square().sum()

    want = torch.autograd.grad(loss(None), (weight, others))
    total = loss(Split.apply)
    del copied[:]
    assert_close(torch.autograd.grad(total, (weight, others)), want, rtol=0, atol=0)
    assert copied == [3, 5]


@pytest.mark.parametrize("first", [0, 1])
def test_a_gradient_that_was_taken_away_stays(given, first):
    """A backward pass that ends at a part keeps its memory, and those after it are right."""
    x, weight, _, y = given
    parts = parts_of(x @ weight.T, Split.apply)
    loss = losses(*parts, y)
    (held,) = torch.autograd.grad(loss, parts[first], retain_graph=True)
    before = held.clone()
    found = torch.autograd.grad(loss, weight, retain_graph=True)
    (again,) = torch.autograd.grad(2 * loss, parts[first], retain_graph=True)
    assert_close([held, again], [before, 2 * before], rtol=0, atol=0)
    assert_close(found, torch.autograd.grad(losses(*parts_of(x @ weight.T, None), y), weight), rtol=0, atol=0)
    other = 1 - first
    torch.autograd.grad(parts[other].sum(), weight, retain_graph=True)
    assert_close([held], [before], rtol=0, atol=0)


def test_gradients_that_a_hook_replaces_and_parts_without(given):
    x, weight, _, y = given

    def grads(by):
        z, middle, f = parts_of(x @ weight.T, by)
        middle.register_hook(lambda d: 2 * d)
        return torch.autograd.grad(losses(z, middle, f.detach(), y), weight)

    assert_close(grads(Split.apply), grads(None), rtol=0, atol=0)


HEADS, K = 2, 16


@pytest.mark.parametrize("value", slow_beyond([16], [16, 40]))
@pytest.mark.parametrize("decay", ["none", "scalar", "vector"])
@pytest.mark.parametrize("lengths", [(19, 19), (1, 1), (5, 0, 33)])
def test_gradients_of_heads_in_place(copied, decay, value, lengths):
    """Of queries and keys after SiLU, and of values. None is copied, but of single tokens, whose strides may differ."""
    packed = len(lengths) > 2
    bounds = torch.tensor([0, *lengths], device=DEVICE).cumsum(0) if packed else None
    shape = (1, sum(lengths)) if packed else (2, lengths[0])
    draw = torch.Generator().manual_seed(0)
    h = torch.randn(*shape, HEADS * (2 * K + value), generator=draw).to(DEVICE).requires_grad_()
    g = -torch.rand(*shape, HEADS, *[K] * (decay == "vector"), generator=draw).to(DEVICE)

    def loss(first, v, backend, by):
        q, k = parts_of(first, by, (HEADS * K, HEADS * K))
        q, k, v = (x.unflatten(-1, (HEADS, -1)) for x in (q, k, v))
        options = {"g": None if decay == "none" else g, "cu_seqlens": bounds, "backend": backend, "chunk_size": 16}
        return linear_attention(q, k, v, **options)[0].sin().sum()

    first, v = h.split((2 * HEADS * K, HEADS * value), -1)
    want = torch.autograd.grad(loss(torch.nn.functional.silu(first), v, "triton", None), h)
    exact = torch.autograd.grad(loss(torch.nn.functional.silu(first), v, "reference", None), h)
    first, v = Split.apply(h, (2 * HEADS * K, HEADS * value))
    found = loss(Silu.apply(first), v, "triton", Split.apply)
    del copied[:]
    for _ in range(2):
        assert_close(torch.autograd.grad(found, h, retain_graph=True), want, rtol=0, atol=0)
    assert_close(want, exact, rtol=0, atol=2e-5)
    assert lengths == (1, 1) or copied == []


def test_silu_of_all_parts_but_the_last():
    h = torch.randn(2, 5, 12, device=DEVICE, requires_grad=True)
    q, k, v = split_silu(h, (4, 3, 5))
    plain = h.split((4, 3, 5), -1)
    assert_close([q, k, v], [torch.nn.functional.silu(plain[0]), torch.nn.functional.silu(plain[1]), plain[2]])
    (found,) = torch.autograd.grad((q.sum() + k.square().sum() + v.sum()), h)
    whole = [torch.nn.functional.silu(x) for x in plain[:2]]
    (want,) = torch.autograd.grad(whole[0].sum() + whole[1].square().sum() + plain[2].sum(), h)
    assert_close(found, want)


def test_second_derivatives_of_silu():
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)

    def run(x):
        a, b = Split.apply(x, (4, 2))
        return Silu.apply(a)[..., :2] * b

    assert torch.autograd.gradcheck(run, x)
    assert torch.autograd.gradgradcheck(run, x)


def test_second_derivatives():
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)

    def run(x):
        a, b, _ = Split.apply(x, (2, 3, 1))
        return a.sin() * b[..., :2], b.exp()

    assert torch.autograd.gradcheck(run, x)
    assert torch.autograd.gradgradcheck(run, x)
