"""One call of spectral Koopman attention: its tensors and settings."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from halflife.ops.arguments import check_chunk_size, check_decay, check_number, is_transformed, may_branch
from halflife.ops.koopman.decays import strength_root
from halflife.ops.koopman.state import KoopmanState
from halflife.ops.spec import Shape, define
from halflife.packing import Packing
from halflife.registry import check_choice

MODES = ("chunk", "prefix", "masked")
REFRESHES = ("chunk", "token")
NORMALIZATIONS = ("causal", "sequence", "paper", "trace")
OPERATORS = ("whitened", "main_text")

SPEC = define(
    "koopman_attention", q="B S H R", k="B T H R", v="B T H P", gamma="number | 1 | H", mix="number | 1 | H | J+1 H",
    g="B T H | B T H R | None", beta="B T H | None", mask="any B T | None",
)  # fmt: skip


@dataclass(frozen=True)
class KoopmanCall:
    """The arguments of `koopman_attention`, which describes them, except for the choice of a backend."""

    q: Tensor
    k: Tensor
    v: Tensor
    gamma: float | Tensor = 1.0
    mix: float | Tensor = 1.0
    ridge: float = 1e-3
    power: int = 2
    mode: str = "chunk"
    mask: Tensor | None = None
    chunk_size: int = 64
    refresh: str = "chunk"
    normalization: str = "causal"
    initial_state: KoopmanState | None = None
    cu_seqlens: Tensor | Packing | None = None
    operator: str = "whitened"
    g: Tensor | None = None
    beta: Tensor | None = None

    @property
    def tokens_per_operator(self) -> int:
        """Tokens that share one operator: `chunk_size`, or 1 under `refresh="token"`."""
        return 1 if self.refresh == "token" else self.chunk_size

    @property
    def packing(self) -> Packing:
        """Where the sequences of the keys lie. `with_weights` keeps it, so that boundaries are read once."""
        return Packing.of(self.cu_seqlens, *self.k.shape[:2])

    @property
    def decays(self) -> int:
        """The number of log-decays per head: 0 without g, 1, or R."""
        return 0 if self.g is None else 1 if self.g.ndim == 3 else self.g.shape[-1]

    def with_weights(self, dtype: torch.dtype) -> KoopmanCall:
        """The call with keys and values times √β, without β, and with `g [B, T, H, 1 or R]` in `dtype`."""
        k, v, g = self.k, self.v, self.g
        if self.beta is not None:
            root = strength_root(self.beta.to(dtype)).unsqueeze(-1)
            k, v = k.to(dtype) * root, v.to(dtype) * root
        if g is not None:
            g = g.to(dtype) if g.ndim == 4 else g.to(dtype).unsqueeze(-1)
        return replace(self, k=k, v=v, g=g, beta=None, cu_seqlens=self.packing)

    def check(self) -> None:
        """Checks all arguments; see `Spec.check`."""
        q, k, mode = self.q, self.k, self.mode
        tensors = {name: getattr(self, name) for name in SPEC.tensors}
        sizes, _ = SPEC.check(tensors)
        for name in ("gamma", "mix", "ridge"):
            if not isinstance(getattr(self, name), Tensor):
                check_number(name, getattr(self, name))
        if self.initial_state is not None and not isinstance(self.initial_state, dict):
            raise TypeError(f"initial_state must be the dict that an earlier call returned; got {self.initial_state!r}")
        for name, x in (self.initial_state or {}).items():
            Shape("any ..." if name == "pending" else "...").check(name, x, {}, k.device)
        if is_transformed():
            raise ValueError("koopman_attention has no rules for torch.func and forward-mode derivatives")
        if mode == "chunk" and q.shape[1] != k.shape[1]:
            raise ValueError(f"in mode 'chunk' queries and keys have one length; got {q.shape[1]} and {k.shape[1]}")
        if mode == "masked" and self.mask is None:
            raise ValueError("mode 'masked' needs a mask")
        packed = self.cu_seqlens.cu_seqlens if isinstance(self.cu_seqlens, Packing) else self.cu_seqlens
        if mode != "chunk" and packed is not None:
            raise ValueError(f"packed sequences (cu_seqlens) are for mode 'chunk'; got {mode!r}")
        check_decay("g", self.g, ("koopman_attention", "g"))
        if self.beta is not None and may_branch(self.beta.device) and (self.beta < 0).any():
            raise ValueError(f"beta must be numbers ≥ 0; the smallest is {self.beta.min():.3g}")
        check_settings(self.ridge, self.power, self.chunk_size, self.refresh, self.normalization, mode, self.operator)
        if sizes.get("J", self.power) != self.power:
            expected = f"[K + 1, H] = [{self.power + 1}, {sizes['H']}]"
            raise ValueError(f"mix must be a number, [H] or {expected}; got {[sizes['J'] + 1, sizes['H']]}")


def check_settings(
    ridge: float, power: int, chunk_size: int, refresh: str, normalization: str, mode: str = "chunk",
    operator: str = "whitened",
) -> None:  # fmt: skip
    """Raises a ValueError for a name or a number that `koopman_attention` does not take."""
    for kind, name, choices in (
        ("mode", mode, MODES), ("refresh", refresh, REFRESHES), ("normalization", normalization, NORMALIZATIONS),
        ("operator", operator, OPERATORS),
    ):  # fmt: skip
        check_choice(kind, name, choices)
    check_chunk_size(chunk_size)
    if isinstance(power, bool) or not isinstance(power, int) or power < 0:
        raise ValueError(f"power must be an integer of at least 0; got {power!r}")
    if not ridge > 0:
        raise ValueError(f"ridge must be greater than 0; got {ridge}")
