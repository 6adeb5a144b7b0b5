"""Gradients of the parts of a tensor are written beside each other, and are those of `Tensor.split`."""

import sys

import pytest
import torch
from torch.testing import assert_close

from halflife.ops import causal_conv1d, fused
from halflife.ops.backends import split as module
from halflife.ops.backends.split import Split
from halflife.ops.linear import _Product

if sys.platform != "linux":
    pytest.skip("triton has Linux wheels only", allow_module_level=True)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = (64, 128, 3)  # of a gate, of what is convolved, and of decays


def parts_of(h, by):
    return h.split(SIZES, -1) if by is None else by(h, SIZES)


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


def test_second_derivatives():
    x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)

    def run(x):
        a, b, _ = Split.apply(x, (2, 3, 1))
        return a.sin() * b[..., :2], b.exp()

    assert torch.autograd.gradcheck(run, x)
    assert torch.autograd.gradgradcheck(run, x)
