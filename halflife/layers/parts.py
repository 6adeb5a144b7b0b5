"""Norms, gates and the short convolution that mixers share."""

from __future__ import annotations

import math
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halflife.layers.init import Law, drawn, reset
from halflife.ops import causal_conv1d, fused
from halflife.ops.backends.dispatch import beside
from halflife.ops.recurrent import Unconvolved
from halflife.packing import Packing
from halflife.position import angles, spread
from halflife.precision import ROOMY, compute_dtype

Module = TypeVar("Module", bound=nn.Module)


class RMSNorm(nn.RMSNorm):
    """`nn.RMSNorm` over the last axis."""

    pass_backend = "auto"  # see `set_backend`
    adds = True  # whether it takes the sum of two

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        """The norm of x, or `x + y` and its norm."""
        assert self.eps is not None
        if y is not None:
            return fused.add_rms_norm(x, y, self.weight, self.eps, self.pass_backend)
        return fused.rms_norm(x, self.weight, self.eps, self.pass_backend)


class PlusOneRMSNorm(RMSNorm):
    """`RMSNorm(x) ⊙ (1 + w)` over the last axis, the norm of Qwen3.5. w starts at 0."""

    adds = False

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        assert self.eps is not None
        wide = compute_dtype(x)
        return fused.rms_norm(x.to(wide), 1 + self.weight.to(wide), self.eps, self.pass_backend).to(x.dtype)


