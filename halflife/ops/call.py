"""One call of an op: its tensors and settings, checked once and passed to the implementation as a whole."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from halflife.ops.arguments import (
    check_chunk_size,
    check_decay,
    check_number,
    check_tensors,
    is_transformed,
)
from halflife.packing import Packing
from halflife.precision import compute_dtype


@dataclass(frozen=True)
class OpCall:
    """The arguments of an op that reads and writes a state `[N, H, K, V]`, the same for every implementation.

    An op leaves the tensors that it does not have at None.

    Attributes:
        op: name of the op.
        q, k: queries and keys `[B, T, H, K]`.
        v: values `[B, T, H, V]`.
        g: log-decay ≤ 0, `[B, T, H]` or `[B, T, H, K]`, or None for no decay. In GateRank it is the log-decay of the
            fast state.
        beta: writing strength of the delta rule `[B, T, H]`.
        a, b: vectors of DPLR's rank-one correction `[B, T, H, K]`.
        g_slow: log-decay of GateRank's slow state `[B, T, H]`.
        scale: factor of the output, or None (see `output_scale`).
        initial_state: `[N, H, num_states · K, V]`, or None for zeros.
        cu_seqlens: boundaries `[N + 1]` of packed sequences (then B = 1), their `Packing`, or None for rows.
        chunk_size: tokens a chunk, which implementations may round.
    """

    op: str
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None = None
    beta: Tensor | None = None
    a: Tensor | None = None
    b: Tensor | None = None
    g_slow: Tensor | None = None
    scale: float | None = None
    initial_state: Tensor | None = None
    cu_seqlens: Tensor | Packing | None = None
    chunk_size: int = 64

    @property
    def gates(self) -> list[Tensor]:
        """The tensors beside q, k, v, a and b: writing strengths and log-decays."""
        return [x for x in (self.beta, self.g_slow, self.g) if x is not None]

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that have one row a token."""
        return [x for x in (self.q, self.k, self.v, self.a, self.b, *self.gates) if x is not None]

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.q.device

    @property
    def output_scale(self) -> float:
        """The factor of the output: `scale`, or `K ** -0.5` where it is None."""
        return self.q.shape[-1] ** -0.5 if self.scale is None else self.scale

    @property
    def num_states(self) -> int:
        """States a head: 2 in GateRank (the fast one above the slow one), else 1."""
        return 1 if self.g_slow is None else 2

    @cached_property
    def packing(self) -> Packing:
        """Where the sequences lie."""
        return Packing.of(self.cu_seqlens, *self.q.shape[:2])

    @property
    def is_token(self) -> bool:
        """Whether this is one token of each sequence, as while decoding."""
        return self.q.shape[1] == 1 and self.packing.cu_seqlens is None

    @property
    def differentiated(self) -> bool:
        """Whether autograd will ask for a gradient."""
        tensors = self.tensors if self.initial_state is None else [*self.tensors, self.initial_state]
        return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)

    @property
    def is_transformed(self) -> bool:
        """Whether torch.func or forward-mode differentiation sees the call."""
        return is_transformed()

    def first_state(self, dtype: torch.dtype | None = None) -> Tensor:
        """The state before the first token `[N, H, num_states · K, V]`, in `dtype` (None: the compute dtype)."""
        dtype = compute_dtype(self.q) if dtype is None else dtype
        if self.initial_state is not None:
            return self.initial_state.to(dtype)
        heads, key = self.q.shape[2:]
        return self.q.new_zeros(self.packing.num_sequences, heads, self.num_states * key, self.v.shape[-1], dtype=dtype)

    def with_wide_inputs(self, initial_state: Tensor | None = None) -> OpCall:
        """The call in float64 if the state before the first token is float64, so that the state stays so."""
        initial = self.initial_state if initial_state is None else initial_state
        if initial is None or initial.dtype != torch.float64 or self.q.dtype == torch.float64:
            return self
        names = ("q", "k", "v", "g", "beta", "a", "b", "g_slow")
        tensors = {name: x.double() for name in names if (x := getattr(self, name)) is not None}
        return replace(self, cu_seqlens=self.packing, **tensors)

    def check(self) -> None:
        """Checks all tensors.

        Raises:
            TypeError: an argument is no tensor.
            ValueError: a shape, dtype or device does not fit, or a log-decay is positive; the message says what would.
        """
        fast = "g" if self.g_slow is None else "g_fast"
        check_tensors(
            q=self.q, k=self.k, v=self.v, beta=self.beta, a=self.a, b=self.b, g_slow=self.g_slow, **{fast: self.g},
            initial_state=self.initial_state,
        )  # fmt: skip
        check_number("scale", self.scale)
        self._check_shapes()
        for name, log_decay in ((fast, self.g), ("g_slow", self.g_slow)):
            check_decay(name, log_decay, (self.op, name))

    def _check_shapes(self) -> None:
        q, k, v, g = self.q, self.k, self.v, self.g
        if q.ndim != 4 or k.shape != q.shape:
            raise ValueError(f"q and k must both be [B, T, H, K]; got {tuple(q.shape)} and {tuple(k.shape)}")
        vector = tuple(q.shape)
        scalar = vector[:3]
        if v.ndim != 4 or v.shape[:3] != scalar:
            raise ValueError(f"v must be [B, T, H, V] with B, T, H = {scalar}; got {tuple(v.shape)}")
        if not q.shape[-1] or not v.shape[-1]:
            raise ValueError(f"a head needs at least one channel; got K = {q.shape[-1]} and V = {v.shape[-1]}")
        check_chunk_size(self.chunk_size)
        if g is not None and self.g_slow is None and g.shape not in (scalar, vector):
            raise ValueError(
                f"g must be None, [B, T, H] = {scalar} (scalar) or [B, T, H, K] = {vector} (vector); "
                f"got {tuple(g.shape)}"
            )
        g_fast = None if self.g_slow is None else g
        for name, x in (("beta", self.beta), ("g_slow", self.g_slow), ("g_fast", g_fast)):
            if x is not None and x.shape != scalar:
                raise ValueError(f"{name} must be [B, T, H] = {scalar}; got {tuple(x.shape)}")
        for name, x in (("a", self.a), ("b", self.b)):
            if x is not None and x.shape != vector:
                raise ValueError(f"{name} must be [B, T, H, K] = {vector}; got {tuple(x.shape)}")
        sequences = self.packing.num_sequences
        if self.initial_state is not None:
            expected = (sequences, scalar[2], self.num_states * vector[3], v.shape[-1])
            if self.initial_state.shape != expected:
                expected, got = (
                    (*shape[:2], shape[2] // self.num_states, *shape[3:]) if len(shape) > 2 else shape
                    for shape in (expected, tuple(self.initial_state.shape))
                )
                raise ValueError(f"initial_state must be [sequences, H, K, V] = {expected}; got {got}")
