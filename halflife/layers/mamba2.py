"""Mamba-2's layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from halflife.decay import DecayParts
from halflife.layers.memory.choice import HasMemory, MemoryChoice
from halflife.layers.mixer import LAYERS, Mixer, Shared, State, pass_features
from halflife.layers.options import Place, Run, StepDecay, check_gain
from halflife.layers.parts import OUTPUT_NORMS, GatedRMSNorm, ShortConv, is_watched, map_of_gated
from halflife.ops.backends.dispatch import add_skip
from halflife.ops.backends.split import split
from halflife.ops.linear import weight_of
from halflife.packing import Packing
from halflife.precision import Float32Module
from halflife.registry import check_choice


class Skip(Float32Module):
    """`y + D ⊙ x` with one D per head, which starts at 1."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.D = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.D)

    def forward(
        self, y: Tensor | None = None, x: Tensor | None = None, norm: Callable[..., Tensor] | None = None,
        run: Callable[[Tensor], Any] | None = None,
    ) -> Any:  # fmt: skip
        """`y + D ⊙ x` for `y, x [B, T, H, V]`, of which `norm(y, skip=(D, x))` may take the parts.

        With `run` it returns `run(D)`, for an op that adds the product. D `[H]` itself may be freed after it (FSDP).
        """
        if run is not None:
            return run(self.D)
        assert y is not None
        assert x is not None
        if norm is not None:
            return norm(y, skip=(self.D, x))
        return add_skip(y, self.D, x)


