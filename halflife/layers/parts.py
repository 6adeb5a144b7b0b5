"""Norms, gates and the short convolution that mixers share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halflife.layers.init import Law, drawn, reset
from halflife.ops import causal_conv1d, fused
from halflife.ops.arguments import is_hooked
from halflife.ops.backends.dispatch import beside
from halflife.ops.backends.widened import product
from halflife.ops.laws import Product
from halflife.ops.linear import weight_of
from halflife.ops.recurrent import MOST_MAPS, Unconvolved, known_outputs, maps_of_norm, takes_map
from halflife.packing import Packing
from halflife.position import angles, spread
from halflife.precision import ROOMY, compute_dtype

Module = TypeVar("Module", bound=nn.Module)

_AS_THEY_ARE = nullcontext()


class RMSNorm(nn.RMSNorm):
    """`nn.RMSNorm` over the last axis."""

    pass_backend = "auto"  # see `set_backend`
    adds = True  # whether it takes the sum of two
    gate_kind = "none"  # of `maps_of_norm`

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
        size: channels D of `y, z [B, T, D]`, in `groups` equal groups, each with its own mean square.
        eps: added to the mean square.
    """

    pass_backend = "auto"  # see `set_backend`
    gate_kind = "silu_before"  # of `maps_of_norm`

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
            groups = fused.skipped(y, *skip or ()).unflatten(-1, (self.groups, -1))
            return F.rms_norm(groups, groups.shape[-1:], eps=self.eps).flatten(-2) * self.weight
        room = ROOMY[z.dtype]
        skip = None if skip is None else (skip[0], skip[1].to(room))
        if weight is not None and room == z.dtype:
            return fused.rms_norm_of_gated_linear(
                y, z, self.weight, self.groups, self.eps, skip, weight, self.pass_backend
            )
        y = fused.rms_norm_of_gated(y, z.to(room), self.weight, self.groups, self.eps, skip, self.pass_backend)
        y = y.half() if z.dtype == torch.float16 else y
        return y if weight is None else product(y, weight)


class NormBeforeGate(GatedRMSNorm):
    """`RMSNorm(y) ⊙ weight ⊙ silu(z)`, the output norm of Falcon-H1 with `mamba_norm_before_gate` and of Mamba-3."""

    gate_kind = "silu_after"

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, y: Tensor, z: Tensor | None = None, skip: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """As `GatedRMSNorm`, with the norm before the gate."""
        y = super().forward(y, None, skip)
        if z is None:
            return y
        y = fused.swiglu(z, y, self.pass_backend)
        return y.half() if z.dtype == torch.float16 else y


