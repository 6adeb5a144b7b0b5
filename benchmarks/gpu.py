"""Op parity and speed on a GPU, in one go of under 10 minutes: `make gpu`.

Needs torch, einops and this repository; fla-core is measured too where it can be imported. Checks every backend
against the float64 token loop on the device, then times the ops at 32K tokens a batch (H 16, K = V = 64 and 128)
against softmax attention, fla and the ceilings measured in the same run, and writes one table to
`benchmarks/results/` (and to $OUT, where that is set). `--device cpu` runs the same code at toy sizes.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import cases  # noqa: E402
import timing  # noqa: E402

from halflife import ops  # noqa: E402

SECONDS = 480  # stop starting new measurements after this


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("make gpu: no CUDA device here; torch.cuda.is_available() is False")
    began, device = time.perf_counter(), arguments.device
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu, toy sizes"
    lines = [f"# Ops on {name}", "", _versions(), ""]
    report = ops.selfcheck(device)
    lines += ["## selfcheck", "", "```", str(report), "```", ""]
    long, right = _long_parity(device)
    lines += ["## Parity with float64 at length, packed", "", *long, ""]
    print("\n".join(lines), flush=True)
    table = _speed(device, began)
    print("\n".join(table), flush=True)
    text = "\n".join([*lines, *table, "", f"{time.perf_counter() - began:.0f} s in all."]) + "\n"
    file = f"{name.lower().replace(',', '').replace(' ', '-')}-{time.strftime('%Y%m%d')}.md"
    for folder in filter(None, (arguments.output, os.environ.get("OUT"))):
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / file).write_text(text)
    print(f"written to {arguments.output / file}")
    if not (report.ok and right):
        sys.exit("make gpu: an op is wrong on this device; see the table above")


def _versions() -> str:
    fla = _fla()
    triton = _version("triton")
    return (
        f"torch {torch.__version__}, CUDA {torch.version.cuda}, triton {triton}, fla-core "
        f"{'not importable' if fla is None else _version('fla-core')}, {time.strftime('%Y-%m-%d')}."
    )


def _version(package: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _fla():
    """fla's ops, or None where fla-core (or a triton that it works with) cannot be imported."""
    if importlib.util.find_spec("fla") is None:
        return None
    try:
        from fla.ops import gated_delta_rule, simple_gla
    except Exception as error:  # whatever a foreign import raises, it only costs a row of the table
        print(f"fla-core is there but cannot be imported: {error}")
        return None
    return {
        "linear_attention, scalar": lambda x: simple_gla.chunk_simple_gla(x["q"], x["k"], x["v"], x["g"])[0],
        "delta_rule, scalar": lambda x: gated_delta_rule.chunk_gated_delta_rule(
            x["q"], x["k"], x["v"], x["g"], x["beta"]
        )[0],
    }


# ----------------------------------------------------------------------------------------------- parity


