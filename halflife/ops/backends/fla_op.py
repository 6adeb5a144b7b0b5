"""fla's kernels as one op of torch, which a compiler takes as a black box: Dynamo cannot trace fla's own functions.

Their backward passes need what their forward passes keep, which differs from kernel to kernel and from release to
release. The op keeps its inputs alone, and runs the forward pass again before the backward pass.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_AUTOGRAD = [
    getattr(torch._C.DispatchKey, f"Autograd{name}") for name in ("Functionality", "Other", "CPU", "CUDA")
]  # fmt: skip


def function(name: str) -> Callable[..., Any]:
    """`fla.ops.<name>`, imported when it is called."""
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(f"fla.ops.{module}"), last)


class OutputSize(TorchFunctionMode):
    """Inside this block, `torch.repeat_interleave` knows the length of its output and does not ask the device."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        more = {"output_size": self.size} if func is torch.repeat_interleave else {}
        return func(*args, **(kwargs or {}), **more)


def call(name: str, tensors: Mapping[str, Tensor | None], scale: float) -> tuple[Tensor, Tensor]:
    """Call `fla.ops.<name>` on tensors by their names: the outputs and the final states."""
    return function(name)(**tensors, scale=scale, output_final_state=True)


@torch.library.custom_op(
    "halflife::fla", mutates_args=(),
    schema="(str name, str[] names, Tensor[] tensors, float scale) -> (Tensor, Tensor)",
)  # fmt: skip
def run(name: str, names: list[str], tensors: list[Tensor], scale: float) -> tuple[Tensor, Tensor]:
    """`call` with tensors and their names."""
    o, state = call(name, dict(zip(names, tensors, strict=True)), scale)
    return o.contiguous(), state.contiguous()


@torch.library.custom_op(
    "halflife::fla_backward", mutates_args=(),
    schema="(Tensor do, Tensor dstate, str name, str[] names, Tensor[] tensors, float scale) -> Tensor[]",
)  # fmt: skip
def _backward(
    do: Tensor, dstate: Tensor, name: str, names: list[str], tensors: list[Tensor], scale: float
) -> list[Tensor]:
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in tensors]
    hidden = torch._C._dispatch_tls_local_exclude_set()  # inside an op, autograd does not see torch's operations
    for key in _AUTOGRAD:
        hidden = hidden.remove(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), hidden), torch.enable_grad():
        outputs = call(name, dict(zip(names, leaves, strict=True)), scale)
        wanted = [x for x in leaves if x.requires_grad]
        found = iter(torch.autograd.grad(outputs, wanted, (do, dstate), materialize_grads=True))
    return [next(found).contiguous() if x.requires_grad else do.new_empty(0) for x in leaves]


@run.register_fake
def _(name: str, names: list[str], tensors: list[Tensor], scale: float) -> tuple[Tensor, Tensor]:
    given = dict(zip(names, tensors, strict=True))
    q, v, bounds = given["q"], given["v"], given.get("cu_seqlens")
    sequences = v.shape[0] if bounds is None else bounds.shape[0] - 1
    return v.new_empty(v.shape), q.new_empty(sequences, v.shape[2], q.shape[3], v.shape[3], dtype=torch.float32)


@_backward.register_fake
def _(do: Tensor, dstate: Tensor, name: str, names: list[str], tensors: list[Tensor], scale: float) -> list[Tensor]:
    return [x.new_empty(x.shape) if x.is_floating_point() else do.new_empty(0) for x in tensors]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *ctx.what, tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _grad(ctx: Any, do: Tensor, dstate: Tensor) -> tuple[Any, ...]:
    if torch.is_grad_enabled():  # only under create_graph=True
        raise RuntimeError("second derivatives (create_graph=True) need backend='reference'")
    tensors = list(ctx.saved_tensors)
    found = _backward(do, dstate, *ctx.what, tensors, ctx.scale)
    return None, None, [d if x.is_floating_point() else None for x, d in zip(tensors, found, strict=True)], None


run.register_autograd(_grad, setup_context=_save)
