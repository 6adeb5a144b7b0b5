"""What `gpu.py` checks and times. A job yields rows, dicts that say what was found or what failed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import cases
import parity
import timing
import torch
from gpu_clock import SCALES, Row, failed, measured
from gpu_models import MODELS, decode_rows, koopman_layer, model, pass_rows, passes, step_rows
from torch import Tensor

from halflife import ops
from halflife.layers.fox import forgetting_attention
from halflife.ops.backends import dispatch as backends
from halflife.training.speed import gemm_rate


def _softmax(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, None]:
    return cases.sdpa({"q": q, "k": k, "v": v}).forward(), None


def _forgetting(q: Tensor, k: Tensor, v: Tensor, g: Tensor, backend: str) -> tuple[Tensor, None]:
    return forgetting_attention(q, k, v, g, backend), None


# name → (op, function, names of its inputs)
OPS: dict[str, tuple[str, Callable[..., Any], tuple[str, ...]]] = {
    "linear_attention, none": ("linear_attention", ops.linear_attention, ("q", "k", "v")),
    "linear_attention, scalar": ("linear_attention", ops.linear_attention, ("q", "k", "v", "g")),
    "linear_attention, vector": ("linear_attention", ops.linear_attention, ("q", "k", "v", "gv")),
    "gate_rank, linear": ("gate_rank", ops.gate_rank, ("q", "k", "v", "g_slow", "g")),
    "delta_rule, none": ("delta_rule", ops.delta_rule, ("q", "k", "v", "beta")),
    "delta_rule, scalar": ("delta_rule", ops.delta_rule, ("q", "k", "v", "beta", "g")),
    "delta_rule, vector": ("delta_rule", ops.delta_rule, ("q", "k", "v", "beta", "gv")),
    "gate_rank, delta": ("gate_rank", ops.gate_rank, ("q", "k", "v", "g_slow", "g", "beta")),
    "dplr, vector": ("dplr", cases.dplr, ("q", "k", "v", "beta", "gv")),
    "log_linear_attention, scalar": (
        "log_linear_attention", ops.log_linear_attention, ("q", "k", "v", "g", "weights"),
    ),
    "ridge_attention, scalar": ("ridge_attention", ops.ridge_attention, ("q", "k", "v", "g", "beta", "ridge")),
    "forgetting_attention, scalar": ("forgetting_attention", _forgetting, ("q", "k", "v", "g")),
    "softmax attention": ("", _softmax, ("q", "k", "v")),
}  # fmt: skip


def inputs(name: str, batch: int, length: int, size: int, device: str) -> dict[str, Tensor]:
    """Inputs in bfloat16, with gates in float32."""
    heads = SCALES[device].heads
    x = cases.inputs(length, heads, size, size, device, torch.bfloat16, batch)
    x["weights"] = torch.rand(batch, length, heads, (length - 1).bit_length() + 1, device=device)
    x["ridge"] = 0.25 + torch.rand(heads, size, device=device)
    return {key: x[key].detach().requires_grad_() for key in OPS[name][2]}


def _run(name: str, x: dict[str, Tensor], backend: str) -> list[Tensor]:
    """The outputs and the gradients of all inputs."""
    o = OPS[name][1](*x.values(), **({"backend": backend} if OPS[name][0] else {}))[0]
    return [o, *torch.autograd.grad(o, list(x.values()), torch.ones_like(o))]


def backends_of(name: str, whose: str = "all") -> list[str]:
    """What is timed: our kernels, or else plain torch, and fla's; SDPA for softmax attention."""
    if not OPS[name][0]:
        return [] if whose == "fla" else ["SDPA"]
    known = backends.registered(OPS[name][0])
    ours = "triton" if "triton" in known else "chunked"
    return parity.chosen([ours, *(["fla"] if "fla" in known else [])], None if whose == "all" else whose == "fla")


def op_rows(job: str, device: str) -> Iterator[Row]:
    """Compare the backends of "op / K / whose" with the chunked form in float64, then time those that are right."""
    name, size, whose = job.rsplit(" / ", 2)
    right = []
    for backend in backends_of(name, whose):
        row: Row = {"part": "check", "op": name, "backend": backend, "K": int(size), "T": SCALES[device].checked}
        try:
            error = _error(name, int(size), device, backend) if OPS[name][0] else 0.0
            right += [backend] if error < parity.TOLERANCE[torch.bfloat16] else []
            yield row | {"error": error, "ok": backend in right}
        except Exception as failure:
            yield row | failed(failure)
    for batch, length in SCALES[device].shapes:
        x = inputs(name, batch, length, int(size), device)
        for backend in right:
            row = {"part": "ops", "op": name, "backend": backend, "B": batch, "T": length, "K": int(size)}
            try:
                yield row | _timed(name, x, backend, device)
            except Exception as failure:
                yield row | failed(failure)