class GateWithoutNorm(nn.Module):
    """`y ⊙ silu(z)` in the place of `GatedRMSNorm`."""

    pass_backend = "auto"  # see `set_backend`
    gate_kind, weight, groups, eps = "silu_before", None, 1, 0.0

    def __init__(self, size: int, groups: int = 1, eps: float = 1e-5) -> None:
        super().__init__()

    def forward(self, y: Tensor, z: Tensor, skip: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """`y, z [B, T, D]`, and `skip` as in `GatedRMSNorm`."""
        y = fused.swiglu(z, y, self.pass_backend, skip)
        return y.half() if z.dtype == torch.float16 else y


OUTPUT_NORMS = {"after_gate": GatedRMSNorm, "before_gate": NormBeforeGate, "none": GateWithoutNorm}


def is_watched(*modules: nn.Module) -> bool:
    """Whether hooks or another `forward` see what modules give: those of FSDP2, of accelerate, of a user."""
    return any(is_hooked(part) or "forward" in vars(part) for part in modules)


def normed(
    norm: Any, x: Tensor, branch: Tensor | None, part: Any, *given: Any
) -> tuple[Tensor, Tensor, AbstractContextManager[None]]:
    """`x + branch` (None: x), its norm (None: itself), and a context for the `part` of a block that reads this norm.

    Of a token one kernel computes also those linear maps of the part that read its input (`maps_of_input`), which
    return what it computed inside the context. A part that reads mixtures alone (`Shifting`) may know these in the
    context, and the norm is then in no memory: its input is the sum. `given` are its state and packing.
    """
    if hasattr(part, "of_norm") and (made := part.of_norm(norm, x, branch, *given)) is not None:
        return made[-1], made[-1], part.knows(made[:-1])
    maps = _maps_of_input(part, norm, x) if takes_map(x) and not torch.compiler.is_compiling() else []
    weights = [module.weight for module in maps]
    weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
    if maps and takes_map(x, branch, weight, *weights):
        out, *rest = maps_of_norm(x, weight, eps, weights, branch=branch, keeps=norm is not None)
        total, n = rest[-1:] * 2 if norm is None else [x, *rest][-2:]
        return total, n, known_outputs(maps, n, out.split([len(weight) for weight in weights], -1))
    if norm is None or branch is None:
        total = x if branch is None else x + branch
        return total, total if norm is None else norm(total), _AS_THEY_ARE
    return *norm(x, branch), _AS_THEY_ARE


def _maps_of_input(part: nn.Module, norm: Any, x: Tensor) -> list[nn.Linear]:
    """The linear maps of a part that a kernel may compute beside the norm of x."""
    plain = norm is None or (type(norm) is RMSNorm and norm.pass_backend == "auto" and not is_watched(norm))
    if not plain or getattr(part, "pass_backend", "auto") != "auto":
        return []
    found: list[nn.Linear] = []
    for name in getattr(part, "maps_of_input", ()):
        try:
            module = attrgetter(name)(part)
        except AttributeError:  # an option that this part has not
            continue
        weight = None if module is None or is_watched(module) else weight_of(module)
        if module is not None and weight is not None and weight.dtype == x.dtype and weight.shape[1] == x.shape[-1]:
            found.append(module)
    return found[:MOST_MAPS]


def map_of_gated(norm: Any, y: Tensor, z: Tensor | None, out: nn.Module, dtype: torch.dtype) -> Tensor:
    """`out(norm(y, z))` of `y [B, T, D]` or `[B, T, H, V]` and `z [B, T, D]` or None; of a token by one kernel.

    The output of the norm is rounded for inputs of this `dtype`.
    """
    weight = None if norm.pass_backend != "auto" or is_watched(norm) else weight_of(out)
    given = [x for x in (z, norm.weight) if x is not None]
    if weight is not None and takes_map(y, *given, weight):
        groups = y.shape[2:].numel() // y.shape[-1] * getattr(norm, "groups", 1)
        options: dict[str, Any] = {"gate": z, "kind": norm.gate_kind, "groups": groups}
        return maps_of_norm(y.flatten(2), norm.weight, norm.eps, [weight], **options)[0]
    y = norm(y) if z is None else norm(y, z)
    return out(y.half() if dtype == torch.float16 else y)


# Functions of queries and keys, by their names in transformers (`ACT2FN`).
FEATURE_MAPS = {
    "relu": F.relu, "relu2": lambda x: F.relu(x).square(), "silu": F.silu, "gelu": F.gelu, "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
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

    def product(self, x: Tensor) -> Tensor | Product:
        """The same, of low rank as a product that is not computed yet."""
        weight = None if isinstance(self.down, nn.Identity) else weight_of(self.up, biased=True)
        return self(x) if weight is None else Product(self.down(x), weight, self.up.bias)


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
        self, x: Tensor, state: Tensor | None, packing: Packing, units: tuple[int, int] | None = None,
        splits: Sequence[int] | None = None, **token: Any,
    ) -> Any:  # fmt: skip
        """`x [B, T, D]` → `(y [B, T, D], state)`, or the parts of y; with `token`, fields of it, an `Unconvolved`."""
        if token:
            assert state is not None
            return Unconvolved(x, self.weight, self.bias, state, **token)
        y, state = causal_conv1d(
            x, self.weight, self.bias, initial_state=state, output_final_state=True, cu_seqlens=packing,
            backend=self.pass_backend, unit=units, splits=splits,
        )  # fmt: skip
        assert state is not None
        return y, state


ROPE_BASE = 10_000.0  # of rotary frequencies


def rotary(
    q: Tensor, k: Tensor, position: Tensor, base: float = ROPE_BASE, backend: str = "auto",
    kept: dict[Any, Any] | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`rope` of queries and keys `[B, T, H, K]`, with the angles computed once.

    `kept` remembers them for other layers with the same tensor of positions (`Packing.kept`).
    """
    cos, sin = turns(q, position, base, {} if kept is None else kept)
    return fused.rotate(q, cos, sin, backend), fused.rotate(k, cos, sin, backend)


def turns(q: Tensor, position: Tensor, base: float, kept: dict[Any, Any]) -> tuple[Tensor, Tensor]:
    """cos and sin `[T, K / 2]` or `[B, T, K / 2]` of the angles of `q [B, T, H, K]`, see `rotary`."""
    half = q.shape[-1] // 2
    key = ("rotary", base, half, compute_dtype(q), q.device)
    if key not in kept or kept[key][0] is not position:
        angle = angles(position, base, spread(half, half, q.device), compute_dtype(q))
        kept[key] = position, angle.cos(), angle.sin()
    return kept[key][1:]


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
