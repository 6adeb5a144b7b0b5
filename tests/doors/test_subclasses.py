"""Subclasses of tensors, as quantised and sharded weights are, and tensors of several devices in the calls of ops."""

from itertools import product

import pytest
import torch
from helpers import assert_close
from pairwise import slow_beyond
from torch import Tensor
from torch.utils._pytree import tree_map_only

from halflife.ops.backends.dispatch import registered
from halflife.ops.backends.native import build
from halflife.ops.selfcheck import _call, _cases
from halflife.ops.spec import OPS


class Wrapped(Tensor):
    """A tensor that holds another one, and knows the ops of torch alone, as torchao's do."""

    @staticmethod
    def __new__(cls, inner):
        return Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, requires_grad=inner.requires_grad
        )

    def __init__(self, inner):
        self.inner = inner.detach()

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function.namespace == "halflife":
            raise NotImplementedError(f"{function} of a tensor without memory of its own")
        given = tree_map_only(Wrapped, lambda x: x.inner, (args, kwargs or {}))
        return tree_map_only(Tensor, Wrapped, function(*given[0], **given[1]))


# 33 tokens are enough for the kernels of passes (`dispatch.SMALLEST_PASS`).
CASES = {f"{op} {variant}": (op, tensors, options) for op, variant, tensors, options in _cases(33)}
each_case = pytest.mark.parametrize(("op", "tensors", "options"), CASES.values(), ids=CASES)
NATIVE = [name for name in CASES if not (name.startswith("koopman") and "decayed" in name)]


def single(tensors):
    return {name: x.float() for name, x in tensors.items()}


def outputs(op, tensors, options, backend="auto"):
    """Outputs and gradients of a call, as plain tensors."""
    leaves = {name: x.detach().requires_grad_(name not in OPS[op].constants) for name, x in tensors.items()}
    o, _ = _call(op, leaves, options, backend)
    loss = (o / o.detach().abs().amax()).square().sum()  # rates of PoST's random spectrum are up to 10²⁰
    wanted = [x for x in leaves.values() if x.requires_grad]
    grads = torch.autograd.grad(loss, wanted, allow_unused=True)
    found = {"o": o, **{str(i): x for i, x in enumerate(grads) if x is not None}}
    return {name: x.inner if isinstance(x, Wrapped) else x.detach() for name, x in found.items()}


@pytest.mark.parametrize(
    "name", slow_beyond([name for name in CASES if not name.startswith(("ridge", "dplr vector"))], CASES)
)
def test_subclasses_of_tensors_take_torchs_path(name):
    """One tensor after the other is such a subclass."""
    op, tensors, options = CASES[name]
    tensors = single(tensors)
    expected = outputs(op, tensors, options, "chunked")
    for name in tensors:
        if op == "koopman_attention" and name in ("k", "g", "beta"):
            continue  # it counts the tokens of its chunks beside its decayed keys, and needs numbers of Python
        assert_close(outputs(op, {**tensors, name: Wrapped(tensors[name])}, options), expected, 1e-5)


@pytest.mark.skipif(build.why_not() is not None, reason=str(build.why_not()))
@pytest.mark.parametrize("name", NATIVE)
def test_kernels_refuse_subclasses_by_name(name):
    op, tensors, options = CASES[name]
    tensors = single(tensors)
    for changed in tensors if "native" in registered(op) else ():
        with pytest.raises(ValueError, match="Wrapped"):
            _call(op, {**tensors, changed: Wrapped(tensors[changed])}, options, "native")


@each_case
def test_tensors_of_two_devices_are_an_error(op, tensors, options):
    """Otherwise torch gives a mixed call to the kernel for fake tensors, which returns memory as it finds it."""
    tensors = single(tensors)
    backends = ["auto", *(name for name in registered(op) if name not in ("fla", "triton"))]
    for name, backend in product(tensors if len(tensors) > 1 else (), backends):
        with pytest.raises(ValueError, match="on one device"):
            _call(op, {**tensors, name: tensors[name].to("meta")}, options, backend)