def _error(name: str, size: int, device: str, backend: str) -> float:
    x = inputs(name, 1, SCALES[device].checked, size, device)
    wide = {key: y.detach().double().requires_grad_() for key, y in x.items()}
    exact = _run(name, wide, "chunked")
    return max(parity.relative_error(y.double(), z) for y, z in zip(_run(name, x, backend), exact, strict=True))


def _timed(name: str, x: dict[str, Tensor], backend: str, device: str) -> Row:
    def forward() -> None:
        with torch.no_grad():
            OPS[name][1](*x.values(), **({"backend": backend} if OPS[name][0] else {}))

    return measured(forward, device, "forward_ms") | measured(lambda: _run(name, x, backend), device, "both_ms")


def launching(device: torch.device) -> list[Callable[[], object]]:
    """Calls that launch every kernel of ours whose time is taken, on tensors without data."""
    scale = SCALES[device.type]
    shapes, made = ((1, scale.checked), *scale.shapes), []
    for name in OPS:
        if "triton" in backends_of(name) and name != "ridge_attention, scalar":
            made += [partial(_op_launches, name, shape, size) for shape in shapes for size in scale.sizes]
    return [*made, *(partial(_model_launches, name) for name in MODELS), _pass_launches, _koopman_launches]


def _op_launches(name: str, shape: tuple[int, int], size: int) -> None:
    import offline_models

    with offline_models.on_a_gpu():
        _run(name, inputs(name, *shape, size, "meta"), "triton")


def _model_launches(name: str) -> None:
    """A step of a model, and a token after a prompt, as on a GPU."""
    import offline_models

    cast, built = offline_models._Autocast(), model(name, "meta")
    ids = torch.zeros(*SCALES["meta"].step, dtype=torch.long, device="meta")
    with offline_models.on_a_gpu(cast), cast:
        built(ids)[0].float().sum().backward()
        if name != "llama":  # whose cache asks the device for its length
            with torch.no_grad():
                built(ids[:1, :1], built(ids[:1, :64])[1])


def _pass_launches() -> None:
    import offline_models

    with offline_models.on_a_gpu():
        for run, given in passes("meta").values():
            y = run()
            torch.autograd.grad(y, given, torch.ones_like(y))


def _koopman_launches() -> None:
    import offline_models

    cast = offline_models._Autocast()
    with offline_models.on_a_gpu(cast), cast:
        koopman_layer("meta")()


# ---------------------------------------------------------------------------------------------------- checks


def one_configuration() -> None:
    """Let autotuners of kernels that are not yet imported take one configuration, because checks need no tuning."""
    with contextlib.suppress(ImportError):
        import triton

        autotune = triton.autotune
        triton.autotune = lambda configs, *rest, **options: autotune(configs[:1], *rest, **options)


def rate_rows(job: str, device: str) -> Iterator[Row]:
    scale = SCALES[device]
    product = gemm_rate(torch.device(device), torch.bfloat16, scale.product)
    yield {"part": "rates", "product": product, "copy": timing.copy_rate(device, scale.megabytes)}


def parity_rows(job: str, device: str) -> Iterator[Row]:
    """Compare "case / ours" or "case / fla" with float64 at length, plain and packed."""
    one_configuration()
    name, _, whose = job.rpartition(" / ")
    for row in parity.rows(name, device, None if device == "cpu" else whose == "fla"):
        yield {"part": "check", "op": row.pop("case")} | row


def selfcheck_rows(job: str, device: str) -> Iterator[Row]:
    one_configuration()
    name, _, whose = job.rpartition(" / ")
    able = backends.available_backends(name, device)
    chosen = parity.chosen(able, None if device == "cpu" else whose == "fla")
    for check in ops.selfcheck(device, ops=[name], backends=chosen).checks if chosen else ():
        yield {"part": "selfcheck", "op": name, "check": str(check), "ok": check.ok}


def warm_rows(job: str, device: str) -> Iterator[Row]:
    """Compile what the steps of a model, or fla's "op / K", take, into caches on disk. Errors are reported later."""
    if job in MODELS:
        for _ in step_rows(f"{job} / compiled", device):
            pass
    else:
        name, _, size = job.rpartition(" / ")
        with contextlib.suppress(Exception):
            _run(name, inputs(name, *SCALES[device].shapes[0], int(size), device), "fla")
    yield from ()


UNTIMED = ("parity", "selfcheck", "warm")  # kinds of jobs in which kernels may be compiled
JOBS: dict[str, Callable[[str, str], Iterator[Row]]] = {
    "rates": rate_rows, "parity": parity_rows, "selfcheck": selfcheck_rows, "ops": op_rows, "steps": step_rows,
    "passes": pass_rows, "decode": decode_rows, "warm": warm_rows,
}  # fmt: skip
