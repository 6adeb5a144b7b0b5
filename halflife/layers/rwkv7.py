"""RWKV-7's time mix and channel mix."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from halflife.decay.rwkv7 import zigzag
from halflife.initial import draws
from halflife.layers.init import Law, drawn, reset, uniform
from halflife.layers.mixer import LAYERS, Shared, State
from halflife.layers.options import DecayChoice, Place, Run, check_gain
from halflife.layers.parts import is_watched
from halflife.layers.token_shift import Shifting, TokenShift, shifted
from halflife.ops import dplr
from halflife.ops.backends.widened import product
from halflife.ops.laws import Product
from halflife.ops.linear import weight_of
from halflife.ops.recurrent import maps_of_norm, takes_map, takes_token
from halflife.ops.rwkv7 import bonus_of, relu_square, rwkv7_keys, rwkv7_output, rwkv7_token, rwkv7_values
from halflife.packing import Packing
from halflife.precision import ROOMY, product_dtype

# Exponents e of the initial value of each μ, which is 1 − (i/D)^{e (1 − layer/layers)} in channel i.
_SHIFTS = {"r": 0.2, "w": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}

WIDEST_TOKEN = 128  # channels of a head in the kernel of a token, which has all of its state in one program


class LoRA(nn.Module):
    """The low-rank map `f(x W₁) W₂`; `activation` names the torch function f, None the identity.

    Initially W₁ is zero, and W₂ is orthogonal with gain 0.1.
    """

    only_products = True  # see `ops.linear.cast_weights`

    def __init__(self, inputs: int, rank: int, outputs: int, activation: str | None = None) -> None:
        super().__init__()
        self.activation = activation
        self.down = nn.Parameter(torch.empty(rank, inputs))
        self.up = nn.Parameter(torch.empty(outputs, rank))
        self.reset_parameters()

    @draws
    def reset_parameters(self) -> None:
        self.down.zero_()
        self.up.copy_(nn.init.orthogonal_(torch.empty_like(self.up, dtype=torch.float32), gain=0.1))

    def forward(self, x: Tensor) -> Tensor:
        """`[…, inputs]` → `[…, outputs]`."""
        x = product(x, self.down)
        return product(x if self.activation is None else getattr(torch, self.activation)(x), self.up)


class HeadNorm(nn.Module):
    """Layer norm over each head with weights that start at `scale`. RWKV calls it a group norm."""

    pass_backend = "auto"  # see `set_backend`

    def __init__(self, num_heads: int, head_dim: int, eps: float, scale: float) -> None:
        super().__init__()
        self.eps, self.scale = eps, scale
        self.weight = nn.Parameter(torch.empty(num_heads * head_dim))
        self.bias = nn.Parameter(torch.empty(num_heads * head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, self.scale)
        nn.init.zeros_(self.bias)

    def forward(self, o: Tensor, s: Tensor, v: Tensor, gate: Tensor, dtype: torch.dtype) -> Tensor:
        """`(norm(o) + s v) ⊙ gate [B, T, H·V]` in `dtype`; see `rwkv7_output`."""
        return rwkv7_output(o, s, v, gate, self.weight, self.bias, self.eps, dtype, self.pass_backend)


@LAYERS.add("rwkv7")
class RWKV7(Shifting):
    """RWKV-7's time mix (Peng et al. 2025): DPLR whose correction removes the value that a key has written before.

    With δ_t = x_{t−1} − x_t and x_i = x + δ ⊙ μ_i for i in r, w, k, v, a, g:

        r, k, v = x_r W_r, x_k W_k, x_v W_v          v ← lerp(v, v of the first layer, σ(v₀ + lora_v(x_v)))
        w = decay(lora_w(x_w)),  a = σ(a₀ + lora_a(x_a)),  g = σ(x_g G₁) G₂
        κ̂ = normalize(k ⊙ k_k),  k ← k ⊙ (1 + (a − 1) ⊙ k_a)
        S_t = (diag(w_t) − (κ̂_t ⊙ a_t) κ̂_tᵀ) S_{t−1} + k_t v_tᵀ,      o_t = S_tᵀ r_t
        y = ((HeadNorm(o) + (Σ_K r ⊙ k ⊙ r_k) v) ⊙ g) W_o

    As in the authors' code, `out_proj` and the first map of each LoRA start at zero, and initial values depend on the
    index of the layer. The first layer passes its values to deeper ones through `shared`. Without `shared`, a deeper
    layer uses its values as they are.

    Args:
        head_dim: K = V; None means D / H.
        decay_rank, iclr_rank, value_rank, gate_rank: widths of the LoRAs (a is the "in-context learning rate"). None
            means about 2.5 √D · K/64 for the first two, 1.7 √D · K/64 and 5 √D, in multiples of 32.
        post: options of `decay.PoST`, which then wraps the decay, or None.
        stretch_gain: whether PoST stretches k and κ̂ ⊙ a, which write into the state, by the factor of each channel.
        norm_eps: the norm of each head has eps `norm_eps` · K.

    Raises:
        ValueError: the number of heads does not divide the hidden size.
    """

    initial: ClassVar[dict[str, Law]] = {
        "r_proj": uniform(0.5), "k_proj": uniform(0.05), "v_proj": uniform(0.5), "out_proj": uniform(0),
    }  # fmt: skip

    def __init__(
        self,
        place: Place,
        run: Run,
        *,
        head_dim: int | None = None,
        decay_rank: int | None = None,
        gate_rank: int | None = None,
        iclr_rank: int | None = None,
        value_rank: int | None = None,
        post: Mapping[str, Any] | None = None,
        stretch_gain: bool = False,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        decay = DecayChoice(decay="rwkv7", post=post)
        if stretch_gain:
            check_gain(post, delta=True)
        self.stretch_gain = stretch_gain
        hidden_size, num_heads, layer_idx = place.hidden_size, place.num_heads, place.layer_idx
        self.num_heads, self.head_dim = num_heads, head_dim or place.head_size()
        self.depth = layer_idx / place.num_layers
        self.chunk_size, self.backend = run.chunk_size, run.backend
        size = num_heads * self.head_dim
        small = math.sqrt(hidden_size) * self.head_dim / 64
        self.mu = TokenShift({name: torch.empty(hidden_size) for name in _SHIFTS})
        self.a0, self.k_k, self.k_a, self.r_k = (nn.Parameter(torch.empty(size)) for _ in range(4))
        self.v0 = nn.Parameter(torch.empty(size)) if layer_idx else None
        self.r_proj = drawn(hidden_size, size, self.initial["r_proj"])
        self.k_proj = drawn(hidden_size, size, self.initial["k_proj"])
        self.v_proj = drawn(hidden_size, size, self.initial["v_proj"])
        self.out_proj = drawn(size, hidden_size, self.initial["out_proj"])
        self.decay_lora = LoRA(hidden_size, decay_rank or _rank(2.5 * small), size, "tanh")
        self.iclr_lora = LoRA(hidden_size, iclr_rank or _rank(2.5 * small), size)
        self.value_lora = LoRA(hidden_size, value_rank or _rank(1.7 * small), size) if layer_idx else None
        self.gate_lora = LoRA(hidden_size, gate_rank or _rank(5 * math.sqrt(hidden_size)), size, "sigmoid")
        self.decay: Any = decay.build(place, head_dim=self.head_dim, granularity="vector")
        scale = ((1 + layer_idx) / place.num_layers) ** 0.7
        self.norm = HeadNorm(num_heads, self.head_dim, self.head_dim * norm_eps, scale)
        self._reset_vectors()

    def reset_parameters(self) -> None:
        self._reset_vectors()
        reset(self, self.initial)

    @draws
    def _reset_vectors(self) -> None:
        for name, exponent in _SHIFTS.items():
            self.mu[name].copy_(_shift_start(len(self.mu[name]), exponent * (1 - self.depth)))
        size = len(self.a0)
        ramp = torch.arange(size) / max(size - 1, 1) - 0.5
        self.a0.copy_(-0.19 + 0.3 * zigzag(self.num_heads, self.head_dim).flatten() + 0.4 * ramp)
        self.k_k.copy_(0.71 - 0.1 * ramp)
        self.k_a.fill_(1.02)
        self.r_k.fill_(-0.04)
        if self.v0 is not None:
            self.v0.copy_(0.73 - 0.4 * ramp)

    def mix(self, x: Tensor, state: State, packing: Packing, shared: Shared | None) -> tuple[Tensor, State]:
        position = packing.positions(state.get("position"), x.device)
        if not x.is_cpu and self.decodes(x, state, packing):
            first, last = self._first_maps(x, state, packing)
            y, memory = self._token(first, state["memory"], position, shared, product_dtype(x))
            return self.out_proj(y), {"shift": last, "memory": memory}
        xs, last = self._mixtures(x, state.get("shift"), packing)
        r, v = self._per_head(self.r_proj(xs["r"])), self.values(xs["v"], shared)
        k, a, b, *bonus = self.keys(xs["k"], xs["a"], None if self.stretch_gain else r)
        g, _, log_stretch, _ = self.decay(self._per_head(self.decay_lora(xs["w"])), position=position, parts=True)
        if self.stretch_gain:
            gain = log_stretch().exp().to(k.dtype)
            k, a, b = (x.to(r.dtype) for x in (gain * k, a, gain * b))
            bonus = [bonus_of(r, k, self._per_head(self.r_k))]
        o, memory = dplr(
            r, k, v.to(ROOMY[v.dtype]), a, b, g, scale=1, initial_state=state.get("memory"),
            output_final_state=True, cu_seqlens=packing, **self.op_options,
        )  # fmt: skip
        assert memory is not None
        y = self.norm(o, bonus[0], v, self.gate_lora(xs["g"]), product_dtype(x))
        return self.out_proj(y), {"shift": last, "memory": memory}

    def decodes(self, x: Tensor, state: State, packing: Packing) -> bool:
        """Whether one kernel takes a token of each sequence from its projections to the input of the last map."""
        if packing.length != 1 or packing.cu_seqlens is not None or "memory" not in state or self.stretch_gain:
            return False
        plain = self.backend in ("auto", "triton") and self.decay.leaves_law and self.head_dim <= WIDEST_TOKEN
        plain = plain and not is_watched(self.norm, *self._loras)
        return plain and takes_token(x, None, state["memory"])

    def _mixtures(self, x: Tensor, first: Tensor | None, packing: Packing) -> tuple[dict[str, Tensor], Tensor]:
        """The input of each map by its name, and the last token."""
        if self.made:
            return dict(zip(self.mu, self.made, strict=False)), self.made[-1]
        return self.mu(x, first, packing)

    def maps_of_token(self, x: Tensor, state: State, packing: Packing) -> tuple[list[Tensor], list[Tensor | None]]:
        """μ and the weights of r, k and v, and of the first factors of the maps of low rank."""
        if not self.decodes(x, state, packing) or is_watched(self.mu):
            return [], []
        weights = [*map(weight_of, (self.r_proj, self.k_proj, self.v_proj)), *[lora.down for lora in self._loras]]
        return [self.mu[name] for name in "rkvwagv"[: len(weights)]], weights

    def _first_maps(self, x: Tensor, state: State, packing: Packing) -> tuple[list[Tensor], Tensor]:
        if (found := self.made_maps(x, state, packing)) is not None:
            return found
        xs, last = self._mixtures(x, state["shift"], packing)
        rows = [self.r_proj(xs["r"]), self.k_proj(xs["k"]), self.v_proj(xs["v"])]
        return [*rows, *(product(xs[name], lora.down) for name, lora in zip("wagv", self._loras, strict=False))], last

    @property
    def _loras(self) -> list[LoRA]:
        last = [] if self.value_lora is None else [self.value_lora]
        return [self.decay_lora, self.iclr_lora, self.gate_lora, *last]

    def _token(
        self, given: list[Tensor], memory: Tensor, position: Tensor, shared: Shared | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        rows, low, ups, first = given[:3], given[3:], [lora.up for lora in self._loras], None
        vectors = [self.a0, self.k_k, self.k_a, self.r_k, self.norm.weight, self.norm.bias]
        if self.v0 is None and shared is not None:
            shared["value"] = rows[2]
        elif self.v0 is not None and shared is not None and "value" in shared:
            first, vectors = shared["value"], [*vectors, self.v0]
        count = 3 if first is None else 4
        settings = vectors, memory, self.norm.eps, dtype
        return self.decay(
            Product(low[0], ups[0], None), position=position, parts=True, with_step=False,
            then=lambda parts: rwkv7_token(rows, first, low[:count], ups[:count], *settings, parts.g),
        )  # fmt: skip

    def values(self, x: Tensor, shared: Shared | None) -> Tensor:
        """`v [B, T, H, V]`, interpolated towards the values of the first layer, which `shared` holds."""
        v = self.v_proj(x)
        if self.value_lora is None or self.v0 is None:
            if shared is not None:
                shared["value"] = v
        elif shared is not None and "value" in shared:
            parts = (self._per_head(x) for x in (v, shared["value"], self.value_lora(x), self.v0))
            return rwkv7_values(*parts, backend=self.pass_backend)
        return self._per_head(v)

    def keys(self, x: Tensor, x_iclr: Tensor, r: Tensor | None) -> tuple[Tensor, ...]:
        """`k`, and the vectors with which the correction reads, `−κ̂`, and writes, `κ̂ ⊙ a`, all `[B, T, H, K]`.

        With `r [B, T, H, K]` they have its dtype, and the fourth is the weight of each token's own value `[B, T, H]`.
        """
        key, rate, bias, unit, change = (
            self._per_head(x) for x in (self.k_proj(x), self.iclr_lora(x_iclr), self.a0, self.k_k, self.k_a)
        )
        bonus, dtype = (None, None) if r is None else (self._per_head(self.r_k), r.dtype)
        return rwkv7_keys(key, rate, r, bias, unit, change, bonus, dtype, self.pass_backend)

    def _per_head(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, self.head_dim))


class RWKV7ChannelMix(Shifting):
    """RWKV-7's channel mix: `y = relu((x + δ ⊙ μ) W_k)² W_v`, δ_t = x_{t−1} − x_t.

    Its state is the last x. W_v starts at zero.

    Args:
        hidden_size: D.
        intermediate_size: width inside; None means 4 D.
        layer_idx, num_layers: the index of the layer and the number of layers; initial values depend on them.
    """

    initial: ClassVar[dict[str, Law]] = {"k_proj": uniform(0.5), "v_proj": uniform(0)}

    def __init__(
        self, hidden_size: int, intermediate_size: int | None = None, layer_idx: int = 0, num_layers: int = 1
    ) -> None:
        super().__init__()
        width = intermediate_size or 4 * hidden_size
        self.depth = layer_idx / num_layers
        self.mu = nn.Parameter(torch.empty(hidden_size))
        self.k_proj = drawn(hidden_size, width, self.initial["k_proj"])
        self.v_proj = drawn(width, hidden_size, self.initial["v_proj"])
        self._reset_shift()

    def reset_parameters(self) -> None:
        self._reset_shift()
        reset(self, self.initial)

    @draws
    def _reset_shift(self) -> None:
        self.mu.copy_(_shift_start(len(self.mu), (1 - self.depth) ** 4))

    def mix(self, x: Tensor, state: State, packing: Packing, shared: Shared | None) -> tuple[Tensor, State]:
        weight = None if x.is_cpu else weight_of(self.v_proj)
        if not x.is_cpu and (found := self.made_maps(x, state, packing)) is not None:
            (x,), last = found
        else:
            mixed, last = self.made or shifted(x, state.get("shift"), packing, [self.mu], self.pass_backend)
            x = self.k_proj(mixed)
        if weight is not None and self.pass_backend == "auto" and takes_map(x, weight):
            return maps_of_norm(x, None, 0.0, [weight], kind="relu_square")[0], {"shift": last}
        return self.v_proj(relu_square(x, self.pass_backend)), {"shift": last}

    def maps_of_token(self, x: Tensor, state: State, packing: Packing) -> tuple[list[Tensor], list[Tensor | None]]:
        """μ and the weight of the first map."""
        return [self.mu], [weight_of(self.k_proj)]


def _shift_start(size: int, exponent: float) -> Tensor:
    """The initial μ. It falls along the channels from 1, which selects the token before, to 0, the token itself."""
    return 1 - (torch.arange(size) / size) ** exponent


def _rank(width: float) -> int:
    return max(32, round(width / 32) * 32)
