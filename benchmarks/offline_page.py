"""The page `docs/gpu.md` from the figures of `offline.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TARGETS = ("sm_90", "sm_80", "gfx942")

TEXT = """# GPU kernels, judged without a GPU

`make gpu-offline` compiles our Triton kernels for H100 (sm_90), A100 (sm_80) and MI300 (gfx942).
Registers, spills, instructions, launches and bytes are counted. **Times in italics are predictions, not measurements**;
[measured times](results/speed.md) stand beside them. `benchmarks/results/offline.json` has every row; none may get
worse.

## Kernels

The worst of {rows} rows, sm_90/sm_80/gfx942. Targets: 0 spills and, for NVIDIA, ≥ 2 programs
an SM, tensor cores in 16-bit products, and cp.async in walks. {missed} miss one.

{kernels}

## Ops

Bytes and times of 1 × 32,768 tokens, then 16 × 2,048, with 16 heads, forward/with backward. The floor is the bytes
of q, k, v and o, three times with backward. Predictions are too low; measured is the first shape.

{ops}

## Models

A layer of width {hidden} on {batch} × {length} tokens without fla-core, forward/with backward. Targets: 12 launches
forward, 6 a token; graph breaks of two layers: {breaks}. The third number of launches is of a model in bfloat16, the
others are under autocast. Times are predicted/measured (kernels of 2026-11-26), of {layers} layers without
loss and optimiser, at {copy} TB/s (our kernels {triton}), {product} TFLOP/s and ≥ 3 µs a launch. Tokens are decoded
in bfloat16. `echo` has the layers of `mamba2+ska`; for `fox` and `mesa` fla-core has kernels.

{models}

The head and its loss, of the same tokens with a vocabulary:

