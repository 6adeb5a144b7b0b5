"""Mamba-3's layer: Mamba-2's recurrence with trapezoidal steps and a rotation whose speed depends on the input."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from halflife.decay import Decay, DecayParts
from halflife.initial import draws
from halflife.layers.mamba2 import Skip
from halflife.layers.memory.choice import HasMemory, OneOrGateRank, one_state
from halflife.layers.memory.mimo import MIMO
from halflife.layers.memory.trapezoid import integrate, with_last
from halflife.layers.mixer import LAYERS, Mixer, Shared, State, pass_features
from halflife.layers.options import Place, Run, StepDecay
from halflife.layers.parts import NormBeforeGate, ShortConv
from halflife.ops.backends.split import split
from halflife.ops.laws import Law, log_decay
from halflife.ops.trapezoid import normed, running_angles, trapezoid_keys, trapezoid_weights
from halflife.packing import Packing
from halflife.position import check_pairs
from halflife.precision import Float32Module, inverse_softplus


class NormBias(Float32Module):
    """`RMSNorm(x) ⊙ weight + bias`, over the channels of each group and with one bias per head. Both start at 1."""

    def __init__(self, num_heads: int, state_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(state_size))
        self.bias = nn.Parameter(torch.empty(num_heads, state_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.ones_(self.bias)

    def forward(self, x: Tensor | None = None, run: Callable[..., Any] | None = None) -> Any:
        """`[B, T, G·K]` → `[B, T, H, K]`, in float32 (float64 for float64), or `run((weight, bias))`, as in `Skip`."""
        if run is not None:
            return run((self.weight, self.bias))
        assert x is not None
        return normed(x, self.weight, self.bias, self.eps, 0)


@LAYERS.add("mamba3")
class Mamba3(HasMemory, Mixer):
    """Mamba-3 (Lahoti et al. 2026): Mamba-2 with trapezoidal steps and a data-dependent rotation.

    `[z, x, B, C, f, a, l, r] = u W`. The step size is Mamba-2's, `Δ = softplus(f + Δ₀)`, and the decay is `α = e^g`.
    `λ = σ(l)` is the share of a step's input that is taken at the end of the step:

        φ_t = φ_{t−1} + Δ_t π tanh(r_t),   k_t = R(φ_t) (norm(B_t) + b),   q_t = R(φ_t) (norm(C_t) + c)
        S_t = α_t (S_{t−1} + (1 − λ_t) Δ_t k_{t−1} x_{t−1}ᵀ) + λ_t Δ_t k_t x_tᵀ,   y_t = S_tᵀ q_t + D x_t

    The output is `(y ⊙ silu(z)) W_o`, and there is no short convolution. R(φ) rotates the pairs (i, i + P) of the first
    2P channels. All heads share r, but each has a separate Δ. tanh and π follow the authors' code, and so do all
    initial values. The decay rate depends on the input, `g = −Δ max(softplus(a), rate_floor)`, with one more
    projection a. With `rate_floor=None` it is Mamba-2's learned rate, as PoST needs, which sorts the rates. With rank 1
    this is SISO, and with a higher rank MIMO (`MIMO`).

    Args:
        place, decay, memory, run: groups of options.
        expand: inner width divided by hidden_size.
        head_dim: V, channels per head; None means expand · hidden_size / H.
        state_size: K, rows of the state ("d_state").
        num_groups: number of groups of heads that share B and C; it must divide H.
        rope_fraction: share of the K channels that is rotated, 0.5 or 1.
        rank: R, keys, values and queries of each token and head.
        rate_floor: smallest decay rate. None means a learned rate for each head, and no projection a.
        output_norm: whether the gate is `RMSNorm(y) ⊙ silu(z)`, with the norm over each head, as an option of the
            authors has it.
        norm_eps: eps of all norms.

    The state holds `memory [N, H, K, V]`, the last token's `key [N, H, K]` and `value [N, H, V]`, and its φ as
    `angle [N, H, P]` in turns of 2π, between −½ and ½.

    Raises:
        ValueError: a number of heads or groups does not divide, the rotated channels do not pair up, or the decay has
            no step size.
    """

    ROPE_FRACTIONS = (0.5, 1)
    maps_of_input = ("in_proj",)
    loops_over_length = True  # running angles: see `models.compiled`

    def __init__(
        self,
        place: Place,
        decay: StepDecay,
        memory: OneOrGateRank,
        run: Run,
        *,
        expand: int = 2,
        head_dim: int | None = None,
        state_size: int = 128,
        num_groups: int = 1,
        rope_fraction: float = 0.5,
        rank: int = 1,
        rate_floor: float | None = 1e-4,
        output_norm: bool = False,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        num_heads, gate_rank = place.num_heads, memory.gate_rank
        if num_heads % num_groups:
            raise ValueError(f"num_groups must divide num_heads; got {num_groups} and {num_heads}")
        if rope_fraction not in self.ROPE_FRACTIONS:
            raise ValueError(f"rope_fraction must be 0.5 or 1; got {rope_fraction}")
        if state_size * rope_fraction % 2:
            raise ValueError(
                f"rotated channels come in pairs: state_size · rope_fraction must be even; got "
                f"{state_size} · {rope_fraction}"
            )
        if rank > 1 and gate_rank is not None:
            raise ValueError(f"rank must be 1 with GateRank, which has one reset per token; got {rank}")
        if (gate_rank or {}).get("reset_law", "mask") != "mask":
            raise ValueError("the printed reset law would erase the previous token, which Mamba-3 writes with the next")
        if rate_floor is not None and (rate_floor <= 0 or decay != StepDecay()):
            raise ValueError(
                f"with a rate_floor, which is positive, the input sets the decay rates, so decay, decay_options and "
                f"post need rate_floor=None; got {rate_floor}, {decay.decay}, {decay.decay_options} and {decay.post}"
            )
        self.num_heads, self.rate_floor = num_heads, rate_floor
        self.head_dim = head_dim or place.head_size(expand)
        self.chunk_size, self.backend = run.chunk_size, run.backend
        inner, shared = num_heads * self.head_dim, rank * num_groups * state_size
        pairs = int(state_size * rope_fraction) // 2
        per_head = [num_heads] * (2 if rate_floor is None else 3)
        self.splits = [inner, inner, shared, shared, *per_head, pairs]
        self.in_proj = nn.Linear(place.hidden_size, sum(self.splits), bias=False)
        self.key = NormBias(rank * num_heads, state_size, norm_eps)
        self.query = NormBias(rank * num_heads, state_size, norm_eps)
        self.mimo = MIMO(num_heads, rank, self.head_dim) if rank > 1 else None
        self.decay: Decay = (
            decay.build(place, head_dim=state_size)
            if rate_floor is None
            else ChosenRateDecay(rate_floor, step_bias=True, num_heads=num_heads, head_dim=state_size)
        )
        self.add_memory(memory, place, decay=decay.decay)
        self.skip = Skip(num_heads)
        self.norm = NormBeforeGate(inner, num_heads, norm_eps) if output_norm else None
        self.out_proj = nn.Linear(inner, place.hidden_size, bias=False)

    def mix(self, x: Tensor, state: State, packing: Packing, shared: Shared | None) -> tuple[Tensor, State]:
        position = packing.positions(state.get("position"), x.device)
        z, v, b, c, f, *a, trapezoid, rate = split(self.in_proj(x), self.splits)
        v = v.unflatten(-1, (self.num_heads, self.head_dim))
        chosen = {"rate": a[0]} if a else {}
        g, step, *_ = self.decay(f, position=position, parts=True, **chosen)
        passes = self.pass_backend
        angle, last = running_angles(step, rate, state.get("angle"), True, packing, passes)
        weight, gain, last_gain = trapezoid_weights(g, step, trapezoid, state.get("gain"), packing, passes)
        first, eps = (state.get("key"), state.get("value")), self.key.eps

        def turned(query: Any) -> tuple[Tensor, ...]:
            rest = first, eps, self.mimo is not None, packing, passes
            return self.key(run=lambda key: trapezoid_keys(c, b, v, angle, query, key, *rest))

        q, k_before, v_before, dot, key, value, *k = self.query(run=turned)
        last_token = key, value, last_gain
        if self.mimo is not None:
            z = z.unflatten(-1, (self.num_heads, -1))
            # accelerate moves the arguments of a module, and would move a norm with its weights.
            norm = None if self.norm is None else self.norm.__call__
            mimo, rest = self.mimo, (g, weight, gain, last_token, state, packing)
            given = x, q, k[0], k_before, v, v_before, z
            y, new = self.skip(run=lambda d: mimo(*given, d, *rest, norm=norm, **self.op_options))
            y = y.flatten(-2)
        else:
            given = self.memory, x, q, k_before, v, g, v_before, weight, gain, dot, state, packing
            options: dict[str, Any] = {"pass_backend": passes, "z": z if self.norm is None else None, **self.op_options}
            y, new = self.skip(run=lambda d: integrate(*given, skip=d, **options))
            y = y if self.norm is None else self.norm(y, z)
            new = with_last(self.memory, new, *last_token)
        return self.out_proj(y.half() if x.dtype == torch.float16 else y), {"angle": last, **new}


class ChosenRateDecay(Decay):
    """`g = −Δ max(softplus(a), rate_floor)`, whose step size `Δ = softplus(f + Δ₀)` and rate both depend on the input.

    Δ₀ is the only parameter. In Echo's form it is 0 and no parameter, and there is no floor. Initialisation:
    softplus(Δ₀) log-uniform in [0.001, 0.1]. Time-scale at f = a = 0: `1 / (log 2 · softplus(Δ₀))`, in Echo's form
    about 2 tokens. Sources: Lahoti et al. 2026 and its code; Echo, Appendix G.

    Args:
        rate_floor: the smallest rate.
        step_bias: whether there is a Δ₀.
    """

    granularities = ("scalar",)
    has_step_size = True

    def __init__(self, rate_floor: float = 0.0, *, step_bias: bool = False, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.rate_floor = rate_floor
        self.dt_bias = nn.Parameter(torch.empty(self.shape)) if step_bias else None
        self.reset_parameters()

    @draws
    def reset_parameters(self) -> None:
        if self.dt_bias is not None:
            self.dt_bias.copy_(inverse_softplus(self.dt_bias.uniform_(math.log(1e-3), math.log(0.1)).exp()))

    def step_size(self, f: Tensor) -> Tensor:
        """Δ `[B, T, H]` in float32."""
        return Law("softplus", self.dt_bias).step(f)

    def forward(
        self, f: Tensor, *, rate: Tensor | None = None, position: Tensor | None = None, parts: bool = False
    ) -> Tensor | DecayParts:
        """Compute log-decays `[B, T, H]` from f and the activations a of the rate in the same shape (None: zeros)."""
        self._check(f)
        g, step = log_decay(f, Law("softplus", self.dt_bias), with_step=True)
        a = torch.zeros_like(f) if rate is None else rate
        g = g * log_decay(a, Law("softplus", factor=-1, least=self.rate_floor))[0]
        return DecayParts(g, step, None) if parts else g

    def log_decay(self, f: Tensor, log_rate: Tensor | None, step: Tensor | None = None) -> Tensor:
        return self(f)


@LAYERS.add("mamba3_echo")
class EchoMamba3(Mixer):
    """Mamba-3 as the block of Echo's Appendix G, 121,600 parameters at D = 128 and 4 heads.

    `[z, x, b, c, f, a, l, ω] = u W`, x goes through a short convolution with SiLU, and with `Δ = softplus(f)`,
    `α = e^{−Δ softplus(a)}` and `λ = σ(l)` in each head

        φ_t = φ_{t−1} + Δ_t ω_t,   k_t = R(φ_t) b_t,   q_t = R(φ_t) c_t
        S_t = α_t (S_{t−1} + (1 − λ_t) Δ_t k_{t−1} x_{t−1}ᵀ) + λ_t Δ_t k_t x_tᵀ,   y_t = S_tᵀ q_t

    The output is `(y ⊙ silu(z)) W_o`. Every head has its own b, c and angles, and all K channels are rotated. The paper
    names all parts but z and ω. Their 256 + 32 columns are what its number of parameters needs.
    Source: Echo, Appendices B.1, G.1 and G.5, and the counts of §4.1.

    Args:
        place, run: groups of options.
        expand: inner width divided by hidden_size.
        state_size: K, rows of the state of a head, which must be even.
        conv_size: taps of the short convolution.
        share_features: whether later layers may read q, k and x (`features` of SKA).

    The state is `Mamba3`'s without GateRank, and `conv`.

    Raises:
        ValueError: the number of heads does not divide, or the state size is odd.
    """

    maps_of_input = ("in_proj",)
    loops_over_length = True

    def __init__(
        self, place: Place, run: Run, *, expand: int = 2, state_size: int = 16, conv_size: int = 4,
        share_features: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.share_features = share_features
        check_pairs(state_size)
        num_heads = self.num_heads = place.num_heads
        self.head_dim = place.head_size(expand)
        self.chunk_size, self.backend = run.chunk_size, run.backend
        inner, keys = num_heads * self.head_dim, num_heads * state_size
        self.splits = [inner, inner, keys, keys, num_heads, num_heads, num_heads, keys // 2]
        self.in_proj = nn.Linear(place.hidden_size, sum(self.splits), bias=False)
        self.decay = ChosenRateDecay(num_heads=num_heads, head_dim=state_size)
        self.conv = ShortConv(inner, conv_size, bias=True)
        self.out_proj = nn.Linear(inner, place.hidden_size, bias=False)

    def mix(self, x: Tensor, state: State, packing: Packing, shared: Shared | None) -> tuple[Tensor, State]:
        z, v, b, c, f, a, trapezoid, rate = split(self.in_proj(x), self.splits)
        v, conv = self.conv(v, state.get("conv"), packing)
        g, step, *_ = self.decay(f, rate=a, parts=True)
        passes = self.pass_backend
        rate = rate.unflatten(-1, (self.num_heads, -1))
        angle, last = running_angles(step, rate, state.get("angle"), False, packing, passes)
        weight, gain, last_gain = trapezoid_weights(g, step, trapezoid, None, packing, passes)
        v, first = v.unflatten(-1, (self.num_heads, -1)), (state.get("key"), state.get("value"))
        q, k_before, v_before, dot, key, value, *k = trapezoid_keys(
            c, b, v, angle, None, None, first, 0, self.share_features, packing, passes
        )
        if self.share_features:
            pass_features(shared, q, k[0], v)
        y, new = integrate(
            one_state, x, q, k_before, v, g, v_before, weight, gain, dot, state, packing, z=z, pass_backend=passes,
            **self.op_options,
        )  # fmt: skip
        y = self.out_proj(y.half() if x.dtype == torch.float16 else y)
        return y, {"conv": conv, "angle": last, **with_last(one_state, new, key, value, last_gain)}
