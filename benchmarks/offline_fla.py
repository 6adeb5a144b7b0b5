"""Times of fla's kernels by the same static model as ours, and which of both comes first: `backends/faster.json`.

fla's host code runs on tensors without data, as ours does in `offline_kernels`. Its autotuners take one configuration,
so a GPU may do better. `make gpu-offline` writes both.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]

import offline_code  # noqa: E402
import offline_kernels  # noqa: E402
from offline_kernels import Launch  # noqa: E402
from offline_sources import sources  # noqa: E402

LAUNCH_MS = 0.003  # the least that a launch takes
HEADS, SIZE = 16, 64
SHAPES = {"few": (1, 32768), "many": (16, 2048)}  # (B, T), by whether there are many heads over the batch
# op and decay → fla's function, and the rows of `offline.json` with our kernels; the delta rule without decay has none.
CASES = {
    "linear_attention, none": ("simple_gla.chunk_simple_gla", "linear, none, 64"),
    "linear_attention, scalar": ("simple_gla.chunk_simple_gla", "linear, scalar, 64"),
    "linear_attention, vector": ("gla.chunk_gla", "linear, vector, 64"),
    "delta_rule, none": ("delta_rule.chunk_delta_rule", "delta, scalar, 64"),
    "delta_rule, scalar": ("gated_delta_rule.chunk_gated_delta_rule", "delta, scalar, 64"),
    "delta_rule, vector": ("kda.chunk_kda", "delta, vector, 64"),
    "dplr, vector": ("generalized_delta_rule.chunk_dplr_delta_rule", "dplr, vector, 64"),
}
# Kernels whose programs walk over all chunks of a sequence; those of the others have one chunk.
WALKS = (
    "chunk_fwd_kernel_h", "chunk_bwd_kernel_dh", "chunk_gated_delta_rule_fwd_kernel_h_blockdim64",
    "chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64", "chunk_dplr_fwd_kernel_h", "chunk_dplr_bwd_kernel_dhu",
)  # fmt: skip
CHOICE = FOLDER.parent / "halflife/ops/backends/faster.json"


def as_on_an_h100() -> None:
    """Let `import fla` find an H100 where there is none."""
    offline_kernels.driver.set_active(offline_kernels._Driver("sm_90"))
    torch.cuda.get_device_name = lambda *_: "NVIDIA H100"
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.device_count = lambda: 1


def launches(case: str, batch: int, length: int) -> list[list[Launch]]:
    """The launches of a call of fla, forward and then backward."""
    module, _, name = CASES[case][0].rpartition(".")
    function = getattr(importlib.import_module(f"fla.ops.{module}"), name)

    def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(batch, length, HEADS, *shape, dtype=dtype, device="meta", requires_grad=True)

    q, k, v = (leaf(SIZE, dtype=torch.bfloat16) for _ in range(3))
    gates = {"g": leaf()} if "scalar" in case else {"g": leaf(SIZE)} if "vector" in case else {}
    if "dplr" in case:
        gates = {"gk": leaf(SIZE), **{name: leaf(SIZE, dtype=torch.bfloat16) for name in "ab"}}
    if "delta" in case:
        gates["beta"] = leaf(dtype=torch.bfloat16)
    forward, backward = [], []
    with offline_kernels.captured(forward):
        o, _ = function(q, k, v, scale=0.125, output_final_state=True, **gates)
    with offline_kernels.captured(backward):
        o.float().sum().backward()
    return [forward, backward]


def predicted_ms(launch: Launch, length: int, copy: float) -> float:
    kernel = offline_kernels.compiled(launch, "sm_90")
    figures = offline_code.resources(kernel)
    one = offline_code.timing(offline_code.disassembled(kernel.asm["cubin"])[0])
    moved = offline_kernels.moved(launch, offline_kernels.roles(offline_kernels.intermediate(launch)))
    trips = -(-length // launch.arguments["BT"]) if launch.name in WALKS else 1
    return max(LAUNCH_MS, offline_code.predicted_ms(
        one, figures["warps"], figures["programs"], launch.programs, trips, moved, copy
    ))  # fmt: skip


def rows(copy: float, known: dict[str, Any]) -> dict[str, Any]:
    """Op and decay → "few" or "many" heads → predicted ms, forward and with the backward pass; `known` ones stay."""
    as_on_an_h100()
    found = dict(known)
    for case in CASES.keys() - known.keys():
        for heads, (batch, length) in SHAPES.items():
            print(f"predicts fla's {case}, {heads} heads", file=sys.stderr, flush=True)
            times = [sum(predicted_ms(x, length, copy) for x in part) for part in launches(case, batch, length)]
            found.setdefault(case, {})[heads] = [round(times[0], 3), round(sum(times), 3)]
    return found


def measured(files: Path) -> dict[tuple[str, str, str], list[float]]:
    """(op and decay, few or many, backend) → ms on a GPU, from rows of the newest `make gpu` with today's kernels."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for file in sorted(files.glob("nvidia-*.jsonl"))[-1:]:
        parts = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        if parts[0].get("sources") != sources():
            continue
        shapes = {shape: heads for heads, shape in SHAPES.items()}
        for row in parts:
            at = shapes.get((row.get("B"), row.get("T")))
            if row["part"] == "ops" and at and row["K"] == SIZE and row.get("both_ms"):
                found[row["op"], at, row["backend"]] = [row["forward_ms"], row["both_ms"]]
    return found


def choice(data: dict[str, Any], files: Path = FOLDER / "results") -> dict[str, Any]:
    """Op and decay → "few" or "many" heads → the faster backend, forward and with the backward pass.

    Where both backends were measured, measured times decide, else predicted ones.
    """
    known, found = measured(files), {}
    for case, (_, ours) in CASES.items():
        for heads, (batch, length) in SHAPES.items():
            times = {
                "triton": data["ops"][ours][f"{batch} × {length}"]["predicted_ms"], "fla": data["fla"][case][heads],
            }  # fmt: skip
            if all((case, heads, name) in known for name in times):
                times = {name: known[case, heads, name] for name in times}
            faster = [min(times, key=lambda name: times[name][way]) for way in (0, 1)]
            found.setdefault(case, {})[heads] = faster
    return found


def write_choice(data: dict[str, Any]) -> None:
    lines = [f" {json.dumps(case)}: {json.dumps(row)}" for case, row in choice(data).items()]
    CHOICE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