class GatedRMSNorm(nn.Module):
    """Mamba-2's output norm `RMSNorm(y ⊙ silu(z)) ⊙ weight` over groups of channels; without z, `RMSNorm(y) ⊙ weight`.

    Args:
        size: channels D of `y, z [B, T, D]`.
        groups: number of equal groups of channels; each group has its own mean square.
        eps: added to the mean square.
    """

    pass_backend = "auto"  # see `set_backend`

    def __init__(self, size: int, groups: int = 1, eps: float = 1e-5) -> None:
        super().__init__()
        self.groups, self.eps = groups, eps
        self.weight = nn.Parameter(torch.empty(size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(
        self, y: Tensor, z: Tensor | None = None, skip: tuple[Tensor, Tensor] | None = None,
        weight: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """`y, z [B, T, D]`; None is no gate. With `skip = (D [H], x [B, T, D])` the values are `y + D ⊙ x`.

        With the `weight [N, D]` of a map, which needs a gate, it returns the map of the norm.
        """
        if z is None:
            groups = add_skip(y, skip).unflatten(-1, (self.groups, -1))
            return F.rms_norm(groups, groups.shape[-1:], eps=self.eps).flatten(-2) * self.weight
        room = ROOMY[z.dtype]
        skip = None if skip is None else (skip[0], skip[1].to(room))
        if weight is not None and room == z.dtype:
            return fused.rms_norm_of_gated_linear(
                y, z, self.weight, self.groups, self.eps, skip, weight, self.pass_backend
            )
        y = fused.rms_norm_of_gated(y, z.to(room), self.weight, self.groups, self.eps, skip, self.pass_backend)
        y = y.half() if z.dtype == torch.float16 else y
        return y if weight is None else F.linear(y, weight)


class NormBeforeGate(GatedRMSNorm):
    """`RMSNorm(y) ⊙ weight ⊙ silu(z)`, the output norm of Falcon-H1 with `mamba_norm_before_gate` and of Mamba-3."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, y: Tensor, z: Tensor | None = None, skip: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """As `GatedRMSNorm`, with the norm before the gate."""
        y = super().forward(y, None, skip)
        if z is None:
            return y
        return (y * F.silu(z)).half() if z.dtype == torch.float16 else y * F.silu(z)


class GateWithoutNorm(nn.Module):
    """`y ⊙ silu(z)` in the place of `GatedRMSNorm`."""

    def __init__(self, size: int, groups: int = 1, eps: float = 1e-5) -> None:
        super().__init__()

    def forward(self, y: Tensor, z: Tensor, skip: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """`y, z [B, T, D]`, and `skip` as in `GatedRMSNorm`."""
        y = add_skip(y, skip) * F.silu(z)
        return y.half() if z.dtype == torch.float16 else y


OUTPUT_NORMS = {"after_gate": GatedRMSNorm, "before_gate": NormBeforeGate, "none": GateWithoutNorm}


def add_skip(y: Tensor, skip: tuple[Tensor, Tensor] | None) -> Tensor:
    """`y + D ⊙ x` for `y [B, T, H·V]` and `skip = (D [H], x [B, T, H·V])`."""
    if skip is None:
        return y
    scale, x = skip
    heads = (len(scale), -1)
    return torch.addcmul(
        y.unflatten(-1, heads), scale.unsqueeze(-1).to(y.dtype), x.to(y.dtype).unflatten(-1, heads)
    ).flatten(-2)


class NormThenSwish(RMSNorm):
    """`RMSNorm(o) ⊙ silu(z)` with the norm over each head."""

    def forward(self, o: Tensor, z: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """`o [B, T, H, V]`, `z [B, T, H·V]` → `[B, T, H·V]`."""
        assert self.eps is not None
        y = fused.gated_head_norm(o, z.to(ROOMY[z.dtype]), self.weight, self.eps, self.pass_backend)
        return y.half() if z.dtype == torch.float16 else y


class SigmoidThenNorm(RMSNorm):
    """`RMSNorm(y ⊙ σ(z))` over the last axis."""

    def forward(self, y: Tensor, z: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """`y, z [B, T, D]` → `[B, T, D]`."""
        assert self.eps is not None
        y = fused.rms_norm_of_sigmoid_gated(y, z.to(ROOMY[z.dtype]), self.weight, self.eps, self.pass_backend)
        return y.half() if z.dtype == torch.float16 else y


class HeadwiseGate(nn.Module):
    """`RMSNorm(o) ⊙ silu(x W)` with the norm over each head, the output gate of GLA, RetNet and Gated DeltaNet."""

    def __init__(self, hidden_size: int, num_heads: int, value_dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.norm = NormThenSwish(value_dim, eps=eps)
        self.proj = nn.Linear(hidden_size, num_heads * value_dim, bias=False)

    def forward(self, o: Tensor, x: Tensor) -> Tensor:
        """`o [B, T, H, V]`, `x [B, T, D]` → `[B, T, H·V]`."""
        return self.norm(o, self.proj(x))


class LowRankGate(nn.Module):
    """`RMSNorm(o ⊙ σ(x W₁ W₂))` with the norm over all heads, the output gate of the Decay Linear Transformer."""

    def __init__(self, hidden_size: int, num_heads: int, value_dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.norm = SigmoidThenNorm(num_heads * value_dim, eps=eps)
        self.down = nn.Linear(hidden_size, hidden_size // num_heads, bias=False)
        self.up = nn.Linear(hidden_size // num_heads, num_heads * value_dim, bias=False)

    def forward(self, o: Tensor, x: Tensor) -> Tensor:
        """`o [B, T, H, V]`, `x [B, T, D]` → `[B, T, H·V]`."""
        return self.norm(o.flatten(-2), self.up(self.down(x)))


class SigmoidGate(nn.Module):
    """`RMSNorm(o) ⊙ σ(x W)` with the norm over each head, Comba's output gate."""

    def __init__(self, hidden_size: int, num_heads: int, value_dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.norm = RMSNorm(value_dim, eps=eps)
        self.proj = nn.Linear(hidden_size, num_heads * value_dim, bias=False)

    def forward(self, o: Tensor, x: Tensor) -> Tensor:
        """`o [B, T, H, V]`, `x [B, T, D]` → `[B, T, H·V]`."""
        return self.norm(o).flatten(-2) * self.proj(x).sigmoid()


class LowRankSigmoidGate(nn.Module):
    """`RMSNorm(o) ⊙ σ(x W₁ W₂ + b)` of rank V with the norm over each head, the output gate of KDA."""

    def __init__(self, hidden_size: int, num_heads: int, value_dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.norm = RMSNorm(value_dim, eps=eps)
        self.down = nn.Linear(hidden_size, value_dim, bias=False)
        self.up = nn.Linear(value_dim, num_heads * value_dim)

    def forward(self, o: Tensor, x: Tensor) -> Tensor:
        """`o [B, T, H, V]`, `x [B, T, D]` → `[B, T, H·V]`."""
        return self.norm(o).flatten(-2) * self.up(self.down(x)).sigmoid()


class HeadRMSNorm(RMSNorm):
    """`RMSNorm(o)` over each head, in the place of an output gate."""

    def __init__(self, hidden_size: int, num_heads: int, value_dim: int, eps: float = 1e-5) -> None:
        super().__init__(value_dim, eps=eps)

    def forward(self, o: Tensor, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """`o [B, T, H, V]` → `[B, T, H·V]`; x is not used."""
        return super().forward(o).flatten(-2)


# Functions of queries and keys, by their names in transformers (`ACT2FN`).
FEATURE_MAPS = {
    "relu": F.relu, "relu2": lambda x: F.relu(x).square(), "silu": F.silu, "gelu": F.gelu, "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}  # fmt: skip

GATES = {
    "low_rank": LowRankGate, "swish": HeadwiseGate, "sigmoid": SigmoidGate, "low_rank_sigmoid": LowRankSigmoidGate,
    "none": HeadRMSNorm,
}  # fmt: skip


class DecayProjection(nn.Module):
    """The projection to the activation f of a decay. For a vector decay it may have low rank.

    Args:
        hidden_size: D of the input.
        shape: shape of one token's log-decays, `(H,)` or `(H, K)`.
        rank: rank of the projection for a vector decay; None for full rank.
        bias: whether the last map has a bias.
        law: initial values of the last map; None means torch's.
    """

    def __init__(
        self, hidden_size: int, shape: tuple[int, ...], rank: int | None, bias: bool, law: Law | None = None
    ) -> None:
        super().__init__()
        self.shape = shape
        self.down, width = nn.Identity(), hidden_size
        if rank is not None and len(shape) == 2:
            self.down, width = nn.Linear(hidden_size, rank, bias=False), rank
        self.initial = {"up": law or nn.Linear.reset_parameters}
        self.up = drawn(width, torch.Size(shape).numel(), self.initial["up"], bias)

    def reset_parameters(self) -> None:
        reset(self, self.initial)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, T, D]` → `[B, T, H]` or `[B, T, H, K]`."""
        return self.up(self.down(x)).unflatten(-1, self.shape)


class ShortConv(nn.Module):
    """Causal depthwise convolution with W taps and SiLU. Its state is the last W − 1 inputs `[B, D, W − 1]`."""

    pass_backend = "auto"  # see `set_backend`

    def __init__(self, channels: int, size: int = 4, bias: bool = False) -> None:
        super().__init__()
        if size < 1:
            raise ValueError(f"conv_size must be at least 1 (0 is none, in the layers linear and ska); got {size}")
        self.size = size
        self.weight = nn.Parameter(torch.empty(channels, size))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = 1 / math.sqrt(self.size)
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(
        self, x: Tensor, state: Tensor | None, packing: Packing, units: tuple[int, int] | None = None, **token: Any
    ) -> Any:
        """`x [B, T, D]` → `(y [B, T, D], state)`; with `token`, the other fields of it, an `Unconvolved`."""
        if token:
            assert state is not None
            return Unconvolved(x, self.weight, self.bias, state, **token)
        y, state = causal_conv1d(
            x, self.weight, self.bias, initial_state=state, output_final_state=True, cu_seqlens=packing,
            backend=self.pass_backend, unit=units,
        )  # fmt: skip
        assert state is not None
        return y, state


def rotary(
    q: Tensor, k: Tensor, position: Tensor, base: float = 10_000.0, backend: str = "auto",
    kept: dict[Any, Any] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`rope` of queries and keys `[B, T, H, K]`, with the angles computed once.

    `kept` remembers them for other layers with the same tensor of positions (`Packing.kept`).
    """
    half, kept = q.shape[-1] // 2, {} if kept is None else kept
    key = ("rotary", base, half, compute_dtype(q), q.device)
    if key not in kept or kept[key][0] is not position:
        angle = angles(position, base, spread(half, half, q.device), compute_dtype(q))
        kept[key] = position, angle.cos(), angle.sin()
    _, cos, sin = kept[key]
    return fused.rotate(q, cos, sin, backend), fused.rotate(k, cos, sin, backend)


def set_backend(module: Module, backend: str) -> Module:
    """Let the ops of a module run by `backend`, and return the module.

    Norms, gates and convolutions stay in plain torch where the op on the state does (`ops.backends.dispatch.beside`).
    """
    for part in module.modules():
        for name, value in (("backend", backend), ("pass_backend", beside(backend))):
            if hasattr(part, name):
                setattr(part, name, value)
    return module


def clebsch_gordan(x: Tensor) -> Tensor:
    """Map n pairs `[…, 2 n]`, read as complex numbers z, to `[|z|², Re z², Im z²]`, `[…, 3 n]` (Echo, Appendix B).

    If a pair is rotated by θ, as rotary positions do, the first third stays and the other two are rotated by 2θ.
    """
    real, imaginary = x.unflatten(-1, (-1, 2)).unbind(-1)
    a, b = real.square(), imaginary.square()
    return torch.cat([a + b, a - b, 2 * real * imaginary], -1)
