"""A check of every op on the user's device: each backend is compared with the float64 token loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from halflife.ops.backends.dispatch import CannotRun, available_backends, dispatch, registered, run_pass
from halflife.ops.delta_rule import delta_rule
from halflife.ops.dplr import dplr
from halflife.ops.gate_rank import gate_rank
from halflife.ops.koopman.op import koopman_attention
from halflife.ops.koopman.state import COMMITTED
from halflife.ops.linear_attention import linear_attention
from halflife.ops.log_linear.op import log_linear_attention
from halflife.ops.ridge_attention import ridge_attention
from halflife.ops.spec import OPS

# The largest allowed error relative to the largest entry, four times the worst one measured on a CPU (5e-7, 3.5e-3 and
# 1.6e-3).
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.4e-2, torch.float16: 6.4e-3}
# An op that solves systems loses digits in proportion to their condition number, which is up to T / ridge. The float32
# bounds are four times the worst of four draws: 2.3e-4 (decayed, or compiled, which follows the operators of single
# tokens by rank-one updates) and 2.6e-6. In bfloat16 the rounding of the outputs is larger (3.6e-3).
TOLERANCES = {
    "koopman_attention": TOLERANCE | {torch.float32: 9.2e-4},
    "ridge_attention": TOLERANCE | {torch.float32: 1.1e-5},
    # Four times the measured error (the first two: on a CPU with AVX512-BF16, the third: with AVX2): gradients of
    # parameters are sums over tokens of terms that cancel. Layers compute decays in float32 alone.
    "swiglu": TOLERANCE | {torch.bfloat16: 6.4e-2},
    "token_mix_of_norm": TOLERANCE | {torch.bfloat16: 8.8e-2},
    "feedback_keys": TOLERANCE | {torch.float32: 1.5e-5, torch.bfloat16: 0.18},
    "log_decay": {torch.float32: 1.2e-5},
    "gates": {torch.float32: 1.2e-5},
}
# Kernels round decayed operands to the inputs' dtype before they multiply. The bound is four times the worst error
# measured in Triton's interpreter (1.0e-2).
KERNELS = {"triton": 4e-2, "fla": 4e-2}

# Ops with cases of their own; the inputs of all others are drawn from their specifications.
VARIED = {
    op.__name__: op
    for op in (linear_attention, dplr, delta_rule, gate_rank, log_linear_attention, ridge_attention, koopman_attention)
}
SIZES = {"B": 2, "H": 2, "G": 1, "K": 32, "V": 32, "D": 64, "W": 4, "R": 3, "P": 16, "L": 5}  # those of the others


@dataclass(frozen=True)
class Check:
    """One comparison of a backend with the token loop.

    Attributes:
        op, backend, dtype: the op, its backend and the dtype of the inputs.
        variant: granularity of the decay ("grouped": scalar, with shared queries and keys; "gain": with factors of
            values), kind of update, or how often an operator is fitted and whether it decays.
        error: the worst relative error over outputs, states and gradients; infinite if the backend raised an error.
        failure: the text of that error, or "".
    """

    op: str
    backend: str
    variant: str
    dtype: torch.dtype
    error: float
    failure: str = ""

    @property
    def tolerance(self) -> float:
        if self.dtype == torch.bfloat16 and self.backend in KERNELS:
            return KERNELS[self.backend]
        return TOLERANCES.get(self.op, TOLERANCE)[self.dtype]

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        verdict = "ok" if self.ok else f"WRONG ({self.failure or f'above {self.tolerance:.0e}'})"
        return f"{self.op:26} {self.backend:10} {self.variant:14} {name:9} {self.error:.1e}  {verdict}"


@dataclass(frozen=True)
class Report:
    """All checks of a device. It is `ok` if there is at least one check and all of them are."""

    device: str
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        return bool(self.checks) and all(check.ok for check in self.checks)

    def __str__(self) -> str:
        verdict = "all right" if self.ok else "SOMETHING IS WRONG"
        return "\n".join([f"selfcheck on {self.device}: {verdict}", *(f"  {check}" for check in self.checks)])


def selfcheck(
    device: torch.device | str = "cpu", length: int = 130, *, ops: Sequence[str] | None = None,
    backends: Sequence[str] | None = None,
) -> Report:  # fmt: skip
    """Compare outputs, final states and gradients of all backends of all ops with the float64 token loop.

    Inputs that a backend refuses (because of their dtype, for example) are left out. If it takes the inputs and raises
    an error, the check is WRONG.

    Args:
        device: device to run on; "cuda" checks the kernels that would run there.
        length: number of tokens. The default is no multiple of the chunk, so that the last chunk is partly empty.
        ops: names of the ops to check; None means all.
        backends: backends to check; None means those of `available_backends`. These do not include Triton's slow
            interpreter; ("triton",) with TRITON_INTERPRET=1 checks it.
    """
    checks = []
    for op, variant, arguments, options in _cases(length):
        if ops is not None and op not in ops:
            continue
        chosen = available_backends(op, device)
        if backends is not None:
            chosen = [name for name in registered(op) if name in backends]
        # A number of bfloat16 is one of float16 too, but for the tiny ones, which change by 3e-8 at most.
        for dtypes in ([torch.float32], [torch.bfloat16, torch.float16]):
            tried = [dtype for dtype in dtypes if dtype in TOLERANCES.get(op, TOLERANCE)]
            if not tried:
                continue
            # The token loop gets the same rounded inputs, so that the error is that of the computation alone.
            rounded = {name: x.to(tried[0]).double() for name, x in arguments.items()}
            expected = _run(op, rounded, options, "reference", torch.float64, "cpu")
            for dtype, backend in product(tried, chosen):
                checks += _check(op, variant, rounded, options, backend, dtype, device, expected)
    return Report(str(device), tuple(checks))


def _check(
    op: str, variant: str, arguments: dict[str, Tensor], options: dict[str, Any],
    backend: str, dtype: torch.dtype, device: Any, expected: list[Tensor],
) -> list[Check]:  # fmt: skip
    try:
        got = _run(op, arguments, options, backend, dtype, device)
    except CannotRun:
        return []
    except Exception as error:  # a compiler of kernels may raise anything
        failure = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        return [Check(op, backend, variant, dtype, float("inf"), failure)]
    worst = max(_error(a, b) for a, b in zip(got, expected, strict=True))
    return [Check(op, backend, variant, dtype, worst)]


def _cases(length: int) -> Iterator[tuple[str, str, dict[str, Tensor], dict[str, Any]]]:
    """Yield (name of the op, variant, tensors in float64, other arguments) of each comparison."""
    draw = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float32).double()

    for granularity in ("none", "scalar", "vector"):
        q, k, v = randn(2, length, 2, 32), F.normalize(randn(2, length, 2, 32), dim=-1), randn(2, length, 2, 48)
        g = {} if granularity == "none" else {"g": -randn(*(q.shape if granularity == "vector" else q.shape[:3])).exp()}
        yield "linear_attention", granularity, {"q": q, "k": k, "v": v, **g}, {}
        removed = F.normalize(randn(*k.shape), dim=-1)
        corrected = {"a": -removed, "b": removed * randn(*k.shape).sigmoid()}
        yield "dplr", granularity, {"q": q, "k": k, "v": v, **corrected, **g}, {}
        written = {"beta": randn(*q.shape[:3]).sigmoid()}
        yield "delta_rule", granularity, {"q": q, "k": k, "v": v, **written, **g}, {}
        if granularity == "scalar":
            for op, more in (("linear_attention", {}), ("dplr", corrected), ("delta_rule", written)):
                yield op, "grouped", {"q": q[:, :, :1], "k": k[:, :, :1], "v": v, **more, **g}, {}
    for update in ("linear", "delta"):
        q, k, v = randn(2, length, 2, 32), F.normalize(randn(2, length, 2, 32), dim=-1), randn(2, length, 2, 48)
        g_slow, g_fast = (-randn(*q.shape[:3]).exp() for _ in range(2))
        gates = {"g_slow": torch.where(randn(*g_slow.shape) > 1, g_slow, 0), "g_fast": g_fast}
        beta = {"beta": randn(*q.shape[:3]).sigmoid()} if update == "delta" else {}
        yield "gate_rank", update, {"q": q, "k": k, "v": v, **gates, **beta}, {}
        if update == "linear":
            yield "gate_rank", "gain", {"q": q, "k": k, "v": v, **gates, "gain": g_slow.exp()}, {}
            yield "linear_attention", "gain", {"q": q, "k": k, "v": v, "g": g_fast, "gain": g_slow.exp()}, {}
    g, weights = -randn(*q.shape[:3]).exp(), randn(*q.shape[:3], 5).sigmoid()
    yield "log_linear_attention", "scalar", {"q": q, "k": k, "v": v, "g": g, "weights": weights}, {}
    sums = {"g": g, "beta": randn(*q.shape[:3]).sigmoid(), "ridge": 0.1 + randn(*q.shape[2:]).exp()}
    yield "ridge_attention", "scalar", {"q": q, "k": k, "v": v, **sums}, {}
    for refresh in ("chunk", "token"):
        q, k, v = randn(2, length, 2, 16), randn(2, length, 2, 16), randn(2, length, 2, 24)
        options = {"gamma": 1.2, "mix": 0.5, "chunk_size": 16, "refresh": refresh}
        yield "koopman_attention", refresh, {"q": q, "k": k, "v": v}, options
        decayed = {"g": -randn(*q.shape[:3]).exp(), "beta": randn(*q.shape[:3]).sigmoid()}
        yield "koopman_attention", f"{refresh}, decayed", {"q": q, "k": k, "v": v, **decayed}, options

    for spec in (OPS[name] for name in OPS.names() if name not in VARIED):
        draw.manual_seed(0)  # the inputs of an op do not depend on which others there are
        known, tensors = {**SIZES, "T": length, "1": 1}, {}
        for name, shape in spec.tensors.items():
            x = randn(*shape.sizes(known)) if not shape.leading else randn(2, length, *shape.sizes(known))
            if name in spec.log_decays:
                x = -x.exp()
            elif shape.dtype == "int":
                x = torch.arange(1.0, x.shape[1] + 1, dtype=x.dtype).expand(x.shape)
                x = x % known["V"] if name == "labels" else x
            elif name == "k":
                x = F.normalize(x, dim=-1)
            elif name == "bound" or (len(shape.choices[0]) == 3 and shape.choices[0][-1][0] == "H"):
                x = x.sigmoid()  # a bound of decays, a strength or a step
            tensors[name] = x
        yield spec.name, "", tensors, spec.settings


def _run(
    op: str, arguments: dict[str, Tensor], options: dict[str, Any], backend: str, dtype: torch.dtype, device: Any
) -> list[Tensor]:
    """`[o, final state, gradient of each argument]` in float64 on the CPU."""
    draw = torch.Generator().manual_seed(1)
    constants = OPS[op].constants
    leaves = {n: x.to(device, dtype).detach().requires_grad_(n not in constants) for n, x in arguments.items()}
    o, state = _call(op, leaves, options, backend)
    states = [state[name] for name in COMMITTED] if isinstance(state, dict) else state
    if op == "log_linear_attention":
        states = states[0]  # without the position
    outputs = [o, *(states if isinstance(states, list | tuple) else [] if states is None else [states])]
    # The weights are drawn in bfloat16, so that they are the same numbers in every dtype.
    weights = [torch.randn(x.shape, generator=draw).bfloat16().to(x) for x in outputs]
    torch.stack([(x * weight).sum() for x, weight in zip(outputs, weights, strict=True)]).sum().backward()
    # A short sequence may not read a tensor, which a token loop sees and a chunked form does not.
    grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves.values() if x.requires_grad]
    return [x.detach().double().cpu() for x in (*outputs, *grads)]


def _call(op: str, arguments: dict[str, Tensor], options: dict[str, Any], backend: str) -> tuple[Tensor, Any]:
    if op in VARIED:
        return VARIED[op](**arguments, **options, backend=backend, output_final_state=True)
    if OPS[op].state:
        return dispatch(op, arguments, None, None, backend, True, **options)
    out = run_pass(op, backend, list(arguments.values()), *options.values())
    return (out[0], out[1:]) if isinstance(out, tuple) else (out, None)


def _error(got: Tensor, expected: Tensor) -> float:
    if not torch.isfinite(got).all():
        return float("inf")
    return ((got - expected).abs().max() / expected.abs().max().clamp(min=1e-30)).item()
