"""Products of 16 bits on a CPU that has no instructions for them: in float32, everywhere, and of the same numbers."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, ids_of, tiny
from pairwise import slow_beyond
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from halflife import precision
from halflife.layers import build
from halflife.models import PRESETS
from halflife.models.loss import mean_loss
from halflife.ops.linear import fast_linears, product
from halflife.training import estimate

DTYPES = (torch.bfloat16, torch.float16)
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11}  # of one number; sums in float32 add nothing to it
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_dot_product_flash_attention_for_cpu")


@pytest.fixture
def plain_cpu(monkeypatch):
    """A CPU without products of 16 bits, whatever this one has."""
    monkeypatch.setattr(precision, "_has_products", lambda dtype: dtype not in DTYPES)


FEW = ("mamba2+ska", "mamba3_mimo", "rwkv7", "llama")
ALL = (*PRESETS, "mamba2+ska", "gated_deltanet+gate_rank", "mamba2+log_linear", "mamba2+koopman_mlp")


class Narrow(TorchDispatchMode):
    """Writes down products of 16 bits."""

    def __init__(self):
        super().__init__()
        self.found = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in PRODUCTS and any(getattr(x, "dtype", None) in DTYPES for x in args):
            self.found.add((name, *(tuple(x.shape) for x in args if isinstance(x, torch.Tensor))))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_rounds_once(plain_cpu, dtype, autocast):
    x, weight, bias = torch.randn(2, 3, 50), torch.randn(20, 50), torch.randn(20)
    given = [part if autocast else part.to(dtype) for part in (x, weight, bias)]
    given = {name: part.requires_grad_() for name, part in zip(("x", "weight", "bias"), given, strict=True)}
    with torch.autocast("cpu", dtype, enabled=autocast):
        y = product(**given)
    assert y.dtype == dtype
    exact = {name: part.detach().to(dtype).double().requires_grad_() for name, part in given.items()}
    expected, dy = F.linear(**exact), torch.randn(2, 3, 20).to(dtype)
    assert_close(y, expected, 4 * ROUNDING[dtype])
    found = torch.autograd.grad(y, [*given.values()], dy, retain_graph=True)
    batched = torch.autograd.grad(y, [*given.values()], dy.unsqueeze(0), is_grads_batched=True)
    expected = torch.autograd.grad(expected, [*exact.values()], dy.double())
    for grads in (found, [x[0] for x in batched]):
        assert_close(*(dict(zip(given, each, strict=True)) for each in (grads, expected)), 4 * ROUNDING[dtype])


def test_what_a_product_leaves_to_torch(plain_cpu):
    """float64, which autocast leaves, and dtypes that differ."""
    x, weight = torch.randn(8, 50).double(), torch.randn(20, 50).double()
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(product(x, weight), F.linear(x, weight), 0)
        attention = build("attention", hidden_size=8, num_heads=1).double()
        assert attention(torch.randn(1, 5, 8).double())[0].dtype == torch.float64
    with pytest.raises(RuntimeError, match="dtype"):
        product(x.bfloat16(), weight)


def test_a_map_is_pickled_and_copied_inside(plain_cpu):
    maps, x = nn.Sequential(nn.Linear(8, 8)), torch.randn(5, 8)
    with fast_linears(maps):
        kept, copied = pickle.dumps(maps), copy.deepcopy(maps)
    assert all(torch.equal(found(x), maps(x)) for found in (pickle.loads(kept), copied))


@pytest.mark.parametrize("name", slow_beyond(FEW, ALL))
@pytest.mark.parametrize("cast", [False, True])
def test_no_product_of_16_bits_is_left(name, cast, plain_cpu):
    model, ids = tiny(name), ids_of(2, 40)
    model = model.bfloat16() if cast else model
    with Narrow() as seen:
        with torch.autocast("cpu", torch.bfloat16, enabled=not cast):
            hidden, _ = model.hidden(ids)
            loss = mean_loss(hidden.flatten(0, 1), model.head_or_weight, ids.flatten())
        loss.backward()
    assert not seen.found


@pytest.mark.parametrize("name", ["llama", "mamba3_mimo"])
def test_an_estimate_does_not_depend_on_the_cpu_that_makes_it(name, monkeypatch):
    config, found = tiny(name).config, []
    for has in (True, False):
        monkeypatch.setattr(precision, "_has_products", lambda dtype, has=has: has)
        estimate._of_layers.cache_clear()
        found.append((estimate.model_costs(config, bf16=True), estimate.peak_memory(config, bf16=True)))
    assert found[0] == found[1]
