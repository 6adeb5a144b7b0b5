"""What `halflife train --recompute` saves and costs: `python benchmarks/recompute.py`, for docs/log.md.

For each preset, the bytes that a layer keeps of a token until the backward pass: of a GPU's kernels, counted on tensors
without data under autocast, beside fla's layer and the least; and on this CPU, with the time of a step. Bytes are those
of the storages that live after the forward pass, of two layers less those of one.

What fla's layers keep is a formula, from what its autograd functions give to `save_for_backward` (fla-core 0.6, and
for Mamba-2 mamba_ssm 2.2, which its layer calls), with the widths of our presets, in bfloat16 but for the residual
stream. The least are the residual stream, once, and the outputs of products and of the op: neither runs twice.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from halflife import LanguageModel, preset  # noqa: E402
from halflife.ops.backends.recompute import calling  # noqa: E402
from halflife.training.estimate import LiveBytes  # noqa: E402

WAYS = {
    "nothing": (), "norms": ("norms",), "conv": ("conv",), "op": ("op",), "all three": ("norms", "conv", "op"),
    "blocks": ("blocks",),
}  # fmt: skip
SHOWN = ("mamba2", "gated_deltanet", "gla", "llama", "rwkv7")
HIDDEN, LENGTH = 256, 256  # on the CPU
WIDE, ROWS, LONG = 1024, 16, 2048  # counted for a GPU
RESULTS = Path(__file__).parent / "results" / "recompute.json"


def main() -> None:
    torch.set_num_threads(1)
    rows: dict[str, Any] = {}
    for name in SHOWN:
        rows[name] = row(name)
        RESULTS.write_text(json.dumps({"gpu_width": WIDE, "cpu_width": HIDDEN, "layers": rows}, indent=1) + "\n")
    print("\n".join(table(rows)))


def row(name: str) -> dict[str, Any]:
    """The figures of a preset: bytes a layer and token, and milliseconds a step of two layers."""
    print(name, file=sys.stderr, flush=True)
    torch.manual_seed(0)
    model, ids = LanguageModel(preset(name, hidden_size=HIDDEN, num_layers=2)), torch.zeros(1, LENGTH, dtype=torch.long)
    seconds = processor_seconds({way: partial(step, model, ids, kinds) for way, kinds in WAYS.items()})
    one, two = (LanguageModel(preset(name, hidden_size=HIDDEN, num_layers=n)) for n in (1, 2))
    cpu = {way: (kept(two, ids, kinds) - kept(one, ids, kinds)) / LENGTH for way, kinds in WAYS.items()}
    fla, least = others(name)
    return {
        "gpu": {way: round(on_gpu(name, kinds)) for way, kinds in WAYS.items()}, "fla": fla, "least": least,
        "cpu": {way: round(x) for way, x in cpu.items()},
        "cpu_ms": {way: round(1e3 * x, 1) for way, x in seconds.items()},
    }  # fmt: skip


def processor_seconds(candidates: dict[str, Any], rounds: int = 7) -> dict[str, float]:
    """The median time of each on the processor, taking turns; other work beside it does not count."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for i in range(rounds + 1):
        for name, run in candidates.items():
            began = time.process_time()
            run()
            if i:
                times[name].append(time.process_time() - began)
    return {name: median(values) for name, values in times.items()}


def step(model: LanguageModel, ids: torch.Tensor, kinds: tuple[str, ...]) -> None:
    model.hidden(ids, call=calling(kinds))[0].sum().backward()


def kept(model: LanguageModel, ids: torch.Tensor, kinds: tuple[str, ...]) -> int:
    """The bytes that live after a forward pass beside the parameters and the output."""
    with LiveBytes([ids, *model.parameters(), *model.buffers()]) as counter:
        hidden, state = model.hidden(ids, call=calling(kinds))
        del state
    assert hidden.requires_grad
    return counter.live


