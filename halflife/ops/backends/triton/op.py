"""The kernels as differentiable ops of torch, which `torch.compile` and `torch.export` see as single nodes.

Those of linear attention are in `linear.py` and `vector/`, those of the delta rule in `delta/`, and those of DPLR in
`dplr/`, which also run the delta rule under a vector decay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from halflife.ops.arguments import even, is_transformed
from halflife.ops.backends.triton import OPS, interpreted, linear
from halflife.ops.backends.triton.delta import host as delta
from halflife.ops.backends.triton.dplr import dplr_host as dplr
from halflife.ops.backends.triton.dplr import of_delta
from halflife.ops.backends.triton.launch import is_traced
from halflife.ops.backends.triton.vector import vector_host as vector

_PROXY = torch._C._TorchDispatchModeKey.PROXY  # of the mode that records a graph
HOST: dict[Any, Callable[..., Any]] = {}  # op → its host code, which is also the op of tensors without data


class Op:
    """The op `halflife::name`, which runs its host code without torch's dispatcher where nothing looks on.

    The dispatcher takes as long as the host code itself. A compiler and modes, as those that count operations, get it.
    """

    def __init__(self, name: str, host: Callable[..., Any], mutates_args: Sequence[str] = ()) -> None:
        if interpreted():
            self.declared = torch.library.custom_op(f"halflife::{name}", host, mutates_args=mutates_args)
            self.declared.register_fake(host)
        else:
            self.declared = torch.library.triton_op(f"halflife::{name}", host, mutates_args=mutates_args)
        self.host, self.packet, self.mutates = host, getattr(torch.ops.halflife, name), bool(mutates_args)
        self.save = self.grad = None
        self.function = type(name, (_Differentiable,), {})  # profilers show its name
        kinds = [str(argument.type) for argument in self.packet.default._schema.arguments]
        self.floats = [place for place, kind in enumerate(kinds) if kind.startswith(("float", "Optional[float"))]

    def register_autograd(self, grad: Callable[..., Any], *, setup_context: Callable[..., None]) -> None:
        """As `torch.library.register_autograd`."""
        self.grad, self.save = grad, setup_context
        self.declared.register_autograd(grad, setup_context=setup_context)

    def __call__(self, *given: Any, **options: Any) -> Any:
        """Run on these arguments; some of ops for tokens come by name."""
        watched = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or is_transformed()
        if watched or self.mutates or options or any(map(is_traced, given)):
            return self.packet(*given, **options)
        wanted = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in given)
        exact = self.numbers(given)
        return self.function.apply(*exact, self) if wanted and self.grad is not None else self.host(*exact)

    def numbers(self, given: Sequence[Any]) -> Sequence[Any]:
        """The arguments with floats where the schema has them, as the dispatcher gives them to a kernel."""
        integers = [place for place in self.floats if place < len(given) and type(given[place]) is int]
        return [float(x) if place in integers else x for place, x in enumerate(given)] if integers else given


class _Differentiable(torch.autograd.Function):
    """The host code of an op and its gradient."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        given, ctx.op = given[:-1], given[-1]
        out = ctx.op.host(*given)
        ctx.op.save(ctx, given, out)
        ctx.several = isinstance(out, list)
        return tuple(out) if ctx.several else out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        found = ctx.op.grad(ctx, list(grads)) if ctx.several else ctx.op.grad(ctx, *grads)
        return *(found if isinstance(found, tuple) else (found,)), None


def declare(name: str, host: Callable[..., Any], mutates_args: Sequence[str] = ()) -> Op:
    """Declare the op `halflife::name`, whose schema is the signature of its host code. It writes to `mutates_args`.

    A compiler sees the launches inside. It cannot see those of Triton's interpreter, where the op is a black box.
    """
    op = OPS[name] = Op(name, host, mutates_args)
    HOST[op.packet.default] = host
    return op


def declare_gradients(name: str, host: Callable[..., Any]) -> Callable[..., Any]:
    """As `declare`, for a backward pass, whose host code runs itself where nothing traces it, under other modes too.

    Its gradients may lie beside each other in memory (`ops.backends.split`), as results of an op of torch may not.
    """
    op = declare(name, host)

    def run(*given: Any) -> Any:
        tensors = (x for part in given for x in (part if isinstance(part, list) else [part]))
        traced = torch._C._get_dispatch_mode(_PROXY) is not None or any(map(is_traced, tensors))
        return op.packet(*given) if traced or torch.compiler.is_compiling() else host(*op.numbers(given))

    return run


def save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """The `setup_context` of an op whose backward pass reads its inputs, all of which are tensors or None."""
    ctx.save_for_backward(*inputs)


