"""A check of every backend on this device against the chunked form in float64, at short, long and packed inputs.

`selfcheck` compares the chunked form with the token loop. Results are dicts, one for each row of the report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import cases
import torch
from torch import Tensor

from halflife import ops
from halflife.ops.backends import dispatch as backends

# The largest allowed error of an output, state or gradient, relative to the largest entry of the tensor. In bfloat16 it
# is four times the worst one measured in Triton's interpreter (1.1e-2). In float32 the errors start at 4e-7 and grow
# with the length.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4.4e-2}


def _gate_rank(q: Tensor, k: Tensor, v: Tensor, g_slow: Tensor, g: Tensor, *beta: Tensor, **options):
    """Run GateRank with its two states in one tensor."""
    state = options.pop("initial_state")
    o, states = ops.gate_rank(q, k, v, g_slow, g, *beta, initial_state=tuple(state.chunk(2, -2)), **options)
    return o, torch.cat(states, -2)


# name → (op, function, names of its inputs in `cases.inputs`)
CASES: dict[str, tuple[str, Callable, tuple[str, ...]]] = {
    "linear_attention, no decay": ("linear_attention", ops.linear_attention, ("q", "k", "v")),
    "linear_attention, scalar": ("linear_attention", ops.linear_attention, ("q", "k", "v", "g")),
    "linear_attention, vector": ("linear_attention", ops.linear_attention, ("q", "k", "v", "gv")),
    "delta_rule, no decay": ("delta_rule", ops.delta_rule, ("q", "k", "v", "beta")),
    "delta_rule, scalar": ("delta_rule", ops.delta_rule, ("q", "k", "v", "beta", "g")),
    "delta_rule, vector": ("delta_rule", ops.delta_rule, ("q", "k", "v", "beta", "gv")),
    "gate_rank, linear": ("gate_rank", _gate_rank, ("q", "k", "v", "g_slow", "g")),
    "gate_rank, delta": ("gate_rank", _gate_rank, ("q", "k", "v", "g_slow", "g", "beta")),
    "dplr, scalar": ("dplr", cases.dplr, ("q", "k", "v", "beta", "g")),
    "dplr, vector": ("dplr", cases.dplr, ("q", "k", "v", "beta", "gv")),
}


def rows(name: str, device: str, foreign: bool | None = None) -> Iterator[dict]:
    """Check the backends of one case in float32 and bfloat16, with a short batch and with a long packed row.

    Args:
        name: one of `CASES`.
        device: "cuda" or "cpu".
        foreign: whether to check only kernels of others (fla, which refuses float32), or only ours; None means all.
    """
    op, function, names = CASES[name]
    wanted = [each for each in chosen(backends.registered(op), foreign) if each not in ("reference", "mask")]
    able = [backend for backend in wanted if backends.why_not(op, backend, device) is None]
    dtypes = {dtype: bound for dtype, bound in TOLERANCE.items() if not (foreign and dtype == torch.float32)}
    short, long, heads, size = (1000, 16_384, 2, 64) if device == "cuda" else (20, 70, 1, 16)
    for length, batch in ((short, 2), (long, 1)) if able else ():
        ends = None if batch > 1 else [0, 1, length // 3, length // 3, length - 5, length]
        bounds = None if ends is None else torch.tensor(ends, device=device)
        for dtype, tolerance in dtypes.items():
            x = cases.inputs(length, heads, size, size, device, dtype, batch)
            arguments = {n: x[n] for n in names}
            sequences, parts = batch if ends is None else len(ends) - 1, 2 if op == "gate_rank" else 1
            state = torch.randn(sequences, heads, parts * size, size).to(device)
            exact = run(function, arguments, state, bounds, "chunked", torch.float64)
            for backend in able:
                row = {"case": name, "backend": backend, "T": length, "packed": batch == 1, "dtype": str(dtype)[6:]}
                yield row | _compare(function, arguments, state, bounds, backend, dtype, exact, tolerance)


def chosen(names: list[str], foreign: bool | None) -> list[str]:
    """Return the names of kernels of others (fla), or of our backends, or all (None)."""
    return [name for name in names if foreign in (None, name == "fla")]


def _compare(function, arguments, state, bounds, backend, dtype, exact, tolerance) -> dict:
    """Return `{"error", "worst", "ok"}`, or `{"failure", "ok"}`, or `{"refused", "ok"}`, which counts as ok."""
    try:
        got = run(function, arguments, state, bounds, backend, dtype)
    except backends.CannotRun as error:
        return {"refused": str(error), "ok": True}
    except Exception as error:  # a compiler of kernels may raise anything
        return {"failure": said(error), "ok": False}
    errors = {name: relative_error(got[name], exact[name]) for name in exact}
    worst = max(errors, key=errors.__getitem__)
    return {"error": errors[worst], "worst": worst, "ok": errors[worst] <= tolerance}


def run(function, arguments: dict, state: Tensor, bounds, backend: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return `{"o", "state"}` and the gradients "d…" of all inputs and of the initial state, in float64."""
    given = {**arguments, "initial_state": state}
    leaves = {n: t.detach().to(torch.promote_types(dtype, t.dtype)).requires_grad_() for n, t in given.items()}
    inputs = [leaves[n] for n in arguments]
    o, final = function(
        *inputs, initial_state=leaves["initial_state"], cu_seqlens=bounds, output_final_state=True, backend=backend
    )
    loss = o.double().square().sum() + final.double().square().sum()
    grads = torch.autograd.grad(loss, list(leaves.values()))
    found = {"o": o, "state": final, **{f"d{n}": grad for n, grad in zip(leaves, grads, strict=True)}}
    return {n: t.detach().double() for n, t in found.items()}


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Return the largest difference divided by the largest entry; infinite if an entry is not finite."""
    if not torch.isfinite(got).all():
        return float("inf")
    return ((got - expected).abs().max() / expected.abs().max().clamp(min=1e-30)).item()


def said(error: Exception) -> str:
    """Return the text of an exception in one line."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[0].strip()[:160]}"


def table(found: list[dict]) -> list[str]:
    """Return the report: the worst error of each case, backend and dtype, and every row that failed."""
    lines = ["| op | backend | dtype | longest T | worst relative error | in | |", "|---|---|---|---:|---:|---|---|"]
    groups: dict[tuple[str, str, str], list[dict]] = {}
    for row in found:
        groups.setdefault((row["case"], row["backend"], row["dtype"]), []).append(row)
    for (case, backend, dtype), group in groups.items():
        start, measured = f"| {case} | {backend} | {dtype} |", [row for row in group if "error" in row]
        if measured:
            worst = max(measured, key=lambda row: row["error"])
            verdict = "ok" if all(row["ok"] for row in measured) else "**WRONG**"
            longest = max(row["T"] for row in measured)
            lines.append(f"{start} {longest} | {worst['error']:.1e} | {worst['worst']} | {verdict} |")
        for row in group:
            if "failure" in row:
                lines.append(f"{start} {row['T']} | | | **FAILED**: {row['failure'].replace('|', '/')} |")
    return lines
