"""The choice of the implementation that runs an op.

| backend | implementation |
|---|---|
| `reference` | the definition: the token loop, or a plain expression |
| `mask` | weights of all pairs of tokens, T × T memory |
| `chunked` | plain PyTorch, on any device |
| `fla` | an adapter to the kernels of fla-core, on CUDA devices |
| `triton` | our kernels, on CUDA devices |
| `native` | our kernels, compiled for the CPU of this machine |

`auto` takes the fastest implementation that can run these inputs and is known to be right on their device. A single
token goes through a kernel for one token where there is one, else through the token loop. A backend asked for by name
either runs or raises an error with the reason; no other one takes its place. The choice never depends on `.training`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from halflife.ops.arguments import is_transformed
from halflife.ops.backends.choice import ORDER, order
from halflife.ops.call import Call
from halflife.ops.spec import OPS, Implementation
from halflife.precision import without_autocast
from halflife.registry import check_choice, unknown

Function = TypeVar("Function", bound=Callable[..., Any])

# Entries of a tensor; for fewer, a call of a custom op takes longer than torch's passes over them.
SMALLEST_PASS = 4096

KINDS = ("norms", "conv", "op")  # passes over memory (also gates, SwiGLU, rotations), convolutions, and the rest
_kinds: dict[str, str] = {}  # of ops, and of custom ops of kernels, that are not of the last kind
again: Any = None  # a `recompute.Recomputation`, whose kinds of ops the backward pass computes again


class CannotRun(ValueError):
    """A backend asked for by name cannot run these inputs on their device."""


def implements(
    op: str, backend: str, function: Callable[..., Any] | None = None, *,
    why_not: Callable[..., str | None] | None = None, steps: bool = False, traceable: bool = False,
) -> Callable[[Function], Function]:  # fmt: skip
    """Register the decorated function, or `function`, as the `backend` of `op`, with the fields of `Implementation`.

    Implementations of an op on tokens take a `Call` and return `(o, final state)`. Those of a pass take its arguments.
    """

    def register(function: Any) -> Any:
        OPS[op].backends[backend] = Implementation(function, why_not, steps, traceable)
        return function

    if function is not None:
        register(function)
    return register


def implements_pass(
    op: str, expression: Callable[..., Any], *, native: tuple[Any, Any] | None = None,
    triton: tuple[Any, Any] | None = None, kind: str = "norms",
) -> None:  # fmt: skip
    """Register an expression of torch, and kernels with their `why_not`, as the implementations of a pass."""
    be_kind(kind, op)
    for backend in ("chunked", "reference"):
        implements(op, backend, expression, traceable=True)
    for backend, kernel in (("native", native), ("triton", triton)):
        if kernel is not None:
            implements(op, backend, kernel[0], why_not=kernel[1])


def steps_by(op: str, backend: str, function: Callable[..., Any], why_not: Callable[..., str | None]) -> None:
    """Register `function` as what `backend` runs for one token of each sequence, without gradients."""
    OPS[op].steps[backend] = Implementation(function, why_not)


def ops() -> list[str]:
    """Return the names of all ops."""
    return OPS.names()


def registered(op: str) -> list[str]:
    """Return all backends of `op`, the fastest first, whether or not they can run here."""
    return sorted(OPS[op].backends, key=ORDER.index)


def why_not(op: str, backend: str, device: torch.device | str = "cpu", call: Any = None) -> str | None:
    """Return the reason why `backend` cannot run `op` on `device` (and this call, if given), or None if it can."""
    reason = OPS[op].backends[backend].why_not
    return None if reason is None else reason(op, torch.device(device), call)


def available_backends(op: str, device: torch.device | str = "cpu") -> list[str]:
    """Return the backends that can run `op` on `device`; the first one is the choice of `auto`.

    Triton's interpreter (TRITON_INTERPRET=1 on a CPU) is for tests, which ask for it by name. It is not listed.
    """
    device = torch.device(device)
    listed = [name for name in registered(op) if name != "triton" or device.type == "cuda"]
    return [name for name in listed if why_not(op, name, device) is None]


def choose(op: str, backend: str, device: torch.device, call: Any = None) -> Callable[..., Any]:
    """The implementation of `op` that runs on `device` (and this call, if given).

    If `backend` is none of this op, or cannot run here, a ValueError gives the reason and the backends that can.
    """
    backends = OPS[op].backends
    if backend == "auto":
        # The mask takes T² memory and the interpreter minutes, so both run only when asked for by name.
        for name in order(op, call):
            known = backends.get(name)
            if known is None or name == "mask" or (name == "triton" and device.type != "cuda"):
                continue
            if known.why_not is None or known.why_not(op, device, call) is None:
                return known.function
    reason = why_not(op, backend, device, call) if backend in backends else "unknown"
    if reason is None:
        return backends[backend].function
    able = ["auto", *(name for name in registered(op) if why_not(op, name, device, call) is None)]
    if backend not in backends:
        raise unknown(f"backend of {op} on {device.type}", backend, able)
    raise CannotRun(f"backend {backend!r} cannot run this {op}: {reason}. Those that can: {', '.join(able)}")


def _traceable(op: str, backend: str) -> str:
    """Return the backend for a call under torch.func or forward-mode differentiation, which need plain operations."""
    known = OPS[op].backends.get(backend)
    if known is not None and backend not in ("reference", "mask") and not known.traceable:
        raise CannotRun(
            f"backend {backend!r} has no rules for torch.func and forward-mode derivatives of {op}; use 'reference'"
        )
    return "reference" if backend == "auto" else backend


def implementation_of(call: Call, backend: str) -> Callable[[Call], Any]:
    """Return the implementation that runs a call; see `choose`.

    A single token goes through the backend's step, if it has one. With "auto" that is the first step that can run it,
    or else the token loop, which are the fastest forms while decoding. Under autograd it goes through the loop.
    """
    op, device = call.op, call.device
    if is_transformed():
        backend = _traceable(op, backend)
    elif call.is_token:
        if (step := step_of(call, backend, device)) is not None:
            return step
        backend = "reference" if backend == "auto" else backend
    return choose(op, backend, device, call)


def step_of(call: Call, backend: str, device: torch.device) -> Callable[[Call], Any] | None:
    """Return what runs a call of a single token on `device`, or None if nothing is made for that."""
    spec, names = call.spec, (backend,)
    if backend == "auto":
        names = ("triton", "native", "chunked") if device.type == "cuda" else ("native", "chunked")
    for name in names:
        known = spec.steps.get(name, spec.backends.get(name))
        if known is None or not (known.steps or name in spec.steps) or (name != "chunked" and call.differentiated):
            continue
        if known.why_not is None or known.why_not(call.op, device, call) is None:
            return known.function
    return None


def dispatch(
    op: str, tensors: Mapping[str, Any], initial_state: Any, cu_seqlens: Any, backend: str, output_final_state: bool,
    **settings: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """Check the arguments of an op, choose its implementation and run it.

    `settings` are `scale`, `chunk_size`, and the options of the op (see `Call`); `ops.linear_attention` describes the
    rest. It returns the outputs in v's dtype, and the final state or None. A call whose initial state is float64 runs
    in float64, also with other inputs, and so returns a float64 state.
    """
    call = Call.of(op, tensors, initial_state, cu_seqlens, **settings)
    dtype, call = call.output_dtype, call.widened()
    implementation = implementation_of(call, backend)
    if call.tensors.get("skip") is not None and implementation is not OPS[op].backends["triton"].function:
        implementation = partial(_with_skip, implementation)
    with without_autocast(call.device):
        if again is not None and kind_of(op) in again.kinds:
            o, state = again.run(partial(_with, call, implementation), [*call.tensors.values(), *(call.state or ())])
        else:
            o, state = implementation(call)
    return o if isinstance(o, tuple) or o.dtype == dtype else o.to(dtype), state if output_final_state else None


def folded(call: Call, backend: str = "auto") -> Call:
    """The call with its values times their `gain`, for an implementation that does not take it."""
    if (gain := call.get("gain")) is None:
        return call
    return call.with_tensors(v=run_pass("scale_heads", backend, (call["v"], gain)), gain=None)


def _with_skip(implementation: Callable[[Call], Any], call: Call) -> tuple[Tensor, Any]:
    o, state = implementation(call)
    return add_skip(o, call.get("skip"), call["v"]), state


def add_skip(o: Tensor, skip: Tensor | None, v: Tensor) -> Tensor:
    """`o + D ⊙ v` of `o, v [B, T, H, V]` and D `[H]`; o itself where D is None."""
    return o if skip is None else torch.addcmul(o, skip.unsqueeze(-1).to(o.dtype), v.to(o.dtype))


def be_kind(kind: str, *names: str) -> None:
    """Let ops, and custom ops of kernels with names of their own, be of a kind, one of `KINDS`."""
    _kinds.update(dict.fromkeys(names, kind))


def kind_of(op: str) -> str:
    """The kind of an op on tokens, of a pass, or of a custom op."""
    return _kinds.get(op, "op")


def _with(call: Call, implementation: Callable[[Call], Any], *tensors: Any) -> Any:
    """Run a call with other tensors: those of the op, and then the states."""
    count = len(call.tensors)
    return implementation(call.with_tensors(tensors[count:] or None, **dict(zip(call.tensors, tensors, strict=False))))


def run_pass(op: str, backend: str, tensors: Sequence[Tensor | None], *settings: Any, always: bool = False) -> Any:
    """Run an op that is a pass over memory: `implementation(*tensors, *settings)`.

    With "auto", tensors of fewer than `SMALLEST_PASS` entries go through torch's expression, which is faster for them,
    unless the kernel is `always` faster, as it is on a GPU.
    """
    first: Any = tensors[0]
    device = first.device
    for x in tensors:
        if x is not None and x.device != device:
            raise ValueError(f"all tensors of {op} must be on one device; got {device} and {x.device}")
    if backend == "auto" and first.numel() < SMALLEST_PASS and not (always or first.is_cuda):
        return OPS[op].backends["reference"].function(*tensors, *settings)
    if is_transformed():
        backend = _traceable(op, backend)
    implementation = choose(op, backend, device, tensors)
    if again is not None and kind_of(op) in again.kinds:
        return again.run(lambda *tensors: implementation(*tensors, *settings), tensors)
    return implementation(*tensors, *settings)


def run_gpu_pass(
    op: str, plain: Callable[..., Any], backend: str, tensors: Sequence[Tensor | None], *settings: Any
) -> Any:
    """As `run_pass`, for a pass without a kernel for CPUs: there "auto" is its expression `plain` at once."""
    first: Any = tensors[0]
    if first.is_cpu and backend == "auto":
        return plain(*tensors, *settings)
    return run_pass(op, backend, tensors, *settings)


def beside(backend: str) -> str:
    """The backend of the norms, gates and convolutions of a layer whose op on a state runs by `backend`.

    They stay in plain torch where that op does, and else run as is fastest. An unknown name is a ValueError, also where
    a layer has no other op, as attention.
    """
    check_choice("backend", backend, ("auto", *ORDER))
    return "chunked" if backend in ("reference", "chunked", "mask") else "auto"