{loss}
"""


def table(head: list[str], rows: list[list[Any]]) -> str:
    lines = ["| " + " | ".join(map(str, line)) + " |" for line in (head, *rows)]
    return "\n".join([lines[0], "|---|" + "---:|" * (len(head) - 1), *lines[1:]])


def _kernels(data: dict[str, Any]) -> str:
    """One row for each kernel, with the worst of its rows; kernels without products that keep all limits are named."""
    groups: dict[str, list[str]] = {}
    for name in data["kernels"]:
        groups.setdefault(name.split(",")[0].split(" ")[0], []).append(name)

    def worst(names: list[str], key: str, choose: Any, targets: tuple[str, ...] = TARGETS) -> str:
        return "/".join(str(choose(data["kernels"][name][t][key] for name in names)) for t in targets)

    rows, simple = [], []
    for kernel, names in groups.items():
        if not any(data["facts"][name]["products"] or name in data["missed_today"] for name in names):
            simple.append(f"`{kernel}`")
            continue
        products = [name for name in names if data["facts"][name]["products"]]
        tensor = (
            [worst(products, "wgmma", min, ("sm_90",)), worst(products, "mma", min, TARGETS[1:])] if products else "–"
        )
        rows.append([
            f"`{kernel}`", worst(names, "registers", max), worst(names, "spills", max), worst(names, "programs", min),
            "/".join(tensor),
        ])  # fmt: skip
    found = table(["kernel", "registers", "spills", "programs", "wgmma/mma/mfma"], rows)
    return f"{found}\n\nOther kernels, which keep all limits: {', '.join(simple)}."


def _ops(data: dict[str, Any], measured: dict[str, list[float]]) -> str:
    """One row for each case that has a target, with its two shapes beside each other."""
    rows = []
    for case, shapes in data["ops"].items():
        both = [shapes[key] for key in ("1 × 32768", "16 × 2048") if key in shapes]
        if len(both) < 2 or not any(row["target"] for row in both):
            continue
        cells = ["/".join(map(str, both[0]["launches"]))]
        for row in both:
            cells.append("/".join(map(str, row["bytes_over_floor"])))
            cells.append("/".join(map(str, row["target"] or "–")))
            cells.append("/".join(f"*{ms:.2f}*" for ms in row["predicted_ms"]))
        rows.append([case, *cells, "/".join(f"{ms:.2f}" for ms in measured.get(case, []))])
    head = ["op", "launches", *["÷floor", "target", "predicted ms"] * 2, "measured ms"]
    return table(head, rows)


def _models(data: dict[str, Any], measured: dict[str, float]) -> str:
    rows: dict[tuple[str, ...], list[str]] = {}  # cells → the presets that share them
    for name, row in data["models"].items():
        cells = (
            f"{row['forward_launches']}/{row['launches']}/{row['bf16_launches']}",
            f"{row['bytes'] / 1e9:.1f}/{row['saved_bytes'] / 1e9:.2f}",
            str(row["decode_launches"]),
            f"*{row['predicted_ms']:.0f}*" + (f"/{measured[name]:.0f}" if name in measured else ""),
        )  # fmt: skip
        rows.setdefault(cells, []).append(f"`{name}`")
    head = ["preset", "launches", "GB/saved", "launches/token", "ms"]
    return table(head, [[", ".join(names), *cells] for cells, names in rows.items()])


def _breaks(data: dict[str, Any]) -> str:
    """The most graph breaks of a model; "–" where the graph of one depends on data."""
    found = [row["graph_breaks"] for row in data["models"].values()]
    return "–" if None in found else str(max(found))


def _loss(data: dict[str, Any]) -> str:
    lines = [
        [name, row["launches"], f"{row['bytes'] / 1e9:.0f}/{row['saved_bytes'] / 1e9:.2f}",
         f"*{row['predicted_ms']:.0f}*"]
        for name, row in data["loss"].items()
    ]  # fmt: skip
    return table(["loss", "launches", "GB/saved", "predicted ms"], lines)


def rows(data: dict[str, Any]) -> str:
    """Every row of every target, for a terminal."""
    keys = ("registers", "spills", "shared", "programs", "wgmma", "mma", "cp_async", "bytes")
    lines = [f"{'kernel':58} target " + " ".join(f"{key:>9}" for key in keys) + "  predicted ms"]
    for name, row in data["kernels"].items():
        for target, found in row.items():
            cells = " ".join(f"{found[key]:>9}" for key in keys)
            lines.append(f"{name:58} {target:6} {cells}  {found.get('predicted_ms', '')}")
    return "\n".join(lines)


def write(data: dict[str, Any], root: Path) -> None:
    """Write the page with measured times beside the predicted ones."""
    from offline_models import BATCH, HIDDEN, LAYERS, LENGTH

    steps = json.loads((root / "docs/results/speed_gate_rank.json").read_text())
    models = {row["model"]: 1e3 * row["seconds"][0] for row in steps["models"]}
    timed = json.loads((root / "docs/results/speed_ops.json").read_text())["ops"]
    names = {
        "linear_attention": "linear, scalar, 64", "delta_rule": "delta, scalar, 64",
        "gate_rank, linear": "linear, gate_rank, 64", "gate_rank, delta": "delta, gate_rank, 64",
    }  # fmt: skip
    ops = {names[row["name"]]: [1e3 * row["forward"], 1e3 * row["both"]]
           for row in timed if row.get("T") == 32768 and row["name"] in names}  # fmt: skip
    rates = data["rates"]
    text = TEXT.format(
        missed=len(data["missed_today"]), rows=len(data["kernels"]),
        kernels=_kernels(data), ops=_ops(data, ops), models=_models(data, models),
        breaks=_breaks(data), loss=_loss(data),
        batch=BATCH, length=f"{LENGTH:,}",
        hidden=f"{HIDDEN:,}", layers=LAYERS, copy=f"{rates['copy'] / 1e12:.2f}",
        product=f"{rates['product'] / 1e12:.0f}", triton=f"{rates['triton'] / 1e12:.2f}",
    )  # fmt: skip
    (root / "docs/gpu.md").write_text(text, encoding="utf-8")
