"""Spectral Koopman attention as a layer (Echo)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from halflife.layers.decay_gate import DecayGate
from halflife.layers.init import drawn, orthogonal, reset, uniform
from halflife.layers.memory.readout import Readout
from halflife.layers.mixer import LAYERS, Shared, State, taken_features
from halflife.layers.options import DecayChoice, Place, Run
from halflife.layers.parts import ShortConv, clebsch_gordan
from halflife.ops.fused import l2_normalize
from halflife.ops.koopman import check_settings, convert_state
from halflife.packing import Packing
from halflife.precision import ROOMY, compute_dtype
from halflife.registry import AtLeast, check_choice


@dataclass(frozen=True, kw_only=True)
class SumDecay(DecayChoice):
    """The decay of the sums; None is the paper's.

    Attributes:
        granularity: "scalar", one decay per head, or "vector", one per key channel.
    """

    granularity: str = "scalar"


@LAYERS.add("ska")
class SKA(DecayGate):
    """Spectral Koopman attention (Echo, §3.2): ridge regression on all earlier chunks, with keys of rank r.

    `y = W_o (η ⊙ koopman_attention(ψ(q), ψ(x W_k), x W_v))` with `q = x W_k + x W_q` or `q = x W_q`. W_k starts
    orthogonal, and W_o at zero. The defaults differ from the paper's, because the paper's do not learn recall
    (docs/results/echo.md).

    With `decay` and `beta` the sums forget. PoST slows that down with the position, as in the layers of its paper.

    `shared["action_mask"]`, `[B, T]`, is 1 for tokens that enter the sums. The paper's tasks leave out tokens that
    carry no fact. Without a mask all tokens enter. Every token reads, and every token decays the sums.

    Args:
        place, decay, run: groups of options. In mode "chunk" a query reads the chunks before its chunk.
        rank: r.
        lift: "none"; "cg", `clebsch_gordan` ψ of 2 r / 3 numbers; or "cg_projected", Φ ψ of r numbers (r + 1 for odd r)
            with a learned map Φ to r features, which all heads share and which starts orthogonal (Echo, Appendix B.4).
        value_dim: P; None means D / H.
        beta: whether each token has a strength `β = σ(x W_β)` in the sums, one per head; else it is 1.
        power: K of the power filter; 0 is ridge regression, 2 the paper's.
        mix: "learned", one μ per head, "koopman" (μ = 1, the paper's), "ridge" (μ = 0), or "powers", a learned sum over
            the powers from 0 to K, which starts at the first power (see `Readout`).
        gamma: γ; None means learned in [1, 1.5], one per head.
        conv_size: taps of a short convolution with SiLU on q, k and v; 0 for none. Each has taps of its own, so queries
            that start as keys (`query_init`) equal them before the convolution.
        query_init: "key" or "own". With "key", queries are the keys plus `x W_q`, and W_q starts at zero. One power of
            the operator maps the key of a token to the key that followed it, so at K = 1 the layer recalls before
            training. With "own" (the paper's), queries are `x W_q`, and W_q starts orthogonal.
        ridge: ε.
        mode: "chunk"; "prefix", where a call without a state reads one operator of all its tokens, and later calls read
            one operator per token; or "masked", where every call reads one operator of the tokens in the action mask,
            in both directions, and has no state. The last two let information flow from future tokens.
        refresh: "chunk", or "token" for one operator per token.
        decode_refresh: the same for a call with a state and one token a sequence in evaluation mode; None means
            `refresh`. The paper trains by chunk and decodes by token. Here a token reads the operator of those before
            it; §3.5 may mean its own too. The first token after a change begins a chunk.
        normalization: "causal", "trace", "sequence" or "paper" (`ops.koopman_attention`). In the last two information
            flows from future tokens. With "token" every key and query is divided by its own norm (Remark 5).
        operator: "whitened", or "main_text" (`ops.koopman_attention`).
        eta_init: initial η.
        features: "own" projections; or "mixer", the keys, queries and values of the nearest Mamba layer before, which
            needs `share_features` (§6.1: "degrades both").
        gate: "none", or "sigmoid", `σ(x W_g + b)` on every channel of y (§6.1: "failed"; the paper gives no formula).

    Raises:
        ValueError: a name is unknown, the heads do not divide the hidden size, or a size does not fit.
    """

    MIXES = ("koopman", "ridge", "learned", "powers")
    QUERY_INITS = ("key", "own")
    LIFTS = ("none", "cg", "cg_projected")
    FEATURES = ("own", "mixer")
    OUTPUT_GATES = ("none", "sigmoid")
    reads_action_mask = True
    maps_of_input = ("q_proj", "k_proj", "v_proj", "beta_proj")

    def __init__(
        self,
        place: Place,
        decay: SumDecay,
        run: Run,
        *,
        rank: int = 48,
        lift: str = "none",
        value_dim: int | None = None,
        beta: bool = False,
        power: Annotated[int, AtLeast(0)] = 1,
        mix: str = "learned",
        gamma: float | None = None,
        conv_size: int = 0,
        query_init: str = "key",
        ridge: float = 1e-3,
        refresh: str = "chunk",
        normalization: str = "causal",
        mode: str = "chunk",
        decode_refresh: str | None = None,
        operator: str = "whitened",
        eta_init: float = 1.5,
        features: str = "own",
        gate: str = "none",
    ) -> None:
        super().__init__()
        check_choice("features", features, self.FEATURES)
        check_choice("gate", gate, self.OUTPUT_GATES)
        if features == "mixer" and (query_init, lift, conv_size) != ("own", "none", 0):
            raise ValueError("features 'mixer' are read as they are: query_init is 'own', without lift and conv_size")
        self.unit_keys = normalization == "token"
        normalization = "causal" if self.unit_keys else normalization  # the largest norm of unit keys is 1
        check_choice("mix", mix, self.MIXES)
        check_choice("query_init", query_init, self.QUERY_INITS)
        check_choice("lift", lift, self.LIFTS)
        if lift == "cg" and rank % 3:
            raise ValueError(f"rank must be a multiple of 3 for lift 'cg'; got {rank}")
        if mix == "powers" and power < 1:
            raise ValueError(f"mix 'powers' starts at the first power, so power must be at least 1; got {power}")
        if gamma is not None and gamma <= 0:
            raise ValueError(f"gamma must be positive; got {gamma}")
        check_settings(ridge, power, run.chunk_size, refresh, normalization, mode, operator)
        check_settings(ridge, power, run.chunk_size, decode_refresh or refresh, normalization)
        if mode == "masked" and decay.decay is not None:
            raise ValueError("mode 'masked' reads in both directions, so its tokens have no age; a decay needs another")
        if mode != "chunk" and (decode_refresh is not None or refresh != "chunk"):
            raise ValueError(f"refresh and decode_refresh are options of mode 'chunk'; got mode {mode!r}")
        self.mode, self.decode_refresh = mode, decode_refresh or refresh
        self.reads_in_pieces = mode == "chunk" and normalization in ("causal", "trace")
        hidden_size, num_heads = place.hidden_size, place.num_heads
        self.num_heads, width = num_heads, value_dim or place.head_size()
        sizes = {"none": rank, "cg": 2 * rank // 3, "cg_projected": rank + rank % 2}
        self.lift, size = lift, num_heads * sizes[lift]
        self.query_init, self.features, self.rank = query_init, features, rank
        self.initial = {
            "phi": orthogonal, "q_proj": uniform(0) if query_init == "key" else orthogonal, "k_proj": orthogonal,
            "out_proj": uniform(0),
        }  # fmt: skip
        self.phi = drawn(3 * sizes[lift] // 2, rank, orthogonal) if lift == "cg_projected" else None
        self.backend = run.backend
        self.options = {
            "power": power, "ridge": ridge, "chunk_size": run.chunk_size, "refresh": refresh,
            "normalization": normalization, "operator": operator,
        }  # fmt: skip
        self.splits = [size, size, num_heads * width]
        if features == "own":
            self.q_proj = drawn(hidden_size, size, self.initial["q_proj"])
            self.k_proj = drawn(hidden_size, size, self.initial["k_proj"])
            self.v_proj = nn.Linear(hidden_size, num_heads * width, bias=False)
        self.conv = ShortConv(sum(self.splits), conv_size) if conv_size else None
        self.add_decay(decay, place, head_dim=rank, granularity=decay.granularity, rank=hidden_size // num_heads)
        self.beta_proj = nn.Linear(hidden_size, num_heads, bias=False) if beta else None
        self.readout = Readout(num_heads, mix, eta_init, power, gamma)
        self.out_proj = drawn(num_heads * width, hidden_size, self.initial["out_proj"])
        self.gate_proj = nn.Linear(hidden_size, hidden_size) if gate == "sigmoid" else None

    def reset_parameters(self) -> None:
        reset(self, self.initial)

    def mix(self, x: Tensor, state: State, packing: Packing, shared: Shared | None) -> tuple[Tensor, State]:
        q, k, v, others = self.heads(x, state, packing, shared)
        weights, decayed = self.weights(x, state, packing)
        others |= decayed
        before = {name: part for name, part in state.items() if name not in ("position", "conv", "decay")} or None
        mask = (shared or {}).get("action_mask")
        if self.mode == "masked" and state:
            raise ValueError("mode 'masked' reads in both directions, so it has no state to continue from")
        if self.mode == "chunk" or before is not None:
            y, new = self.read(q, k, v, weights, mask, before, packing)
        else:
            y, new = self.read_whole(q, k, v, weights, mask, packing)
        y = y.flatten(-2)
        y = self.out_proj(y.half() if x.dtype == torch.float16 else y)
        return y if self.gate_proj is None else y * self.gate_proj(x).sigmoid(), {**new, **others}

    def heads(
        self, x: Tensor, state: State, packing: Packing, shared: Shared | None
    ) -> tuple[Tensor, Tensor, Tensor, State]:
        """Queries and keys `[B, T, H, R]`, values `[B, T, H, P]`, and the state of the short convolution, if any."""
        new = {}
        if self.features == "mixer":
            q, k, v = taken_features(shared, x.shape[:2], self.num_heads, self.rank, self.splits[-1])
        else:
            parts = [self.q_proj(x), self.k_proj(x), self.v_proj(x)]
            if self.query_init == "key":
                parts[0] = parts[0] + parts[1]
            if self.conv is not None:
                joined, new["conv"] = self.conv(torch.cat(parts, -1), state.get("conv"), packing)
                parts = joined.split(self.splits, -1)
            q, k, v = (part.unflatten(-1, (self.num_heads, -1)) for part in parts)
            q, k = self.lifted(q, x.dtype), self.lifted(k, x.dtype)
        if self.unit_keys:
            q, k = (l2_normalize(part.to(ROOMY[part.dtype]), eps=1e-24, backend=self.pass_backend) for part in (q, k))
        return q, k, v, new

    def weights(self, x: Tensor, state: State, packing: Packing) -> tuple[dict[str, Tensor], State]:
        """The op's `g [B, T, H]` or `[B, T, H, R]` and `beta [B, T, H]`, if any, and the state of the decay."""
        weights, decayed = {}, {}
        if self.decay is not None:
            position = packing.positions(state.get("position"), x.device)
            (weights["g"], *_), decayed = self.log_decays(self.decay_input(x), position, state, packing)
        if self.beta_proj is not None:
            beta = self.beta_proj(x)
            weights["beta"] = beta.to(ROOMY[beta.dtype]).sigmoid()
        return weights, decayed

    def lifted(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Queries or keys `[B, T, H, R]` from their projections; Φ reads features in `dtype`, that of the inputs."""
        if self.lift == "none":
            return x
        features = clebsch_gordan(x.to(compute_dtype(x)))
        if self.phi is None:
            return features
        rows = features.to(dtype).flatten(1, 2)  # libraries of adapters read an input of four axes as an image
        return self.phi(rows).unflatten(1, features.shape[1:3]).to(features.dtype)

    def read(
        self, q: Tensor, k: Tensor, v: Tensor, weights: dict[str, Tensor], mask: Tensor | None, state: State | None,
        packing: Packing,
    ) -> tuple[Tensor, State]:  # fmt: skip
        """Causal: each query reads earlier tokens."""
        refresh = "token" if self.mode == "prefix" else self.options["refresh"]
        if state is not None:
            if max(packing.counts, default=0) <= 1 and not self.training and self.mode == "chunk":
                refresh = self.decode_refresh
            size = 1 if refresh == "token" else self.options["chunk_size"]
            state = convert_state(state, size, self.options["normalization"])
        options = {**self.options, **weights, "refresh": refresh, "backend": self.backend, "mask": mask}
        options |= {"initial_state": state, "cu_seqlens": packing}
        if not q.is_cpu and (found := self.readout.token(q, k, v, **options)) is not None:
            return found
        result = self.readout(q, k, v, **options)
        new = result.state
        if torch.compiler.is_exporting() and self.mode == "chunk" and self.options["refresh"] == "chunk":
            # The graphs of a step and of a prompt share a state.
            new = convert_state(new, self.options["chunk_size"], self.options["normalization"])
        return result.y, new

    def read_whole(
        self, q: Tensor, k: Tensor, v: Tensor, weights: dict[str, Tensor], mask: Tensor | None,
        packing: Packing,
    ) -> tuple[Tensor, State]:  # fmt: skip
        """In both directions: all queries of a sequence read one operator of its tokens."""
        if self.mode == "masked" and mask is None:
            mask = torch.ones(k.shape[:2], device=k.device)
        lengths = [q.shape[1]] if packing.cu_seqlens is None else packing.counts
        named = {**weights, **({} if mask is None else {"mask": mask})}
        parts = zip(*(x.split(lengths, 1) for x in (q, k, v, *named.values())), strict=True)
        options = {**self.options, "mode": self.mode, "refresh": "token", "backend": self.backend}
        results = [self.readout(*part[:3], **options, **dict(zip(named, part[3:], strict=True))) for part in parts]
        if not results:
            return torch.zeros_like(v), {}
        y, states = torch.cat([result.y for result in results], 1), [result.state for result in results]
        if self.mode == "masked":
            return y, {}
        return y, {name: torch.cat([one[name] for one in states]) for name in states[0]}