def on_gpu(name: str, kinds: tuple[str, ...]) -> float:
    """The bytes a layer and token that the kernels of a GPU keep, under autocast."""
    import offline_kernels
    import offline_models

    cast, found = offline_models._Autocast(), []
    ids = torch.zeros(ROWS, LONG, dtype=torch.long, device="meta")
    for layers in (1, 1, 2):  # the first fills caches
        with torch.device("meta"):
            model = LanguageModel(preset(name, hidden_size=WIDE, num_layers=layers))
        count = offline_models.Count(tokens=ROWS * LONG)
        with (
            offline_models.on_a_gpu(cast),
            offline_kernels.captured(_Forgotten()),
            offline_models._Counting(count, RATES),
            cast,
        ):
            found.append(kept(model, ids, kinds))
    return (found[2] - found[1]) / (ROWS * LONG)


class _Forgotten(list[Any]):
    """A list of launches that keeps none, because they hold their tensors."""

    def append(self, _: Any) -> None:
        pass


RATES = {"copy": 1.0, "product": 1.0, "triton": 1.0}  # times are not read


def others(name: str) -> tuple[int | None, int | None]:
    """Bytes a layer and token of fla's layer with our widths, and the least; None where no formula is written."""
    with torch.device("meta"):
        block = LanguageModel(preset(name, hidden_size=WIDE, num_layers=1)).blocks[0]
    width = {n: x.shape[0] for n, x in block.named_parameters() if n.endswith("weight")}
    if name not in ("mamba2", "gated_deltanet", "gla", "llama"):
        return None, None
    inner, mlp = 2 * WIDE if name == "mamba2" else WIDE, width["mlp.gate.weight"]
    # The residual stream and what the mixer adds; beside them, the rest of the stream after it, inverse norms and the
    # inputs of the projections of mixer and MLP; SwiGLU's two inputs.
    stream, inputs, gates = 6 * WIDE, 6 * WIDE + 8, 4 * mlp
    if name == "mamba2":  # the output of its one projection, and that of the scan
        mixer = 2 * width["mixer.in_proj.weight"] + 2 * inner
        return stream + inputs + gates + mixer + 4, stream + gates + mixer
    qkv, heads = width.get("mixer.qkv_proj.weight", 0), 16
    if name == "gated_deltanet":  # inputs and outputs of the convolution, gates, A; o, its gate, what o_proj reads
        extra = 2 * qkv + heads * (4 + 4 + 4 + 2 + 4 + 2) + 2 * 64 * heads
        least = stream + gates + 2 * qkv + 2 * 2 * heads + 4 * inner
        return stream + inputs + gates + 2 * qkv + extra + 6 * inner + 4 * heads, least
    if name == "gla":  # q, k, v; the low rank, the input and the output of its logsigmoid, A; as above
        keys, heads = width["mixer.decay_proj.up.weight"], 4
        extra = 2 * 16 + 2 * 2 * keys + 2 * 64 * heads
        return stream + inputs + gates + 2 * qkv + extra + 6 * inner + 4 * heads, (
            stream + gates + 2 * qkv + 2 * keys + 4 * inner
        )
    # q, k (rotated), v, o and the sums of FlashAttention
    return stream + inputs + gates + 2 * qkv + 2 * inner + 4 * 16, stream + gates + 2 * qkv + 2 * inner


def table(rows: dict[str, Any]) -> list[str]:
    """Markdown lines: bytes of a GPU, then of this CPU with the time of a step."""
    lines = [
        f"Kilobytes a layer and token by `--recompute`; width {WIDE:,} on a GPU (counted), {HIDDEN} here.", "",
        f"| preset, GPU | {' | '.join(WAYS)} | fla (formula) | least |", f"|---|{'---:|' * (len(WAYS) + 2)}",
    ]  # fmt: skip
    for name, one in rows.items():
        cells = [*one["gpu"].values(), one["fla"], one["least"]]
        lines.append(f"| `{name}` | {' | '.join('–' if x is None else f'{x / 1e3:.1f}' for x in cells)} |")
    lines += ["", f"| preset, CPU: kB, ms of one core a step | {' | '.join(WAYS)} |", f"|---|{'---:|' * len(WAYS)}"]
    for name, one in rows.items():
        cells = [f"{one['cpu'][way] / 1e3:.1f}, {one['cpu_ms'][way]:.0f}" for way in WAYS]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()
