"""Linear maps, for the time of a block: by oneDNN on a CPU, and with weights that autocast need not cast on a GPU.

oneDNN runs where it is faster than torch's own product. A build of the native kernels measures that
(`backends.native.products`). On a CPU without products of 16 bits, those are taken in float32
(`backends.widened`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halflife.files import read_json
from halflife.ops.arguments import cached_constant, is_hooked, is_transformed
from halflife.ops.backends import dispatch, triton
from halflife.ops.backends.native import build, by_onednn
from halflife.ops.backends.split import Cast, Neighbours, beside
from halflife.ops.backends.widened import product
from halflife.ops.spec import OPS
from halflife.precision import autocast_dtype, has_all_products

FEWEST_ROWS = 32  # oneDNN rearranges the weights at every call, which does not pay for fewer rows
PAYING_TOKENS = 8  # a channel: copies of weights then have a twentieth of the memory that a block keeps of its tokens


@contextmanager
def fast_linears(model: nn.Module) -> Iterator[None]:
    """Inside this block, run the linear maps of `model` by oneDNN where that is faster, in 16 bits as by `product`.

    It replaces `forward` of the instances, and afterwards restores it. It takes modules whose class is `nn.Linear`
    itself, with a plain parameter on a CPU. Quantised and sharded weights, and adapters, stay as they are.
    """
    takes = _helps() or not has_all_products()
    swapped = [m for m in model.modules() if type(m) is nn.Linear and "forward" not in vars(m)] if takes else []
    for module in swapped:
        module.forward = MethodType(_forward, module)
    try:
        yield
    finally:
        for module in swapped:
            vars(module).pop("forward", None)


@contextmanager
def cast_weights(model: nn.Module, x: Tensor) -> Iterator[None]:
    """Inside this block, the linear maps of `model` have weights in autocast's dtype on the device of `x`.

    One launch casts all of them, and in the backward pass one casts their gradients, where autocast has two for each.
    Maps of one input are one product; the first pass outside of an activation checkpoint finds out which they are. As
    in `fast_linears`, weights that are quantised, sharded or replaced otherwise stay as they are. Other modules take
    part if their class says that products alone read their parameters (`only_products`).

    Without autocast, maps of one input are one product too in training if x has 16 bits and enough tokens.
    """
    dtype = autocast_dtype(x.device)
    narrow = x.dtype.itemsize == 2 and torch.is_grad_enabled() and x.numel() >= PAYING_TOKENS * x.shape[-1] ** 2
    if (dtype is None and not narrow) or is_transformed():
        yield
        return
    again, apart = _may_run_again(), _APART.setdefault(model, WeakSet())
    known = [] if again and apart else vars(model).get("_one_product")
    maps = [m for m in model.modules() if type(m) is nn.Linear]
    products = _Products(maps, known, apart if again and not known else None)
    if dtype is None:
        taking, given, dtype = [*products.group], x.dtype, x.dtype
    else:
        others = [m for m in model.modules() if getattr(type(m), "only_products", False)]
        taking, given = [*products.maps, *others], torch.float32
    held = [
        (module._parameters, name, weight)
        for module in taking
        for name, weight in module._parameters.items()
        if type(weight) is nn.Parameter and weight.dtype == given and weight.device == x.device
    ]
    swapped = [module for module in products.maps if "forward" not in vars(module)]
    copies = Cast.apply(dtype, *[weight for *_, weight in held])
    products.copies.update(map(id, copies))
    try:
        for (parameters, name, _), copy in zip(held, copies, strict=True):
            parameters[name] = copy
        for module in swapped:
            module.forward = partial(products.run, module)
        yield
    finally:
        for parameters, name, weight in held:
            parameters[name] = weight
        for module in swapped:
            vars(module).pop("forward", None)
    if products.calls is not None and not again:
        vars(model)["_one_product"] = products.found(products.calls)


def _may_run_again() -> bool:
    """Whether an activation checkpoint may run this pass again, which must then save as many tensors as before."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)  # pyright: ignore[reportAttributeAccessIssue]
    return hooks is not None and dispatch.again is None


class _Apart:
    """A mark of a graph, which dies with it."""


# Model → the marks of its passes without joined maps that a checkpoint may run again, and which must stay so.
_APART: WeakKeyDictionary[nn.Module, WeakSet[_Apart]] = WeakKeyDictionary()


