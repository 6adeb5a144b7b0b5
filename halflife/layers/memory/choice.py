"""The memory of a layer: one state, or several states that take its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from halflife.layers.memory.gate_rank import GateRank
from halflife.layers.memory.log_linear import LogLinear
from halflife.layers.mixer import State
from halflife.layers.options import Place
from halflife.ops import delta_rule, linear_attention
from halflife.ops.gate_rank import check_reset_law
from halflife.ops.laws import Unevaluated
from halflife.ops.laws.gates import gates
from halflife.ops.recurrent import Unconvolved, takes_token
from halflife.packing import Packing
from halflife.precision import ROOMY
from halflife.registry import check_options

# (x, q, k, v, g, beta, state, packing, **options) → (o, state)
Memory = Callable[..., tuple[Tensor, State]]

KINDS: dict[str, type[nn.Module]] = {"gate_rank": GateRank, "log_linear": LogLinear}
UPDATES = {"gate_rank": ("linear", "delta"), "log_linear": ("linear",)}  # with which the kinds work


@dataclass(frozen=True, kw_only=True)
class OneOrGateRank:
    """One state, or GateRank's two.

    Attributes:
        gate_rank: options of `GateRank`, which adds a slow state, or None.
    """

    gate_rank: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for kind, options in self.given.items():
            check_options(kind, KINDS[kind], options, ["hidden_size", "num_heads"])
        if len(self.given) > 1:
            raise ValueError(f"a mixer has one kind of states; got {' and '.join(self.given)}")

    @property
    def given(self) -> dict[str, Mapping[str, Any]]:
        """The options of the chosen kind, by its name; empty for one state."""
        return {kind: options for kind in KINDS if (options := getattr(self, kind, None)) is not None}


@dataclass(frozen=True, kw_only=True)
class MemoryChoice(OneOrGateRank):
    """One state, GateRank's two, or log-linear attention's.

    Attributes:
        gate_rank: options of `GateRank`, which adds a slow state, or None. It needs a scalar decay, and the linear or
            the delta update.
        log_linear: options of `LogLinear`, which keeps a state for every power of two of the distance, or None. It
            needs a scalar decay, and the linear update.
    """

    log_linear: Mapping[str, Any] | None = None


class HasMemory(nn.Module):
    """A layer whose `memory` runs its update. Several states are a child with the name of their kind."""

    memory_kind: str | None = None
    backend: str

    def add_memory(
        self, choice: OneOrGateRank, place: Place, *, decay: str | None, granularity: str = "scalar",
        update: str = "linear",
    ) -> None:  # fmt: skip
        """Make the memory; a ValueError if the decay or the update of the layer does not fit the kind of states."""
        for kind, options in choice.given.items():
            if decay is None or granularity != "scalar" or update not in UPDATES[kind]:
                raise ValueError(
                    f"{kind} needs a scalar decay and the {' or the '.join(UPDATES[kind])} update; got "
                    f"decay {decay!r}, granularity {granularity!r}, update {update!r}"
                )
            if kind == "gate_rank":
                check_reset_law(options.get("reset_law", "mask"), delta=update == "delta")
            self.memory_kind = kind
            self.add_module(kind, KINDS[kind](place.hidden_size, place.num_heads, **options))

    @property
    def memory(self) -> Memory:
        """Applies the linear (beta None) or the delta update; returns `o [B, T, H, V]` and the new states by name."""
        return one_state if self.memory_kind is None else self.get_submodule(self.memory_kind)

    def joins(self, decay: Any) -> bool:
        """Whether the memory takes `Unevaluated` log-decays of a decay, or of what wraps it (FSDP), or None.

        One pass computes them with the other gates.
        """
        slow = getattr(self.memory, "slow_gate", None)
        known = self.memory_kind is None or (slow is not None and slow.leaves_law and slow.pass_backend == "auto")
        return known and decay is not None and decay.passes_law

    def decodes(self, x: Tensor, state: State, packing: Packing) -> bool:
        """Whether the memory can take an `Unconvolved` token, from channels `x [B, 1, D]`, in the place of queries."""
        if packing.length != 1 or packing.cu_seqlens is not None or "memory" not in state:
            return False
        known = self.memory_kind is None or getattr(self.memory, "reset_law", "") == "mask"
        return known and self.backend in ("auto", "triton") and takes_token(x, state.get("conv"), state["memory"])


def one_state(
    x: Tensor, q: Tensor | Unconvolved, k: Tensor | None, v: Tensor | None, g: Any, beta: Tensor | None,
    state: State, packing: Packing, **options: Any,
) -> tuple[Tensor, State]:  # fmt: skip
    """The memory of one state, `memory [N, H, K, V]`. The outputs are float32 for values in float16.

    Of `Unevaluated` log-decays beta are the logits of writing strengths.
    """
    if isinstance(q, Unconvolved):
        return q.step(g, None, beta, (state["memory"], None), options["scale"], ROOMY[x.dtype])
    assert k is not None
    assert v is not None
    if isinstance(g, Unevaluated):
        g, _, beta, *_ = gates(g, beta)
    v = v.to(ROOMY[v.dtype])
    options |= {"initial_state": state.get("memory"), "output_final_state": True, "cu_seqlens": packing}
    if beta is None:
        o, memory = linear_attention(q, k, v, g, **options)
    else:
        o, memory = delta_rule(q, k, v, beta, g, **options)
    assert memory is not None
    return o, {"memory": memory}
