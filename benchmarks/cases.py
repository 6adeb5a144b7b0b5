"""The ops that are timed, their arithmetic, and the peers beside them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from halflife import ops

H, K, V, C = 12, 64, 64, 64  # heads, head sizes, chunk


@dataclass(frozen=True)
class Case:
    """An op on inputs of length T.

    Attributes:
        forward: runs it and returns the output; leaves require gradients.
        units: C×C×64 products a chunk and head, forward and forward + backward: the floor is their FLOPs at the
            machine's GEMM rate. Attention counts its own.
    """

    name: str
    forward: Callable[[], Tensor]
    flops: tuple[float, float]


def inputs(length: int, heads: int = H, key: int = K, value: int = V, device: str = "cpu", dtype=torch.float32) -> dict:
    """Random q, k (unit norm), v, beta, scalar g, vector gv, all requiring gradients: B = 1."""
    torch.manual_seed(0)

    def leaf(x: Tensor) -> Tensor:
        return x.to(device, dtype if x.ndim == 4 else torch.float32).requires_grad_()

    q, k = torch.randn(2, 1, length, heads, key)
    return {
        "q": leaf(q), "k": leaf(F.normalize(k, dim=-1)), "v": leaf(torch.randn(1, length, heads, value)),
        "beta": leaf(torch.rand(1, length, heads)), "g": leaf(-0.1 * torch.rand(1, length, heads)),
        "gv": (-0.1 * torch.rand(1, length, heads, key)).to(device).requires_grad_(),
    }  # fmt: skip


def dplr(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, **options) -> tuple[Tensor, Tensor | None]:
    """DPLR as the design space writes it: what key k holds is replaced, beside the decay."""
    written = k * beta.unsqueeze(-1)
    return ops.dplr(q, written, v, -k, written, g, **options)


def ours(x: dict, backend: str = "auto") -> list[Case]:
    """Our ops. A chunk's products, in C·C·64 units: linear attention 4 forward and 10 backward (two of them
    recomputed), the delta rule 7 (one is the triangular solve) and 20, DPLR 14 and 35 (four
    matrices of weights where linear attention has one)."""
    q, k, v, beta, g, gv = (x[name] for name in ("q", "k", "v", "beta", "g", "gv"))
    length, heads = q.shape[1], q.shape[2]
    unit = 2 * length * heads * C * 64 * (q.shape[3] / 64)
    linear, delta, rank_one = (4 * unit, 14 * unit), (7 * unit, 27 * unit), (14 * unit, 49 * unit)
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


def sdpa(x: dict) -> Case:
    """Softmax attention on the same inputs, causal (half of T² products)."""
    length, heads, key = x["q"].shape[1:]
    flops = 2 * length * length * heads * key

    def forward() -> Tensor:
        q, k, v = (x[name].transpose(1, 2) for name in ("q", "k", "v"))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    return Case("softmax attention (SDPA)", forward, (flops, 3.5 * flops))


def transformers_peers(x: dict) -> list[Case]:
    """transformers' pure-torch Mamba-2 scan and chunked gated delta rule, on the same sizes.

    Unwrapped: transformers puts fla's kernels in their place where fla-core is installed, GPU or not.
    """
    from transformers.models.mamba2 import modeling_mamba2
    from transformers.models.qwen3_next import modeling_qwen3_next

    chunked = inspect.unwrap(modeling_qwen3_next.torch_chunk_gated_delta_rule)

    q, k, v, beta, g = (x[name] for name in ("q", "k", "v", "beta", "g"))
    unit = ours(x)[1].flops
    cases = [Case("transformers gated delta rule", lambda: chunked(q, k, v, g, beta)[0], ours(x)[3].flops)]
    if hasattr(modeling_mamba2, "mamba2_chunk_scan"):
        rate = -torch.ones(q.shape[2])

        def scan() -> Tensor:
            return inspect.unwrap(modeling_mamba2.mamba2_chunk_scan)(v, -g, rate, k, q, 256)

        cases.append(Case("transformers Mamba-2 scan", scan, unit))
    return cases
