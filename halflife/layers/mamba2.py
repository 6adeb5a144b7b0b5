"""Mamba-2's layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from halflife.decay import Decay, PoST
from halflife.layers.gate_rank import apply_update
from halflife.layers.memory.choose import build_states
from halflife.layers.mixer import LAYERS, Mixer, Shared, State
from halflife.layers.parts import OUTPUT_NORMS, ShortConv, build_decay, check_gain, check_heads, check_step
from halflife.ops.fused import scale_heads
from halflife.packing import Packing
from halflife.precision import Float32Module
from halflife.registry import unknown


class Skip(Float32Module):
    """`y + D ⊙ x` with one D a head, which starts at 1."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.D = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.D)

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        """`y, x [B, T, H, V]`."""
        return torch.addcmul(y, self.D.unsqueeze(-1).to(y.dtype), x)


@LAYERS.add("mamba2")
class Mamba2(Mixer):
    """Mamba-2 (Dao & Gu 2024): linear attention with key B, query C, value Δx and decay e^{−e^A Δ}.

    `[z, xBC, f] = x W`, and xBC goes through a short convolution. Then `S_t = e^{g_t} S_{t−1} + B_t (Δ_t x_t)ᵀ` and
    `y_t = S_tᵀ C_t + D x_t`. The output is `RMSNorm(y ⊙ silu(z)) W_o`. Groups of heads share B and C.
    `decay_options={"min_step": …, "max_step": …}` limits Δ.

    Args:
        hidden_size: model width.
        num_heads: H.
        expand: inner width divided by hidden_size.
        head_dim: V, channels a head; None means expand · hidden_size / H.
        state_size: K, rows of the state ("d_state").
        num_groups: number of groups of heads that share B and C; it must divide H.
        conv_size: taps of the short convolution.
        decay, decay_options: the name of one of Mamba-2's decays, and its options.
        post: options of `decay.PoST`, which then wraps the decay, or None.
        gate_rank: options of `GateRank`, which adds a slow state, or None.
        log_linear: options of `LogLinear`, which keeps a state for every power of two of the distance, or None.
        stretch_gain: whether PoST stretches Δ in the input Δ x as in the decay, so that the stationary size of the
            state does not grow with the position. The paper leaves the input alone (§5.2).
        output_norm: "after_gate"; "before_gate", `RMSNorm(y) ⊙ silu(z)`; or "none", `y ⊙ silu(z)` (Falcon-H1 has
            both).
        norm_per_head: whether that norm takes each head alone. By default it takes all heads of a group together, so
            that a head whose state grows shrinks the others.
        norm_eps: eps of that norm.
        layer_idx, num_layers: the index of the layer and the number of layers.
        chunk_size, backend: passed to the op.

    Raises:
        ValueError: a number of heads or groups does not divide, the decay has no step size, the norm is unknown, or
            `stretch_gain` is given without PoST.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int = 4,
        *,
        expand: int = 2,
        head_dim: int | None = None,
        state_size: int = 128,
        num_groups: int = 1,
        conv_size: int = 4,
        decay: str = "mamba2",
        decay_options: Mapping[str, Any] | None = None,
        post: Mapping[str, Any] | None = None,
        gate_rank: Mapping[str, Any] | None = None,
        log_linear: Mapping[str, Any] | None = None,
        stretch_gain: bool = False,
        output_norm: str = "after_gate",
        norm_per_head: bool = False,
        norm_eps: float = 1e-5,
        layer_idx: int = 0,
        num_layers: int = 1,
        chunk_size: int = 64,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        check_step("Mamba-2", decay, post)
        if stretch_gain:
            check_gain(post, delta=False)
        if num_heads % num_groups:
            raise ValueError(f"num_groups must divide num_heads; got {num_groups} and {num_heads}")
        self.num_heads, self.num_groups, self.state_size = num_heads, num_groups, state_size
        self.head_dim = head_dim or check_heads(expand * hidden_size, num_heads)
        self.chunk_size, self.backend, self.stretch_gain = chunk_size, backend, stretch_gain
        inner, shared = num_heads * self.head_dim, num_groups * state_size
        self.splits = [inner, inner + 2 * shared, num_heads]
        self.conv_splits = [inner, shared, shared]
        self.in_proj = nn.Linear(hidden_size, sum(self.splits), bias=False)
        self.conv = ShortConv(sum(self.conv_splits), conv_size, bias=True)
        self.decay: Decay = build_decay(  # pyright: ignore[reportAttributeAccessIssue] (a name gives a decay)
            decay, decay_options, post, num_heads=num_heads, head_dim=state_size, granularity="scalar",
            layer_idx=layer_idx, num_layers=num_layers,
        )  # fmt: skip
        self.gate_rank, self.log_linear = build_states(
            (hidden_size, num_heads), decay=decay, granularity="scalar", update="linear", gate_rank=gate_rank,
            log_linear=log_linear,
        )  # fmt: skip
        self.skip = Skip(num_heads)
        if output_norm not in OUTPUT_NORMS:
            raise unknown("output_norm", output_norm, list(OUTPUT_NORMS))
        self.norm = OUTPUT_NORMS[output_norm](inner, num_heads if norm_per_head else num_groups, norm_eps)
        self.out_proj = nn.Linear(inner, hidden_size, bias=False)

    def mix(self, x: Tensor, state: State, packing: Packing, shared: Shared | None) -> tuple[Tensor, State]:
        position = packing.positions(state.get("position"), x.device)
        z, xbc, f = self.in_proj(x).split(self.splits, -1)
        xbc, conv = self.conv(xbc, state.get("conv"), packing)
        values, key, query = xbc.split(self.conv_splits, -1)
        values = values.unflatten(-1, (self.num_heads, self.head_dim))
        q, k = (expand_groups(part.unflatten(-1, (self.num_groups, -1)), self.num_heads) for part in (query, key))
        step = self.decay.step_size(f)
        g = self.decay(f, position=position, step=step)
        if self.stretch_gain:
            assert isinstance(self.decay, PoST)
            step = step * self.decay.log_stretch(position).exp()
        v = scale_heads(values, step)
        states = self.gate_rank or self.log_linear
        y, memory = apply_update(
            states, x, q, k, v, g, None, state, packing, scale=1,
            chunk_size=self.chunk_size, backend=self.backend,
        )  # fmt: skip
        y = self.norm(y.flatten(-2), z, skip=(self.skip.D, values.flatten(-2)))
        return self.out_proj(y), {"conv": conv, **memory}


def expand_groups(x: Tensor, num_heads: int) -> Tensor:
    """`[B, T, G, K]` → `[B, T, H, K]`: each group serves H / G heads in a row."""
    return x.unsqueeze(3).expand(-1, -1, -1, num_heads // x.shape[2], -1).flatten(2, 3)