def differentiable(name: str, count: int, forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
    """Declare the op `name(*tensors, *settings) → (o, final, *kept)` and its gradient.

    The first `count` arguments are the tensors that have gradients, from q, k and v to the initial states. `kept` are
    what the backward pass reads beside them. It is `name_backward(do, dfinal, *kept, *tensors, *settings) → gradients`,
    with an empty tensor for None.
    """
    kernels, gradients = declare(name, forward), declare_gradients(f"{name}_backward", backward)

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.scale, ctx.chunk_size = inputs  # the last tensor is cu_seqlens
        ctx.save_for_backward(*output[2:], *tensors)
        ctx.mark_non_differentiable(*output[2:])
        ctx.set_materialize_grads(False)  # a training step does not use the final state

    def grad(ctx: Any, do: Tensor | None, dfinal: Tensor | None, *_: Any) -> tuple[Any, ...]:
        if torch.is_grad_enabled():  # only under create_graph=True; autograd cannot see into the kernels
            raise RuntimeError("second derivatives (create_graph=True) need backend='reference'")
        saved = ctx.saved_tensors
        tensors = saved[-count - 1 : -1]
        do = torch.zeros_like(tensors[2]) if do is None else even(do)
        dfinal = None if dfinal is None else dfinal.contiguous()
        found = gradients(do, dfinal, *saved, ctx.scale, ctx.chunk_size)
        return *[None if x is None else d for x, d in zip(tensors, found, strict=True)], None, None, None

    kernels.register_autograd(grad, setup_context=save)


def _present(*grads: Tensor | None) -> list[Tensor]:
    """Gradients as an op returns them."""
    first = next(x for x in grads if x is not None)
    return [first.new_empty(0) if x is None else x for x in grads]


def _linear(
    q: Tensor, k: Tensor, v: Tensor, g_slow: Tensor | None, g_fast: Tensor | None, gain: Tensor | None,
    skip: Tensor | None, initial: Tensor | None, cu_seqlens: Tensor | None, scale: float, chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return linear.forward(q, k, v, g_slow, g_fast, gain, skip, initial, cu_seqlens, scale, chunk_size)


def _linear_backward(
    do: Tensor, dfinal: Tensor | None, entering: Tensor, carried: Tensor, q: Tensor, k: Tensor, v: Tensor,
    g_slow: Tensor | None, g_fast: Tensor | None, gain: Tensor | None, skip: Tensor | None, initial: Tensor | None,
    cu_seqlens: Tensor | None, scale: float, chunk_size: int,
) -> list[Tensor]:  # fmt: skip
    rest = (entering, carried, cu_seqlens, scale, chunk_size, do, dfinal)
    return _present(*linear.backward(q, k, v, g_slow, g_fast, gain, skip, initial, *rest))


def _vector(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, initial: Tensor | None, cu_seqlens: Tensor | None, scale: float,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return vector.forward(q, k, v, g, initial, cu_seqlens, scale, chunk_size)


def _vector_backward(
    do: Tensor, dfinal: Tensor | None, entering: Tensor, carried: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor,
    initial: Tensor | None, cu_seqlens: Tensor | None, scale: float, chunk_size: int,
) -> list[Tensor]:  # fmt: skip
    rest = (entering, carried, cu_seqlens, scale, chunk_size, do, dfinal)
    return _present(*vector.backward(q, k, v, g, initial, *rest))


def _delta(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g_slow: Tensor | None, g_fast: Tensor | None,
    initial: Tensor | None, cu_seqlens: Tensor | None, scale: float, chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return delta.forward(q, k, v, beta, g_slow, g_fast, initial, cu_seqlens, scale, chunk_size)


def _delta_backward(
    do: Tensor, dfinal: Tensor | None, entering: Tensor, transition: Tensor, q: Tensor, k: Tensor, v: Tensor,
    beta: Tensor, g_slow: Tensor | None, g_fast: Tensor | None, initial: Tensor | None, cu_seqlens: Tensor | None,
    scale: float, chunk_size: int,
) -> list[Tensor]:  # fmt: skip
    rest = (entering, transition, cu_seqlens, scale, chunk_size, do, dfinal)
    return _present(*delta.backward(q, k, v, beta, g_slow, g_fast, initial, *rest))


def _dplr(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor | None, g: Tensor | None, initial: Tensor | None,
    cu_seqlens: Tensor | None, scale: float, chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return dplr.forward(q, k, v, a, b, g, initial, cu_seqlens, scale, chunk_size)


def _dplr_backward(
    do: Tensor, dfinal: Tensor | None, entering: Tensor, transition: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor,
    b: Tensor | None, g: Tensor | None, initial: Tensor | None, cu_seqlens: Tensor | None, scale: float,
    chunk_size: int,
) -> list[Tensor]:  # fmt: skip
    rest = (entering, transition, cu_seqlens, scale, chunk_size, do, dfinal)
    return _present(*dplr.backward(q, k, v, a, b, g, initial, *rest))


def _kda(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, initial: Tensor | None, cu_seqlens: Tensor | None,
    scale: float, chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return of_delta.forward(q, k, v, beta, g, initial, cu_seqlens, scale, chunk_size)


def _kda_backward(
    do: Tensor, dfinal: Tensor | None, entering: Tensor, transition: Tensor, a: Tensor, values: Tensor, q: Tensor,
    k: Tensor, v: Tensor, beta: Tensor, g: Tensor, initial: Tensor | None, cu_seqlens: Tensor | None, scale: float,
    chunk_size: int,
) -> list[Tensor]:  # fmt: skip
    rest = (entering, transition, a, values, cu_seqlens, scale, chunk_size, do, dfinal)
    return _present(*of_delta.backward(q, k, v, beta, g, initial, *rest))


differentiable("triton_linear", 8, _linear, _linear_backward)
differentiable("triton_vector", 5, _vector, _vector_backward)
differentiable("triton_delta", 7, _delta, _delta_backward)
differentiable("triton_dplr", 7, _dplr, _dplr_backward)
differentiable("triton_kda", 6, _kda, _kda_backward)