@LAYERS.add("mamba2")
class Mamba2(HasMemory, Mixer):
    """Mamba-2 (Dao & Gu 2024): linear attention with key B, query C, value Δx and decay e^{−e^A Δ}.

    `[z, xBC, f] = x W`, and xBC goes through a short convolution. Then `S_t = e^{g_t} S_{t−1} + B_t (Δ_t x_t)ᵀ` and
    `y_t = S_tᵀ C_t + D x_t`. The output is `RMSNorm(y ⊙ silu(z)) W_o`. Groups of heads share B and C.
    `decay_options={"min_step": …, "max_step": …}` limits Δ.

    Args:
        expand: inner width divided by hidden_size.
        head_dim: V, channels per head; None means expand · hidden_size / H.
        state_size: K, rows of the state ("d_state").
        num_groups: number of groups of heads that share B and C; it must divide H.
        conv_size: taps of the short convolution.
        stretch_gain: whether PoST stretches Δ in the input Δ x as in the decay, so that the stationary size of the
            state does not grow with the position. The paper leaves the input alone (§5.2).
        output_norm: "after_gate"; "before_gate", `RMSNorm(y) ⊙ silu(z)`; or "none", `y ⊙ silu(z)` (Falcon-H1 has both).
        norm_per_head: whether that norm takes each head alone. By default it takes all heads of a group together, so
            that a head whose state grows shrinks the others.
        norm_eps: eps of that norm.
        share_features: whether later layers may read C, B and x (`features` of SKA).

    Raises:
        ValueError: a number of heads or groups does not divide, the decay has no step size, the norm is unknown, or
            `stretch_gain` is given without PoST.
    """

    maps_of_input = ("in_proj", "gate_rank.proj")

    def __init__(
        self,
        place: Place,
        decay: StepDecay,
        memory: MemoryChoice,
        run: Run,
        *,
        expand: int = 2,
        head_dim: int | None = None,
        state_size: int = 128,
        num_groups: int = 1,
        conv_size: int = 4,
        stretch_gain: bool = False,
        output_norm: str = "after_gate",
        norm_per_head: bool = False,
        norm_eps: float = 1e-5,
        share_features: bool = False,
    ) -> None:
        super().__init__()
        self.share_features = share_features
        if stretch_gain:
            check_gain(decay.post, delta=False)
        num_heads = place.num_heads
        if num_heads % num_groups:
            raise ValueError(f"num_groups must divide num_heads; got {num_groups} and {num_heads}")
        self.num_heads, self.num_groups, self.state_size = num_heads, num_groups, state_size
        self.head_dim = head_dim or place.head_size(expand)
        self.chunk_size, self.backend, self.stretch_gain = run.chunk_size, run.backend, stretch_gain
        inner, shared = num_heads * self.head_dim, num_groups * state_size
        self.splits = [inner, inner + 2 * shared, num_heads]
        self.conv_splits = [inner, shared, shared]
        self.in_proj = nn.Linear(place.hidden_size, sum(self.splits), bias=False)
        self.conv = ShortConv(sum(self.conv_splits), conv_size, bias=True)
        self.decay = decay.build(place, head_dim=state_size)
        self.add_memory(memory, place, decay=decay.decay)
        self.skip = Skip(num_heads)
        check_choice("output_norm", output_norm, OUTPUT_NORMS)
        self.norm = OUTPUT_NORMS[output_norm](inner, num_heads if norm_per_head else num_groups, norm_eps)
        self.out_proj = nn.Linear(inner, place.hidden_size, bias=False)

    def mix(self, x: Tensor, state: State, packing: Packing, shared: Shared | None) -> tuple[Tensor, State]:
        position = packing.positions(state.get("position"), x.device)
        projected = self.in_proj(x)  # on a CPU `split` would do the same by one call more, at each token
        z, xbc, f = projected.split(self.splits, -1) if x.is_cpu else split(projected, self.splits)
        if not x.is_cpu and not self.share_features and self.decodes(xbc, state, packing):
            y, new = self._token(x, xbc, f, position, state, packing)
            return map_of_gated(self.norm, y.flatten(-2), z, self.out_proj, z.dtype), new
        (values, key, query), conv = self.conv(xbc, state.get("conv"), packing, splits=self.conv_splits)
        values = values.unflatten(-1, (self.num_heads, self.head_dim))
        q, k = query.unflatten(-1, (self.num_groups, -1)), key.unflatten(-1, (self.num_groups, -1))
        if self.share_features:
            pass_features(shared, q, k, values)
        options: dict[str, Any] = {"scale": 1, "chunk_size": self.chunk_size, "backend": self.backend}

        def remember(g: Any, gain: Tensor | None = None) -> tuple[Tensor, State]:
            """The outputs with D ⊙ x, which the op adds, and the new states."""
            given = x, q, k, values, g, None, state, packing
            return self.skip(run=lambda skip: self.memory(*given, gain=gain, skip=skip, **options))

        if not x.is_cpu and self.memory_kind == "gate_rank" and not self.stretch_gain and self.joins(self.decay):
            y, memory = self.decay(
                f, position=position, parts=True, then=lambda parts: remember(parts.g._replace(gains=True))
            )
        else:
            g, step, log_stretch, _ = self.decay(f, position=position, parts=True)
            if self.stretch_gain:
                step = step * log_stretch().exp()
            if x.is_cpu or self.memory_kind == "log_linear":
                y, memory = self.memory(x, q, k, values, g, None, state, packing, gain=step, **options)
                y = self.skip(y.flatten(-2), values.flatten(-2), partial(self.norm, z=z))
                return self.out_proj(y), {"conv": conv, **memory}
            y, memory = remember(g, step)
        joins = type(self.norm) is GatedRMSNorm and not is_watched(self.norm)
        y, weight = y.flatten(-2), weight_of(self.out_proj) if joins else None
        y = self.out_proj(self.norm(y, z)) if weight is None else self.norm(y, z, weight=weight)
        return y, {"conv": conv, **memory}

    def _token(
        self, x: Tensor, xbc: Tensor, f: Tensor, position: Tensor, state: State, packing: Packing
    ) -> tuple[Tensor, State]:
        """The values of one token of each sequence before the output norm, and the new state, by one kernel."""
        inner, shared, _ = self.conv_splits

        def run(parts: DecayParts) -> tuple[Tensor, State]:
            gain = parts.step
            if self.stretch_gain and gain is not None and parts.log_stretch is not None:
                gain = gain * parts.log_stretch().exp()
            token = {"places": (inner + shared, inner, 0), "groups": self.num_groups}  # of queries, keys and values
            token |= {"gain": gain, "gains": gain is None}

            def step(skip: Tensor) -> tuple[Tensor, State]:
                unconvolved = self.conv(xbc, state["conv"], packing, **token, skip=skip)
                return self.memory(x, unconvolved, None, None, parts.g, None, state, packing, scale=1)

            return self.skip(run=step)

        if self.stretch_gain or not self.decay.leaves_law:
            return run(self.decay(f, position=position, parts=True))
        return self.decay(f, position=position, parts=True, then=run)
