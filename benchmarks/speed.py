"""The timing part of `gpu.py`: the ops, FlashAttention and fla against a floor, and the table of the results.

All run at 32K tokens (H 16), forward, and forward with backward. The floor is the larger of two times. One is that of
the op's FLOPs at the rate of a GEMM. The other is that of the bytes of q, k, v, o (three times as many with the
backward pass) at the rate of a copy. Both rates are measured in the same run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import cases
import parity
import timing
import torch

from halflife.ops.backends import dispatch as backends
from halflife.training.speed import gemm_rate

LENGTHS = {"cuda": tuple(1024 << n for n in range(8)), "cpu": (64, 128)}
SIZES = {"cuda": (64, 128), "cpu": (16,)}
HEADS, TOKENS = {"cuda": 16, "cpu": 1}, {"cuda": 32768, "cpu": 128}
OPS = ("linear_attention", "delta_rule", "gate_rank, linear", "gate_rank, delta")
PLAIN = {"gate_rank, linear": "linear_attention", "gate_rank, delta": "delta_rule"}
SOFTMAX = ("softmax attention", "SDPA")


def compile_kernels(name: str, device: str, foreign: bool | None) -> None:
    """Fill Triton's cache on disk with the kernels of "op / head size". Errors are printed; `rows` reports them."""
    op, _, size = name.rpartition(" / ")
    x, leaves, weight = inputs(LENGTHS[device][0], int(size), device)
    for backend in parity.chosen(["triton", "fla"], foreign):
        for case in cases.gated(x, backend):
            if case.name == op and backend in backends.registered(op.split(",")[0]):
                try:
                    torch.autograd.grad(case.forward(), leaves, weight, allow_unused=True)
                except Exception as error:
                    print(parity.said(error))


