"""The ops that are timed, their FLOPs, and their peers."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from halflife import ops

H, K, V, C = 12, 64, 64, 64  # heads, head sizes, chunk


@dataclass(frozen=True)
class Case:
    """An op on inputs of length T.

    Attributes:
        name: name in the table.
        forward: runs the op and returns its output; the inputs require gradients.
        flops: FLOPs of forward and of forward + backward. At the machine's GEMM rate they give the floor.
    """

    name: str
    forward: Callable[[], Tensor]
    flops: tuple[float, float]


def inputs(
    length: int, heads: int = H, key: int = K, value: int = V, device: str = "cpu", dtype=torch.float32, batch: int = 1
) -> dict[str, Tensor]:
    """Draw random inputs that require gradients.

    They are q, k (of unit norm), v, beta, a scalar log-decay g, a vector log-decay gv, and g_slow of GateRank, with a
    reset about every 64 tokens. GateRank takes g as its fast log-decay.
    """
    torch.manual_seed(0)

    def leaf(x: Tensor) -> Tensor:
        return x.to(dtype if x.ndim == 4 else torch.float32).requires_grad_()

    def rand(*rest: int) -> Tensor:
        return torch.rand(batch, length, heads, *rest, device=device)

    q, k = torch.randn(2, batch, length, heads, key, device=device)
    found = {
        "q": leaf(q), "k": leaf(F.normalize(k, dim=-1)),
        "v": leaf(torch.randn(batch, length, heads, value, device=device)),
        "beta": leaf(rand()), "g": leaf(-0.1 * rand()), "gv": (-0.1 * rand(key)).requires_grad_(),
    }  # fmt: skip
    slow, reset = -0.1 * rand(), rand() < 1 / 64
    return found | {"g_slow": leaf(torch.where(reset, slow, 0.0))}


def dplr(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, **options) -> tuple[Tensor, Tensor | None]:
    """DPLR as in the design space: the state decays, and the value stored under k is replaced."""
    written = k * beta.unsqueeze(-1).to(k.dtype)
    return ops.dplr(q, written, v, -k, written, g, **options)


def unit(x: dict) -> float:
    """Return the FLOPs of one C·C·K product in every chunk and head."""
    return 2 * x["q"].numel() * C


def ours(x: dict, backend: str = "auto") -> list[Case]:
    """Return our ops with their FLOPs, counted in C·C·64 products of a chunk.

    Linear attention has 4 products forward and 10 backward, two of which are recomputed. The delta rule has 7 (one is
    the triangular solve) and 20. DPLR has 14 and 35, because it has four weight matrices in the place of one.
    """
    q, k, v, beta, g, gv = (x[name] for name in ("q", "k", "v", "beta", "g", "gv"))
    linear, delta, rank_one = ((forward * unit(x), both * unit(x)) for forward, both in ((4, 14), (7, 27), (14, 49)))
    option = {"backend": backend}
    return [
        Case("linear_attention, no decay", lambda: ops.linear_attention(q, k, v, **option)[0], linear),
        Case("linear_attention, scalar", lambda: ops.linear_attention(q, k, v, g, **option)[0], linear),
        Case("linear_attention, vector", lambda: ops.linear_attention(q, k, v, gv, **option)[0], linear),
        Case("delta_rule, scalar", lambda: ops.delta_rule(q, k, v, beta, g, **option)[0], delta),
        Case("delta_rule, vector", lambda: ops.delta_rule(q, k, v, beta, gv, **option)[0], delta),
        Case("dplr, scalar", lambda: dplr(q, k, v, beta, g, **option)[0], rank_one),
        Case("dplr, vector", lambda: dplr(q, k, v, beta, gv, **option)[0], rank_one),
    ]


def koopman(x: dict, backend: str = "auto", rank: int = 48) -> Case:
    """Return spectral Koopman attention with one operator a chunk and keys of size `rank`.

    Its FLOPs are those of the matrix products of the chunked form on one chunk, by torch's counter, times the chunks.
    """
    q, k = (x[name][..., :rank].detach().contiguous().requires_grad_() for name in ("q", "k"))

    def run(backend: str = backend, length: int | None = None) -> Tensor:
        q_k_v = (part[:, :length] for part in (q, k, x["v"]))
        return ops.koopman_attention(*q_k_v, backend=backend)[0]

    with FlopCounterMode(display=False) as forward, torch.no_grad():
        run("chunked", C)
    with FlopCounterMode(display=False) as both:
        run("chunked", C).sum().backward()
    chunks = q.shape[1] / C
    return Case("koopman_attention", run, (chunks * forward.get_total_flops(), chunks * both.get_total_flops()))


def gated(x: dict, backend: str = "auto") -> list[Case]:
    """Return the ops that have kernels, with a scalar decay or with GateRank.

    GateRank reads two states. It has 5 products forward and 13 backward under the linear update, and 9 and 26 under the
    delta rule.
    """
    q, k, v, beta, g, slow = (x[name] for name in ("q", "k", "v", "beta", "g", "g_slow"))
    option = {"backend": backend}
    counts = {
        "linear_attention": (4, 14),
        "delta_rule": (7, 27),
        "gate_rank, linear": (5, 18),
        "gate_rank, delta": (9, 35),
    }
    runs = (
        lambda: ops.linear_attention(q, k, v, g, **option)[0],
        lambda: ops.delta_rule(q, k, v, beta, g, **option)[0],
        lambda: ops.gate_rank(q, k, v, slow, g, **option)[0],
        lambda: ops.gate_rank(q, k, v, slow, g, beta, **option)[0],
    )
    return [
        Case(name, run, (forward * unit(x), both * unit(x)))
        for (name, (forward, both)), run in zip(counts.items(), runs, strict=True)
    ]


def sdpa(x: dict) -> Case:
    """Causal softmax attention on the same inputs (half of T² products), by FlashAttention's kernels on a GPU."""
    batch, length, heads, key = x["q"].shape
    flops = 2 * batch * length * length * heads * key

    def forward() -> Tensor:
        q, k, v = (x[name].transpose(1, 2) for name in ("q", "k", "v"))
        only = sdpa_kernel(SDPBackend.FLASH_ATTENTION) if q.is_cuda else contextlib.nullcontext()
        with only:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    return Case("softmax attention (SDPA)", forward, (flops, 3.5 * flops))


def transformers_peers(x: dict) -> list[Case]:
    """transformers' pure-torch Mamba-2 scan and chunked gated delta rule, on the same sizes.

    They are unwrapped, because transformers replaces them by fla's kernels where fla-core is installed, even on a CPU.
    """
    from transformers.models.mamba2 import modeling_mamba2
    from transformers.models.qwen3_next import modeling_qwen3_next

    chunked = inspect.unwrap(modeling_qwen3_next.torch_chunk_gated_delta_rule)

    q, k, v, beta, g = (x[name] for name in ("q", "k", "v", "beta", "g"))
    cases = [Case("transformers gated delta rule", lambda: chunked(q, k, v, g, beta)[0], ours(x)[3].flops)]
    if hasattr(modeling_mamba2, "mamba2_chunk_scan"):
        rate = -torch.ones(q.shape[2])

        def scan() -> Tensor:
            return inspect.unwrap(modeling_mamba2.mamba2_chunk_scan)(v, -g, rate, k, q, 256)

        cases.append(Case("transformers Mamba-2 scan", scan, ours(x)[1].flops))
    return cases
