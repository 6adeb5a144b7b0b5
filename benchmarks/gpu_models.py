"""What `gpu.py` times beyond single ops: training steps, decoding, Koopman attention, and passes over memory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from gpu_clock import SCALES, Row, failed, measured, times
from torch import Tensor

from halflife import LanguageModel, layers, ops, preset
from halflife.evaluation.throughput import train_step
from halflife.ops import fused, rwkv7

MODELS = ("mamba2", "mamba2+gate_rank", "gated_deltanet", "gla", "rwkv7", "llama")
DECODED = ("mamba2", "mamba2+gate_rank", "gated_deltanet", "rwkv7", "llama")


def model(name: str, device: str) -> LanguageModel:
    scale = SCALES[device]
    torch.manual_seed(0)
    options = {"hidden_size": scale.hidden, "num_layers": scale.depth, "vocab_size": 256}
    return LanguageModel(preset(name, **options)).to(device)


def mixed(device: str) -> contextlib.AbstractContextManager[object]:
    """Mixed precision, on a GPU."""
    return torch.autocast("cuda", torch.bfloat16) if device == "cuda" else contextlib.nullcontext()


def step_rows(job: str, device: str) -> Iterator[Row]:
    """Training steps of "model / eager" or "model / compiled", in mixed precision."""
    name, _, way = job.rpartition(" / ")
    batch, length = SCALES[device].step
    ids = torch.randint(256, (batch, length), device=device)
    built = model(name, device)
    if way == "compiled":
        built.compile(**({} if device == "cuda" else {"backend": "aot_eager"}))  # a C++ compiler takes minutes
    step = train_step(built, bf16=device == "cuda")
    row: Row = {"part": "steps", "model": name, "way": way, "B": batch, "T": length}
    try:
        began = time.perf_counter()
        step(ids)
        first = time.perf_counter() - began
        found = times(lambda: step(ids), device, 5 * SCALES[device].seconds)
        yield row | {"ms": found[1], "ms_quartiles": [found[0], found[2]], "first_s": round(first, 2)}
    except Exception as error:
        yield row | failed(error)


def decode_rows(job: str, device: str) -> Iterator[Row]:
    """Milliseconds of a token of one sequence, or of the layer of spectral Koopman attention, which is trained."""
    if job == "koopman":
        yield from _koopman(device)
        return
    built = model(job, device).eval()
    ids = torch.randint(256, (1, 64), device=device)
    with torch.no_grad(), mixed(device):
        state = built(ids)[1]
        try:
            yield {"part": "decode", "model": job} | measured(lambda: built(ids[:, :1], state), device)
        except Exception as error:
            yield {"part": "decode", "model": job} | failed(error)


def _koopman(device: str) -> Iterator[Row]:
    batch, length = SCALES[device].step
    row: Row = {"part": "koopman", "B": batch, "T": length}
    try:
        yield row | measured(koopman_layer(device), device)
    except Exception as error:
        yield row | failed(error)


def koopman_layer(device: str) -> Callable[[], object]:
    """A layer of spectral Koopman attention, forward and with its gradients."""
    scale = SCALES[device]
    mixer = layers.build("ska", hidden_size=scale.hidden, num_heads=scale.heads, layer_idx=0, num_layers=2).to(device)
    x = torch.randn(*scale.step, scale.hidden, device=device, requires_grad=True)

    def both() -> None:
        with mixed(device):
            y = mixer(x)[0]
        torch.autograd.grad(y.float().sum(), [x, *mixer.parameters()], allow_unused=True)

    return both


def passes(device: str) -> dict[str, tuple[Callable[[], Tensor], list[Tensor]]]:
    """Passes over memory by name, each with the tensors that it reads and that have gradients."""
    scale = SCALES[device]
    (batch, length), heads, size = scale.step, scale.heads, scale.sizes[0]
    shape, wide = (batch, length, heads, size), heads * size

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16, requires_grad=True)

    x, z = (leaf(batch, length, wide) for _ in range(2))
    weight, angles = leaf(wide), torch.rand(length, size // 2)
    cos, sin = (f(angles.to(device)) for f in (torch.cos, torch.sin))
    o, taps, mu = leaf(*shape), leaf(wide, 4), leaf(wide)
    return {
        "conv": (lambda: ops.causal_conv1d(x, taps, activation="silu")[0], [x, taps]),
        "rms_norm": (lambda: fused.rms_norm(x, weight, 1e-5), [x, weight]),
        "rms_norm_of_gated": (lambda: fused.rms_norm_of_gated(x, z, weight, 1, 1e-5), [x, z, weight]),
        "l2_normalize": (lambda: fused.l2_normalize(o), [o]),
        "rotate": (lambda: fused.rotate(o, cos, sin), [o]),
        "swiglu": (lambda: fused.swiglu(x, z), [x, z]),
        "token_mix": (lambda: rwkv7.token_mix(x, z, [mu])[0], [x, z, mu]),
        "softplus of decays": (lambda: F.softplus(o[..., 0].float()), [o]),
    }


def pass_rows(job: str, device: str) -> Iterator[Row]:
    """Passes over memory, with the bytes a second that they reach: those of their inputs and outputs, once."""
    for name, (run, given) in passes(device).items():
        row: Row = {"part": "passes", "pass": name}
        try:
            y = run()
            size_of = sum(t.nbytes for t in given) + y.nbytes
            upstream = torch.ones_like(y)
            both = measured(lambda run=run, given=given, up=upstream: torch.autograd.grad(run(), given, up),
                            device, "both_ms")  # fmt: skip
            with torch.no_grad():
                forward = measured(run, device, "forward_ms")
            best = forward.get("graph_forward_ms", forward["forward_ms"])
            yield row | forward | both | {"forward_tb_s": round(size_of / best / 1e9, 4)}
        except Exception as error:
            yield row | failed(error)
