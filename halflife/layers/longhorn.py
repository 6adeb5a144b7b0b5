"""Longhorn's layer."""

from __future__ import annotations

import math
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from halflife.decay import Decay, DecayParts
from halflife.layers.init import Law, drawn, reset, zero_bias
from halflife.layers.mamba2 import Skip
from halflife.layers.memory.choice import one_state
from halflife.layers.mixer import LAYERS, Mixer, Shared, State
from halflife.layers.options import Place, Run
from halflife.layers.parts import ShortConv
from halflife.ops.backends.split import split
from halflife.ops.fused import swiglu
from halflife.ops.linear_attention import longhorn_keys
from halflife.packing import Packing
from halflife.precision import ROOMY
from halflife.registry import check_choice


class LonghornDecay(Decay):
    """λ = 1 / (1 + f), f ≥ 0. With `f = β k_i² / (1 + β (kᵀk − k_i²))` this is `1 − ε k_i²`.

    g = −log1p(f) is accurate for slow decays and finite for keys of any length. Without a key, f = 0, nothing decays.
    """

    granularities = ("vector",)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, logits: Tensor, k: Tensor, dtype: torch.dtype, backend: str = "auto"
    ) -> DecayParts:
        """Log-decays and keys, see `ops.linear_attention.longhorn_keys`."""
        g, key = longhorn_keys(logits, k, dtype, backend)
        return DecayParts(g, None, None, key)

    def log_decay(self, f: Tensor, log_rate: Tensor | None) -> Tensor:
        return -torch.log1p(f)


@LAYERS.add("longhorn")
class Longhorn(Mixer):
    """Longhorn (Liu et al. 2024): the smallest change of the state that stores the new pair, in Mamba's block.

    `[x, z] = u W`, and x goes through a short convolution. Then `[r, k, q] = x W_x` with r of rank D / 16,
    rounded up, and `β = σ(r W_β + b)`:

        S_t = (1 − ε_t k_t²) ⊙ S_{t−1} + k_t (ε_t x_t)ᵀ,   ε_t = β_t / (1 + β_t k_tᵀ k_t),   y_t = S_tᵀ q_t + D x_t

    The output is `(y ⊙ silu(z)) W_o`. All heads share q and k. It is `ops.linear_attention` with the vector decay
    `g = log(1 − ε k²)`, and it has no parameters of a decay. The paper has a step ε for each channel. If the channels
    of a head share one step, the chunked form has larger products.

    Args:
        place, run: groups of options.
        expand: inner width divided by hidden_size.
        head_dim: V, channels per head; None means expand · hidden_size / H.
        state_size: K, rows of the state ("d_state").
        step: "head", or "channel", where each channel is one head of the op.
        conv_size: taps of the short convolution.

    Raises:
        ValueError: the number of heads does not divide the inner width, or `step` is unknown.
    """

    maps_of_input = ("in_proj",)
    STEPS = ("head", "channel")
    initial: ClassVar[dict[str, Law]] = {"step_proj": zero_bias}

    def __init__(
        self,
        place: Place,
        run: Run,
        *,
        expand: int = 2,
        head_dim: int | None = None,
        state_size: int = 16,
        step: str = "head",
        conv_size: int = 4,
    ) -> None:
        super().__init__()
        check_choice("step", step, self.STEPS)
        hidden_size, inner = place.hidden_size, place.num_heads * (head_dim or place.head_size(expand))
        self.num_heads = inner if step == "channel" else place.num_heads
        self.head_dim, self.chunk_size, self.backend = inner // self.num_heads, run.chunk_size, run.backend
        rank = math.ceil(hidden_size / 16)
        self.splits = [rank, state_size, state_size]
        self.in_proj = nn.Linear(hidden_size, 2 * inner, bias=False)
        self.conv = ShortConv(inner, conv_size, bias=True)
        self.x_proj = nn.Linear(inner, sum(self.splits), bias=False)
        self.step_proj = drawn(rank, self.num_heads, self.initial["step_proj"], bias=True)
        self.decay = LonghornDecay(self.num_heads, state_size, "vector")
        self.skip = Skip(self.num_heads)
        self.out_proj = nn.Linear(inner, hidden_size, bias=False)

    def reset_parameters(self) -> None:
        reset(self, self.initial)

    def _written(self, values: Tensor) -> tuple[DecayParts, Tensor]:
        """Log-decays and keys, and queries, of what came through the convolution."""
        r, k, q = self.x_proj(values).split(self.splits, -1)
        return self.decay(self.step_proj(r), k, values.dtype, self.pass_backend), q

    def at_rest(self) -> Tensor:
        """The log-decays where the input of the layer is 0, `[1, 1, H, K]`, by the bias of its convolution."""
        values, _ = self.conv(self.x_proj.weight.new_zeros(1, 1, self.x_proj.in_features), None, Packing.of(None, 1, 1))
        return self._written(values)[0].g

    def mix(self, x: Tensor, state: State, packing: Packing, shared: Shared | None) -> tuple[Tensor, State]:
        projected = self.in_proj(x)
        values, z = split(projected, [projected.shape[-1] // 2] * 2)
        values, conv = self.conv(values, state.get("conv"), packing)
        written, q = self._written(values)
        heads = values.unflatten(-1, (self.num_heads, self.head_dim))
        q = q.to(values.dtype).unsqueeze(2)  # of one group
        y, memory = one_state(
            x, q, written.key, heads, written.g, None, state, packing, scale=1, **self.op_options
        )  # fmt: skip
        gate = partial(swiglu, z, backend=self.pass_backend)
        y = self.skip(y.to(ROOMY[x.dtype]).flatten(-2), values, gate)
        return self.out_proj(y.half() if x.dtype == torch.float16 else y), {"conv": conv, **memory}