class _Products:
    """The linear maps of a pass. Those of a group, maps without biases of one input in their order, are one product.

    A pass without groups, which may run again, is among those `apart` as long as its graph lives.
    """

    def __init__(
        self,
        maps: Sequence[nn.Linear],
        groups: Iterable[Sequence[nn.Linear]] | None,
        apart: WeakSet[_Apart] | None = None,
    ) -> None:
        self.apart = apart
        # Since they were found an adapter may have taken the place of a map, or a part of them may have been frozen,
        # whose gradients would be computed for nothing.
        known = [
            group for group in groups or ()
            if all(part in maps and part.bias is None for part in group)
            and len({part.weight.requires_grad for part in group}) == 1
        ]  # fmt: skip
        self.group = {part: group for group in known for part in group}
        self.maps = [*self.group, *[part for part in maps if part not in self.group]]
        self.done: dict[nn.Linear, tuple[Tensor, Tensor]] = {}  # map → its input and output
        self.calls: list[tuple[nn.Linear, Tensor]] | None = [] if groups is None else None
        self.copies: set[int] = set()  # ids of the weights of this pass; others, as FSDP1's, are not cast

    def run(self, module: nn.Linear, input: Tensor) -> Tensor:
        known, y = self.done.pop(module, (None, input))
        if known is input:
            return y
        if self.calls is not None:
            self.calls.append((module, input))
        weights = [part.weight for part in self.group.get(module, ())]
        if not weights or not self.copies.issuperset(map(id, weights)):
            # The product of a matrix adds the bias itself, that of a part of a tensor [B, T, D] does not.
            flat = module.bias is not None and input.ndim > 2
            y = F.linear(input.flatten(0, -2) if flat else input, module.weight, module.bias)
            if self.apart is not None and y.grad_fn is not None:
                marks: Any = y.grad_fn.metadata
                self.apart.add(marks.setdefault("halflife", _Apart()))
            return y.unflatten(0, input.shape[:-1]) if flat else y
        outputs = _Product.apply(input, *weights)
        self.done |= {part: (input, y) for part, y in zip(self.group[module], outputs, strict=True)}
        return self.done.pop(module)[1]

    @staticmethod
    def found(calls: Iterable[tuple[nn.Linear, Tensor]]) -> list[list[nn.Linear]]:
        groups: dict[int, dict[nn.Linear, None]] = {}
        for module, x in calls:
            if module.bias is None:
                groups.setdefault(id(x), {})[module] = None
        return [[*group] for group in groups.values() if len(group) > 1]


class _Product(torch.autograd.Function):
    """`x Wᵀ` for several weights `[Nᵢ, D]` of `x [..., D]`, by one product each of outputs and of gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights)
        y = F.linear(x.to(weights[0].dtype), _rows(weights))
        sizes = [len(weight) for weight in weights]
        ctx.neighbours = Neighbours(y, sizes)
        return y.split(sizes, -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        narrow, flat = x.to(weights[0].dtype), ctx.neighbours.joined(grads).flatten(0, -2)
        dx = (flat @ _rows(weights)).view(x.shape).to(x.dtype) if ctx.needs_input_grad[0] else None
        if True not in ctx.needs_input_grad[1:]:
            return dx, *[None] * len(weights)
        return dx, *(flat.t() @ narrow.flatten(0, -2)).split([len(weight) for weight in weights])


def _rows(weights: Sequence[Tensor]) -> Tensor:
    """The rows of all weights, which are a view where these lie beside each other."""
    found = None if torch.is_grad_enabled() else beside(weights, 0)
    return torch.cat(list(weights), 0) if found is None else found


# Pass → its gradients and its result again, (gradient of the result, tensors, settings) → ([gradients], result).
PASSES: dict[str, Callable[..., tuple[Sequence[Tensor | None], Tensor]]] = {}


class LinearOfPass(torch.autograd.Function):
    """`pass(*tensors) Wᵀ` by the Triton kernels of a pass, whose result is not kept.

    The gradient of W needs it, and the kernel of the gradients of `tensors` makes it again beside them.
    """

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:  # torch 2.13's compiler takes two tensors after names for no `ctx`
        name, settings, weight, *tensors = given
        ctx.name, ctx.settings = name, settings
        ctx.save_for_backward(weight, *tensors)
        return F.linear(triton.custom_op(name)(*tensors, *settings), weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        weight, *tensors = ctx.saved_tensors
        gradients, result = PASSES[ctx.name]((dout @ weight).contiguous(), tensors, ctx.settings)
        of_weight = dout.flatten(0, -2).t() @ result.flatten(0, -2) if ctx.needs_input_grad[2] else None
        return None, None, of_weight, *gradients


def narrowed(weight: Tensor, x: Tensor) -> Tensor:
    """The weight of a map in the dtype in which it reads x."""
    return weight if autocast_dtype(x.device) is None else weight.to(x.dtype)


def made_again(op: str, backend: str, tensors: Sequence[Any], *matrices: Tensor) -> bool:
    """Whether a map after a pass runs as `LinearOfPass`: by Triton, and if all matrices have the first one's dtype."""
    if is_transformed() or (dispatch.again is not None and dispatch.kind_of(op) in dispatch.again.kinds):
        return False
    known, first = OPS[op].backends["triton"].function, tensors[0]
    same = all(x.dtype == first.dtype for x in (tensors[1], *matrices))
    return same and dispatch.choose(op, backend, first.device, tensors) is known