def inputs(length: int, size: int, device: str) -> tuple[dict, list[torch.Tensor], torch.Tensor]:
    """Return inputs of 32K tokens (or of one longer sequence), the same as a list, and the gradient of the output."""
    batch = max(1, TOKENS[device] // length)
    x = cases.inputs(length, HEADS[device], size, size, device, torch.bfloat16, batch)
    del x["gv"]  # not used here, and as large as q
    return x, list(x.values()), torch.randn_like(x["v"])


def rows(size: int, device: str, skip: list[str], until: float, foreign: bool | None = None) -> Iterator[dict]:
    """Yield one dict with the measured rates, then one for each case and length.

    Args:
        size: K = V.
        device: "cuda" or "cpu".
        skip: cases ("op / backend") and lengths ("T length") to leave out.
        until: time after which no further length starts, in seconds since the epoch.
        foreign: whether to time only kernels of others (fla), or only ours and softmax attention; None means all.
    """
    broken = set(skip)
    if not foreign:
        gemm = gemm_rate(torch.device(device), torch.bfloat16, 8192 if device == "cuda" else 256)
        yield {"K": size, "gemm": gemm, "copy": timing.copy_rate(device, 4096 if device == "cuda" else 16)}
    first = True
    for length in LENGTHS[device]:
        where = {"K": size, "T": length}
        if f"T {length}" in broken:
            continue
        if time.time() > until - 20:
            yield {**where, "late": "fla" if foreign else "ours"}
            continue
        x, leaves, weight = inputs(length, size, device)
        found, one, two, exact = _cases(x, foreign, first), {}, {}, {}
        for key, case in found.items():
            if " / ".join(key) in broken:
                continue
            try:
                gradients = _try(key, case, leaves, weight, one, two)
                if first:
                    _compare(key, gradients, exact)
            except backends.CannotRun as error:  # fla may run forward alone
                broken |= set() if key in one else {" / ".join(key)}
                yield {**where, "name": key[0], "backend": key[1], "refused": str(error)}
            except Exception as error:
                one.pop(key, None), two.pop(key, None)
                fatal = _dead(device)
                yield {**where, "name": key[0], "backend": key[1], "failure": parity.said(error), "fatal": fatal}
                if fatal:
                    return
                if not isinstance(error, torch.OutOfMemoryError):
                    broken.add(" / ".join(key))
        first = False
        del exact
        if foreign:
            one, two = ({key: run for key, run in runs.items() if key[1] == "fla"} for runs in (one, two))
        quick = {"seconds": 1.0 if device == "cuda" else 0.0, "device": device}
        forward, both = (timing.medians(runs, **quick) if runs else {} for runs in (one, two))
        for key in one:
            row = {**where, "name": key[0], "backend": key[1], "flops": found[key].flops, "bytes": 4 * x["q"].nbytes}
            yield row | {"forward": forward[key], "both": both.get(key)}


def _cases(x: dict, foreign: bool | None, first: bool) -> dict[tuple[str, str], cases.Case]:
    """Map (op, backend) to cases. The chunked forms come first, because the others are compared with them.

    In a process for fla they serve the comparison alone, at the first length and for the ops that fla has.
    """
    names = ["chunked", "triton", "fla"]
    if foreign is not None:
        names = parity.chosen(names, foreign)
    if foreign and first:
        names = ["chunked", *names]
    every = [(case, backend) for backend in names for case in cases.gated(x, backend)]
    has = {op: backends.registered(op) for op in ("linear_attention", "delta_rule", "gate_rank")}
    if foreign:
        has = {op: found for op, found in has.items() if "fla" in found}
        every = [(case, backend) for case, backend in every if case.name in has]
    found = {(case.name, backend): case for case, backend in every if backend in has[case.name.split(",")[0]]}
    return found if foreign else found | {SOFTMAX: cases.sdpa(x)}


def _try(key, case: cases.Case, leaves: list, weight: torch.Tensor, one: dict, two: dict) -> dict:
    """Run a case forward and with backward, add it to the functions to be timed, and return its gradients."""

    def forward() -> None:
        with torch.no_grad():
            case.forward()

    def both() -> tuple:
        return torch.autograd.grad(case.forward(), leaves, weight, allow_unused=True)

    forward()
    one[key] = forward
    gradients = both()
    two[key] = both
    return {n: g for n, g in enumerate(gradients) if g is not None}


def _compare(key, gradients: dict, exact: dict) -> None:
    """Compare the gradients of tuned kernels with those of the chunked form in bfloat16, which comes first."""
    name, backend = key
    if backend == "chunked":
        exact[name] = gradients
    if name in exact:
        worst = max(parity.relative_error(gradients[n].double(), g.double()) for n, g in exact[name].items())
        if worst > parity.TOLERANCE[torch.bfloat16]:
            raise ArithmeticError(f"WRONG once tuned: gradients {worst:.1e} off those of the chunked form")


def _dead(device: str) -> bool:
    """Return whether an error (such as an illegal address) has destroyed the device's context."""
    try:
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    except Exception:
        return True
    return False


# -------------------------------------------------------------------------------------------------- report


def table(found: list[dict]) -> list[str]:
    """Return the measured rates and a table of milliseconds with ratios to the floor, SDPA, fla and the plain op."""
    ceilings = [row for row in found if "gemm" in row]
    timed = {(row["K"], row["T"], row["name"], row["backend"]): row for row in found if "forward" in row}
    ratios = "÷ floor | ÷ SDPA | ÷ fla | ÷ plain"
    lines = [
        f"K = V = {row['K']}: {row['gemm'] / 1e12:.2f} TFLOP/s bfloat16 GEMM, {row['copy'] / 1e12:.3f} TB/s copy."
        for row in ceilings
    ]
    lines += [
        "Plain: the same backend without GateRank. fla is measured in a process of its own, after the others.",
        "",
        f"| K = V | T | op | backend | forward ms | {ratios} | with backward ms | {ratios} |",
        f"|---:|---:|---|---|{'---:|' * 10}",
    ]
    for (size, length, name, backend), row in timed.items():
        at = {key[2:]: other for key, other in timed.items() if key[:2] == (size, length)}
        rates = next((row for row in ceilings if row["K"] == size), {"gemm": math.nan, "copy": math.nan})
        floors = [max(row["flops"][i] / rates["gemm"], (1, 3)[i] * row["bytes"] / rates["copy"]) for i in (0, 1)]
        cells = [str(size), str(length), name, backend]
        for way, floor in zip(("forward", "both"), floors, strict=True):
            others = (at.get(SOFTMAX), at.get((name, "fla")), at.get((PLAIN.get(name, ""), backend)))
            mine = row[way]
            cells.append("" if mine is None else f"{1e3 * mine:.3f}")
            cells.append("" if mine is None else f"{mine / floor:.1f}")
            cells += ["" if not mine or not o or not o[way] or o is row else f"{mine / o[way]:.2f}" for o in others]
        lines.append(f"| {' | '.join(cells)} |")
    for row in found:
        if "failure" in row:
            lines.append(f"| {row['K']} | {row['T']} | {row['name']} | {row['backend']} | **FAILED** {'| ' * 10}|")
        elif row.get("late"):
            lines.append(f"| {row['K']} | {row['T']} | | {row['late']} | not measured: out of time {'| ' * 10}|")
    refused = {row["refused"]: None for row in found if "refused" in row}
    return [*lines, "", *(f"- {reason}" for reason in refused)]


def crossings(found: list[dict]) -> list[str]:
    """Return a table of the lengths from which on each op is faster than softmax attention."""
    timed = {(row["K"], row["T"], row["name"], row["backend"]): row for row in found if "forward" in row}
    kinds = dict.fromkeys((size, name, backend) for size, _, name, backend in timed if (name, backend) != SOFTMAX)
    lines = [
        "| faster than FlashAttention from T | K = V | backend | forward | with backward |",
        "|---|---:|---|---:|---:|",
    ]
    for size, name, backend in kinds:
        cells = []
        for way in ("forward", "both"):
            pairs = {}
            for (s, length, n, b), row in timed.items():
                softmax = timed.get((size, length, *SOFTMAX))
                if (s, n, b) == (size, name, backend) and softmax and row[way] and softmax[way]:
                    pairs[length] = row[way] / softmax[way]
            cells.append(crossing(pairs))
        lines.append(f"| {name} | {size} | {backend} | {' | '.join(cells)} |")
    return lines


def crossing(ratios: dict[int, float]) -> str:
    """Return the length at which a falling ratio passes 1, by interpolation of logarithms."""
    lengths = sorted(ratios)
    if not lengths:
        return ""
    if ratios[lengths[-1]] >= 1:
        return f"> {lengths[-1]}"
    above = [length for length in lengths if ratios[length] >= 1]
    if not above:
        return f"≤ {lengths[0]}"
    low = above[-1]
    high = lengths[lengths.index(low) + 1]
    down = math.log(ratios[low]) / (math.log(ratios[low]) - math.log(ratios[high]))
    return f"{low * (high / low) ** down:.0f}"
