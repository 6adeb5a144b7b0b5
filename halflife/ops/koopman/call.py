"""One call of spectral Koopman attention: its tensors and settings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from halflife.ops.arguments import check_chunk_size, check_decay, check_number, check_tensors, is_transformed
from halflife.ops.koopman.decays import strength_root
from halflife.ops.koopman.state import KoopmanState
from halflife.packing import Packing
from halflife.registry import unknown

MODES = ("chunk", "prefix", "masked")
REFRESHES = ("chunk", "token")
NORMALIZATIONS = ("causal", "sequence", "paper", "trace")
OPERATORS = ("whitened", "main_text")


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
    def needs_plain_torch(self) -> bool:
        """Whether the call has a form that only the implementations in plain torch have."""
        return (
            self.operator != "whitened"
            or self.normalization in ("paper", "trace")
            or (isinstance(self.mix, Tensor) and self.mix.ndim == 2)
        )

    @property
    def tokens_per_operator(self) -> int:
        """Tokens that share one operator: `chunk_size`, or 1 under `refresh="token"`."""
        return 1 if self.refresh == "token" else self.chunk_size

    @cached_property
    def packing(self) -> Packing:
        """Where the sequences of the keys lie."""
        return Packing.of(self.cu_seqlens, *self.k.shape[:2])

    @property
    def decays(self) -> int:
        """The number of log-decays a head: 0 without g, 1, or R."""
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
        """Checks all arguments.

        Raises:
            TypeError: an argument is no tensor.
            ValueError: a shape, dtype, device, name or number does not fit.
        """
        if self.initial_state is not None and not isinstance(self.initial_state, dict):
            raise TypeError(f"initial_state must be the dict that an earlier call returned; got {self.initial_state!r}")
        sums = {name: x for name, x in (self.initial_state or {}).items() if name != "pending"}
        settings = {"gamma": self.gamma, "mix": self.mix}
        tensors = {name: x for name, x in settings.items() if isinstance(x, Tensor)}
        check_tensors(q=self.q, k=self.k, v=self.v, g=self.g, beta=self.beta, **sums, **tensors)
        for name in settings.keys() - tensors.keys():
            check_number(name, settings[name])
        check_number("ridge", self.ridge)
        if is_transformed():
            raise ValueError("koopman_attention has no rules for torch.func and forward-mode derivatives")
        if self.k.device.type == "meta":
            raise ValueError("koopman_attention needs the values of its keys, which the meta device does not have")
        q, k, v, mode, mask = self.q, self.k, self.v, self.mode, self.mask
        if q.ndim != 4 or k.ndim != 4 or (q.shape[0], *q.shape[2:]) != (k.shape[0], *k.shape[2:]):
            raise ValueError(f"q and k must be [B, T, H, R]; got {tuple(q.shape)} and {tuple(k.shape)}")
        if v.ndim != 4 or v.shape[:3] != k.shape[:3]:
            raise ValueError(f"v must be [B, T, H, P] with B, T, H = {tuple(k.shape[:3])}; got {tuple(v.shape)}")
        if not k.shape[-1] or not v.shape[-1]:
            raise ValueError(f"a head needs at least one channel; got R = {k.shape[-1]} and P = {v.shape[-1]}")
        if mode == "chunk" and q.shape[1] != k.shape[1]:
            raise ValueError(f"in mode 'chunk' queries and keys have one length; got {q.shape[1]} and {k.shape[1]}")
        if mask is not None and mask.shape != k.shape[:2]:
            raise ValueError(f"mask must be [B, T] = {tuple(k.shape[:2])}; got {tuple(mask.shape)}")
        if mode == "masked" and mask is None:
            raise ValueError("mode 'masked' needs a mask")
        if mode != "chunk" and self.packing.cu_seqlens is not None:
            raise ValueError(f"packed sequences (cu_seqlens) are for mode 'chunk'; got {mode!r}")
        self._check_weights()
        check_settings(self.ridge, self.power, self.chunk_size, self.refresh, self.normalization, mode, self.operator)
        self._check_filter()

    def _check_weights(self) -> None:
        """Checks the log-decays and the strengths."""
        scalar, vector = self.k.shape[:3], self.k.shape
        if self.g is not None and self.g.shape not in (scalar, vector):
            raise ValueError(
                f"g must be None, [B, T, H] = {tuple(scalar)} or [B, T, H, R] = {tuple(vector)}; "
                f"got {tuple(self.g.shape)}"
            )
        check_decay("g", self.g, ("koopman_attention", "g"))
        if self.beta is not None and (self.beta.shape != scalar or _has_negative(self.beta)):
            raise ValueError(f"beta must be numbers ≥ 0, [B, T, H] = {tuple(scalar)}; got {tuple(self.beta.shape)}")

    def _check_filter(self) -> None:
        """Checks γ and μ where they are tensors; a wrong shape would broadcast."""
        heads, power = self.k.shape[2], self.power
        one_a_head, one_a_power = [(), (1,), (heads,)], (power + 1, heads)
        if isinstance(self.gamma, Tensor) and self.gamma.shape not in one_a_head:
            raise ValueError(f"gamma must be a number or [H] = {(heads,)}; got {tuple(self.gamma.shape)}")
        if isinstance(self.mix, Tensor) and self.mix.shape not in [*one_a_head, one_a_power]:
            raise ValueError(
                f"mix must be a number, [H] = {(heads,)} or [K + 1, H] = {one_a_power}; got {tuple(self.mix.shape)}"
            )


def _has_negative(x: Tensor) -> bool:
    """Whether a number is negative, on a CPU. An accelerator would wait for the answer, and a graph cannot branch."""
    return x.device.type == "cpu" and not torch.compiler.is_exporting() and bool((x < 0).any())


def check_settings(
    ridge: float, power: int, chunk_size: int, refresh: str, normalization: str, mode: str = "chunk",
    operator: str = "whitened",
) -> None:  # fmt: skip
    """Raises a ValueError for a name or a number that `koopman_attention` does not take."""
    for kind, name, choices in (
        ("mode", mode, MODES), ("refresh", refresh, REFRESHES), ("normalization", normalization, NORMALIZATIONS),
        ("operator", operator, OPERATORS),
    ):  # fmt: skip
        if name not in choices:
            raise unknown(kind, name, list(choices))
    check_chunk_size(chunk_size)
    if isinstance(power, bool) or not isinstance(power, int) or power < 0:
        raise ValueError(f"power must be an integer of at least 0; got {power!r}")
    if not ridge > 0:
        raise ValueError(f"ridge must be greater than 0; got {ridge}")
