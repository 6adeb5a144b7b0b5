"""One call of spectral Koopman attention: its tensors and settings."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from halflife.ops.arguments import check_chunk_size, check_number, check_tensors, is_transformed
from halflife.ops.call import check_cu_seqlens
from halflife.ops.koopman.state import KoopmanState
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
    cu_seqlens: Tensor | None = None
    operator: str = "whitened"

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

    @property
    def num_sequences(self) -> int:
        """Sequences N: B, or the number of packed sequences."""
        return self.k.shape[0] if self.cu_seqlens is None else len(self.cu_seqlens) - 1

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
        check_tensors(q=self.q, k=self.k, v=self.v, **sums, **tensors)
        for name in settings.keys() - tensors.keys():
            check_number(name, settings[name])
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
        if mode != "chunk" and self.cu_seqlens is not None:
            raise ValueError(f"packed sequences (cu_seqlens) are for mode 'chunk'; got {mode!r}")
        if isinstance(self.mix, Tensor) and self.mix.ndim == 2 and self.mix.shape != (self.power + 1, k.shape[2]):
            raise ValueError(
                f"mix of every power must be [K + 1, H] = {(self.power + 1, k.shape[2])}; got {tuple(self.mix.shape)}"
            )
        check_cu_seqlens(self.cu_seqlens, *k.shape[:2])
        check_settings(self.ridge, self.power, self.chunk_size, self.refresh, self.normalization, mode, self.operator)


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
    if not (power >= 0 and ridge > 0):
        raise ValueError(f"need power ≥ 0 and ridge > 0; got {power}, {ridge}")
