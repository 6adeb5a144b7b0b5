"""One call of an op: its tensors and settings, checked once and passed to the implementation as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from halflife.ops.arguments import check_chunk_size, check_decay, check_number
from halflife.ops.spec import OPS, Spec
from halflife.packing import Packing
from halflife.precision import compute_dtype


class Call:
    """The arguments of an op, the same for every implementation: `call["q"]` is the tensor q, or None.

    Attributes:
        spec, packing: the op, and where the sequences lie.
        tensors, sizes: name → tensor, or None where it is absent; letter of `halflife.shapes` → number.
        state: the states before the first token, or None for zeros.
        scale: factor of the output, or None (see `output_scale`).
        chunk_size: tokens per chunk, which implementations may round.
        options: other settings of the op.
        is_token: whether this is one token of each sequence, as while decoding.
        output_dtype: the option `dtype`, or the dtype of v, or of the first tensor in an op without v.
    """

    __slots__ = (
        "chunk_size", "device", "is_token", "op", "options", "output_dtype", "packing", "scale", "sizes", "spec",
        "state", "tensors",
    )  # fmt: skip

    def __init__(
        self, spec: Spec, tensors: Mapping[str, Any], sizes: dict[str, int], device: torch.device,
        state: tuple[Tensor, ...] | None, packing: Packing, scale: float | None, chunk_size: int,
        options: Mapping[str, Any],
    ) -> None:  # fmt: skip
        self.spec, self.tensors, self.sizes, self.device, self.state = spec, tensors, sizes, device, state
        self.packing, self.scale, self.chunk_size, self.options = packing, scale, chunk_size, options
        self.op = spec.name
        self.is_token = sizes["T"] == 1 and packing.cu_seqlens is None
        first: Tensor = tensors["v"] if "v" in tensors else next(iter(tensors.values()))
        self.output_dtype: torch.dtype = options.get("dtype") or first.dtype

    @classmethod
    def of(
        cls, op: str, tensors: Mapping[str, Any], initial_state: Any = None, cu_seqlens: Any = None, *,
        scale: float | None = None, chunk_size: int = 64, **options: Any,
    ) -> Call:  # fmt: skip
        """Check the arguments of an op; see `Spec.check` and `arguments.check_decay`."""
        spec = OPS[op]
        sizes, device = spec.check(tensors)
        if scale is not None:
            check_number("scale", scale)
        if type(chunk_size) is not int or chunk_size < 1:
            check_chunk_size(chunk_size)
        packing = Packing.of(cu_seqlens, sizes["B"], sizes["T"])
        if packing.cu_seqlens is not None:
            packing = packing.to(device)
        sizes["N"] = packing.num_sequences
        state = spec.check_state(initial_state, sizes, device) if spec.state else initial_state
        for name in spec.log_decays:
            check_decay(name, tensors[name], (op, name))
        return cls(spec, tensors, sizes, device, state, packing, scale, chunk_size, options)

    def __getitem__(self, name: str) -> Any:
        return self.tensors[name]

    def get(self, name: str) -> Any:
        """The tensor of this name, or None if it is absent or the op has none."""
        return self.tensors.get(name)

    def with_tensors(self, state: tuple[Tensor, ...] | None = None, **tensors: Any) -> Call:
        """This call with other tensors of the same shapes, which are not checked."""
        state = self.state if state is None else state
        return Call(
            self.spec, {**self.tensors, **tensors}, self.sizes, self.device, state, self.packing, self.scale,
            self.chunk_size, self.options,
        )  # fmt: skip

    @property
    def decay(self) -> Tensor | None:
        """The log-decay of the state that tokens are written into: g, or GateRank's g_fast."""
        return self.tensors.get("g_fast", self.tensors.get("g"))

    @property
    def output_scale(self) -> float:
        """The factor of the output: `scale`, or `K ** -0.5` where it is None."""
        return self.sizes["K"] ** -0.5 if self.scale is None else self.scale

    @property
    def num_states(self) -> int:
        """States per head: 2 in GateRank (the fast one above the slow one), else 1."""
        return len(self.spec.state)

    @property
    def differentiated(self) -> bool:
        """Whether autograd will ask for a gradient."""
        if not torch.is_grad_enabled():
            return False
        return True in [x.requires_grad for x in (*self.tensors.values(), *(self.state or ())) if isinstance(x, Tensor)]

    def first_states(self, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
        """The states before the first token, in `dtype` (None: the compute dtype)."""
        first = next(iter(self.tensors.values()))
        dtype = compute_dtype(first) if dtype is None else dtype
        if self.state is not None:
            return tuple([x.to(dtype) if x.is_floating_point() else x.long() for x in self.state])
        return tuple([
            first.new_zeros(shape.sizes(self.sizes), dtype=torch.long if shape.dtype == "int" else dtype)
            for shape in self.spec.state.values()
        ])  # fmt: skip

    def first_state(self, dtype: torch.dtype | None = None) -> Tensor:
        """The state before the first token, `[N, H, K, V]`; those of GateRank above each other, `[N, H, 2K, V]`."""
        states = self.first_states(dtype)
        return states[0] if len(states) == 1 else torch.cat(states, -2)

    def widened(self) -> Call:
        """The call in float64 if a state before the first token is float64, so that the state stays so."""
        if self.state is None or not self.spec.wide or torch.float64 not in [x.dtype for x in self.state]:
            return self
        if next(iter(self.tensors.values())).dtype == torch.float64:
            return self
        return self.with_tensors(**{n: x.double() for n, x in self.tensors.items() if x is not None})