def weight_of(module: nn.Module, biased: bool = False) -> Tensor | None:
    """The weight W of a map that is `x Wᵀ`, or if `biased` also `x Wᵀ + b`, and nothing else.

    It is None for a map that must be called, because it has a bias, a hook, an adapter or a quantised weight.
    """
    # accelerate replaces the method of the object; so do `fast_linears` and `cast_weights`, which change nothing.
    forward = vars(module).get("forward")
    fast = getattr(forward, "__func__", None) is _forward
    ours = forward is None or fast or isinstance(getattr(getattr(forward, "func", None), "__self__", None), _Products)
    weight: Any = getattr(module, "weight", None)
    plain = type(module) is nn.Linear and (biased or module.bias is None) and type(weight) in (nn.Parameter, Tensor)
    return weight if plain and ours and not is_hooked(module) else None


def _forward(self: nn.Linear, input: Tensor) -> Tensor:
    weight = self.weight
    if type(weight) is not nn.Parameter:
        return F.linear(input, weight, self.bias)
    if (
        not _helps()
        or not input.dtype == weight.dtype == torch.float32
        or not input.is_cpu
        or not weight.is_cpu
        or input.shape[:-1].numel() < FEWEST_ROWS
        or torch.is_autocast_enabled("cpu")
        or is_transformed()
    ):
        return product(input, weight, self.bias)
    y = _linear(input.reshape(-1, input.shape[-1]), weight)
    return (y if self.bias is None else y + self.bias).view(*input.shape[:-1], -1)


_forward.__name__ = "forward"  # which a module has by class that was pickled inside of such a block


@cached_constant
def _helps() -> bool:
    return build.why_not() is None and any(faster().values())


@cache
def faster() -> dict[str, bool]:
    """Which products oneDNN does faster here: "forward", "input" (its gradient) and "weight" (its gradient)."""
    passed: Any = read_json(build.folder() / build.PASSED)
    return passed.get("onednn") or {}


@torch.library.custom_op(
    "halflife::linear", mutates_args=(), device_types="cpu", schema="(Tensor x, Tensor weight) -> Tensor"
)
def _linear(x: Tensor, weight: Tensor) -> Tensor:
    return by_onednn(x, weight) if faster()["forward"] else x @ weight.t()


@torch.library.custom_op(
    "halflife::linear_backward", mutates_args=(), device_types="cpu",
    schema="(Tensor dy, Tensor x, Tensor weight, bool[] which) -> Tensor[]",
)  # fmt: skip
def _linear_backward(dy: Tensor, x: Tensor, weight: Tensor, which: list[bool]) -> list[Tensor]:
    wins, none = faster(), x.new_empty(0)
    dx = dweight = none
    if which[0]:
        dx = by_onednn(dy, weight.t()) if wins["input"] else dy @ weight
    if which[1]:
        dweight = by_onednn(dy.t(), x.t()) if wins["weight"] else dy.t() @ x
    return [dx, dweight]


@_linear.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@_linear_backward.register_fake
def _(dy: Tensor, x: Tensor, weight: Tensor, which: list[bool]) -> list[Tensor]:
    return [part.new_empty(part.shape if needed else 0) for part, needed in zip((x, weight), which, strict=True)]


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _grad(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
    if torch.is_grad_enabled():  # only under create_graph=True
        raise RuntimeError("second derivatives (create_graph=True) need torch's product, outside of `fast_linears`")
    which = list(ctx.needs_input_grad)
    dx, dweight = _linear_backward(dy, *ctx.saved_tensors, which)
    return dx if which[0] else None, dweight if which[1] else None


_linear.register_autograd(_grad, setup_context=_save)