def _long_parity(device: str) -> tuple[list[str], bool]:
    """The chunked ops in float32 and bfloat16 against themselves in float64 on the same device, long and packed.

    (The float64 form is the one that `selfcheck` holds against the token loop.)
    """
    length = 131_072 if device == "cuda" else 300
    rows, right = ["| op | T | dtype | worst relative error: o, state, gradients | |", "|---|---:|---|---:|---|"], True
    bounds = torch.tensor([0, 1, length // 3, length // 3, length - 5, length], device=device)
    for index in range(len(_OPS)):
        for dtype, tolerance in ((torch.float32, 2e-5), (torch.bfloat16, 2e-2)):
            results = []
            for precise in (torch.float64, dtype):
                x = cases.inputs(length, heads=2, device=device, dtype=dtype)
                leaves = {
                    n: t.detach().to(torch.promote_types(precise, t.dtype)).requires_grad_() for n, t in x.items()
                }
                op, names = _OPS[index]
                o, state = op(*(leaves[n] for n in names), cu_seqlens=bounds, output_final_state=True)
                o.square().sum().add(state.square().sum()).backward()
                results.append([t.detach().double() for t in (o, state, *(leaves[n].grad for n in names))])
            error = max(((a - b).abs().max() / b.abs().max()).item() for b, a in zip(*results, strict=True))
            right &= error < tolerance
            verdict = "ok" if error < tolerance else "WRONG"
            rows.append(f"| {_NAMES[index]} | {length} | {str(dtype)[6:]} | {error:.1e} | {verdict} |")
    return rows, right


_NAMES = [case.name for case in cases.ours(cases.inputs(1))]
_OPS: list[tuple[Callable, tuple[str, ...]]] = [
    (ops.linear_attention, ("q", "k", "v")),
    (ops.linear_attention, ("q", "k", "v", "g")),
    (ops.linear_attention, ("q", "k", "v", "gv")),
    (ops.delta_rule, ("q", "k", "v", "beta", "g")),
    (ops.delta_rule, ("q", "k", "v", "beta", "gv")),
    (cases.dplr, ("q", "k", "v", "beta", "g")),
    (cases.dplr, ("q", "k", "v", "beta", "gv")),
]


# ------------------------------------------------------------------------------------------------ speed


def _speed(device: str, began: float) -> list[str]:
    dtype = torch.bfloat16
    gemm = timing.gemm_rate(device, dtype, 8192 if device == "cuda" else 512)
    copy = timing.copy_rate(device, 4096 if device == "cuda" else 16)
    lines = [
        "## Speed", "",
        f"bf16, one sequence, H 16. Ceilings measured now: {gemm / 1e12:.1f} TFLOP/s bf16 GEMM, {copy / 1e12:.2f} TB/s "
        "copy. Floor: the larger of the op's FLOPs and the bytes of q, k, v, o (and their gradients) at these rates.",
        "", "| T | K = V | op | forward ms | ÷ floor | ÷ SDPA | forward + backward ms | ÷ floor | ÷ SDPA | ÷ fla |",
        "|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    lengths = (1024, 4096, 16384, 32768, 131_072) if device == "cuda" else (128,)
    fla = _fla() if device == "cuda" else None
    for size in (64, 128):
        for length in lengths:
            if time.perf_counter() - began > SECONDS:
                lines.append(f"| {length} | {size} | not measured: out of time | | | | | | | |")
                continue
            lines += _rows(length, size, device, dtype, gemm, copy, fla)
    return lines


def _rows(length: int, size: int, device: str, dtype: torch.dtype, gemm: float, copy: float, fla) -> list[str]:
    x = cases.inputs(length, heads=16, key=size, value=size, device=device, dtype=dtype)
    found = cases.ours(x)
    if length <= 32768:
        found.append(cases.sdpa(x))
    peers = {f"fla {name}": (lambda run=run: run(x)) for name, run in (fla or {}).items()}
    runs = {case.name: case.forward for case in found} | peers
    weight = torch.randn_like(x["v"])

    def forward(run: Callable) -> Callable:
        def quietly() -> None:
            with torch.no_grad():
                run()

        return quietly

    def works(run: Callable) -> bool:
        try:
            run().backward(weight)
        except Exception as error:  # a peer that refuses this device costs its row, not ours
            print(f"not measured: {type(error).__name__}: {str(error)[:200]}")
            return False
        return True

    runs = {name: run for name, run in runs.items() if works(run)}
    one = timing.medians({name: forward(run) for name, run in runs.items()}, 2, device)
    two = timing.medians({name: lambda run=run: run().backward(weight) for name, run in runs.items()}, 3, device)
    rows, moved = [], 4 * x["q"].nbytes
    for case in found:
        if case.name not in runs:
            continue
        floors = [max(flops / gemm, factor * moved / copy) for flops, factor in zip(case.flops, (1, 3), strict=True)]
        softmax, peer = "softmax attention (SDPA)", f"fla {case.name}"
        ratio = [f"{t[case.name] / t[softmax]:.2f}" if softmax in t else "" for t in (one, two)]
        against = f"{two[case.name] / two[peer]:.2f}" if peer in two else ""
        rows.append(
            f"| {length} | {size} | {case.name} | {1e3 * one[case.name]:.2f} | {one[case.name] / floors[0]:.1f} | "
            f"{ratio[0]} | {1e3 * two[case.name]:.2f} | {two[case.name] / floors[1]:.1f} | {ratio[1]} | {against} |"
        )
    return rows


if __name__ == "__main__":
    main()
