"""The design-space block, which combines any decay with any update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from halflife.layers.decay_gate import DecayGate
from halflife.layers.design.gates import GATES
from halflife.layers.design.updates import Tokens, Update, UpdateChoice
from halflife.layers.memory.choice import HasMemory, MemoryChoice
from halflife.layers.mixer import LAYERS, Shared, State
from halflife.layers.options import DecayChoice, Place, Run, check_gain
from halflife.layers.parts import FEATURE_MAPS, ROPE_BASE, ShortConv, is_watched, map_of_gated, rotary, turns
from halflife.ops.backends.split import split, split_silu
from halflife.ops.fused import l2_normalize
from halflife.ops.recurrent import Unconvolved
from halflife.packing import Packing
from halflife.position import check_pairs, half_lrpe, lrpe
from halflife.precision import ROOMY
from halflife.registry import AtLeast, check_choice

POSITIONS = ("none", "rope", "lrpe", "half_lrpe")
SHARING = ("linear", "delta")  # updates whose heads can share queries and keys


@dataclass(frozen=True, kw_only=True)
class Keys:
    """Queries, keys and values of the block.

    Attributes:
        head_dim: K; None means D / H.
        value_dim: V; None means D / H.
        num_key_heads: G, heads of queries and keys, each of which serves H / G heads; None means H. It is an option of
            the linear and the delta update.
        share_keys: write `k = 1 − λ`, or the decay's own shared key, instead of projected keys (vector decay only).
        position: "none", "rope", "lrpe", which doubles the rows of the state, or "half_lrpe", LRPE on half of the
            channels, which the Decay paper's authors ran as RoPE. The two channels that RoPE rotates share one decay.
        conv_size: taps of a short convolution on q, k, v; 0 for none.
        activation: "silu" or "none", on q and k. With a short convolution, its SiLU on q, k and v takes this place.
        feature_map: "none", or a function of queries and keys, also after a short convolution: "relu", "relu2", "silu",
            "gelu", "sigmoid" or "tanh".
        qk_norm: whether to L2-normalise q and k. None means True for the delta rule and DPLR, which need it, but for q
            of "dplr_released".
    """

    head_dim: int | None = None
    value_dim: int | None = None
    num_key_heads: int | None = None
    share_keys: bool = False
    position: str = "none"
    conv_size: int = 0
    activation: str = "silu"
    feature_map: str = "none"
    qk_norm: bool | None = None

    def __post_init__(self) -> None:
        check_choice("position", self.position, POSITIONS)
        check_choice("activation", self.activation, ("silu", "none"))
        check_choice("feature_map", self.feature_map, ("none", *FEATURE_MAPS))


@dataclass(frozen=True, kw_only=True)
class BlockDecay(DecayChoice):
    """The decay of the block.

    Attributes:
        granularity: "scalar" or "vector".
        decay_rank: rank of the projection of a vector decay; None means D / H, and 0 full rank.
        decay_bias: whether that projection has a bias.
    """

    decay: str | None = "simple"
    granularity: str = "vector"
    decay_rank: Annotated[int | None, AtLeast(0)] = None
    decay_bias: bool = False


@dataclass(frozen=True, kw_only=True)
class OutputGate:
    """The output of the block.

    Attributes:
        gate: "low_rank" (the paper's); or a norm over each head, then "swish" or "sigmoid" of a full projection,
            "low_rank_sigmoid", a projection of rank V (KDA), or "none".
        norm_eps: eps of the output norm.
    """

    gate: str = "low_rank"
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        check_choice("gate", self.gate, GATES)


@LAYERS.add("linear")
class LinearMixer(DecayGate, HasMemory):
    """The design-space block, which combines any decay, granularity, key sharing, position encoding and update.

    The defaults are those of the Decay Linear Transformer (Decay, §3): SiLU on queries and keys, a low-rank sigmoid
    output gate, then an RMS norm. GLA, RetNet, DeltaNet and others are rows: this block with other defaults.

    Args:
        place, keys, decay, update, memory, output, run: groups of options.

    Class attributes:
        defaults: options of a row whose defaults are other ones. A function takes the options given.
        fixed: options that define a row and cannot change.

    Raises:
        ValueError: a name is unknown, or a combination has no meaning; the message gives the reason.
    """

    maps_of_input = (
        "qkv_proj", "beta_proj", "decay_proj.down", "decay_proj.up", "gate.proj", "gate.down", "gate_rank.proj",
        "erase_proj", "write_proj",
    )  # fmt: skip
    defaults: ClassVar[Mapping[str, Any]] = {}
    fixed: ClassVar[Mapping[str, Any]] = {}

    def __init__(
        self,
        place: Place,
        keys: Keys,
        decay: BlockDecay,
        update: UpdateChoice | Update,
        memory: MemoryChoice,
        output: OutputGate,
        run: Run,
    ) -> None:
        super().__init__()
        vector = decay.decay is not None and decay.granularity == "vector"
        self.update, self.num_heads = update.chosen(vector), place.num_heads
        self.num_key_heads = keys.num_key_heads or self.num_heads
        self.position, self.activation, self.feature_map = keys.position, keys.activation, keys.feature_map
        self.share_keys = keys.share_keys
        self.head_dim = keys.head_dim or place.head_size()
        self.value_dim = keys.value_dim or place.head_size()
        self.chunk_size, self.backend = run.chunk_size, run.backend
        self._check(decay, vector)
        # The number of decays that two channels of the encoded keys share, RoPE's pair or LRPE's cosine and sine.
        self.paired = {"none": 0, "lrpe": self.head_dim}.get(keys.position, self.head_dim // 2) if vector else 0
        width = place.hidden_size // place.num_heads if decay.decay_rank is None else decay.decay_rank
        self.add_decay(
            decay, place, head_dim=self.head_dim // 2 if vector and keys.position == "rope" else self.head_dim,
            granularity=decay.granularity, rank=None if keys.share_keys else width or None, bias=decay.decay_bias,
        )  # fmt: skip
        query, value = self.num_key_heads * self.head_dim, self.num_heads * self.value_dim
        times = self.update.steps
        self.splits = [query, times * value] if keys.share_keys else [query, times * query, times * value]
        self.qkv_proj = nn.Linear(place.hidden_size, sum(self.splits), bias=False)
        self.conv = self.update.convolution(self.splits, keys.conv_size) if keys.conv_size else None
        self.beta_proj = None
        if self.update.has_strength:
            self.beta_proj = nn.Linear(place.hidden_size, times * self.num_heads, bias=self.update.strength_bias)
        self.add_memory(memory, place, decay=decay.decay, granularity=decay.granularity, update=self.update.name)
        self.gate = GATES[output.gate](place.hidden_size, self.num_heads, self.value_dim, output.norm_eps)
        self.out_proj = nn.Linear(value, place.hidden_size, bias=False)
        self.update.add_maps(self, place.hidden_size)
        self.unit_keys = self.update.unit_keys if keys.qk_norm is None else keys.qk_norm
        self.unit_queries = self.unit_keys and (self.update.unit_queries or keys.qk_norm is not None)
        # The channels and size of queries and keys that a GPU normalises in the kernel of the convolution.
        follows = self.unit_queries and not self.update.norms_apart and self.conv is not None
        follows = follows and keys.feature_map == "none" and not keys.share_keys
        self.unit_outputs = (sum(self.splits[:-1]), self.head_dim) if follows else None

    def _check(self, decay: BlockDecay, vector: bool) -> None:
        if self.num_heads % self.num_key_heads:
            raise ValueError(f"num_key_heads must divide num_heads; got {self.num_key_heads} and {self.num_heads}")
        if self.num_key_heads != self.num_heads and (self.share_keys or self.update.name not in SHARING):
            raise ValueError(
                f"num_key_heads is for projected keys and the {' or the '.join(SHARING)} update; got update "
                f"{self.update.name!r}{' and share_keys' if self.share_keys else ''}"
            )
        if self.share_keys and not vector:
            raise ValueError("share_keys writes k = 1 − λ with one λ per channel, so it needs a vector decay")
        if self.update.stretch_gain:
            check_gain(decay.post, delta=self.update.has_strength)
            if vector:
                raise ValueError("stretch_gain needs a scalar decay")
        if self.position == "rope":
            check_pairs(self.head_dim)

    @classmethod
    def complete(cls, options: dict[str, Any]) -> dict[str, Any]:
        """Return the options by name with the row's defaults. Mappings of options are merged.

        Raises:
            ValueError: an option that defines the row has another value.
        """
        for name, value in cls.fixed.items():
            if options.get(name, value) != value:
                raise ValueError(f"{name} is {value!r} in {cls.__name__} and cannot change; got {options[name]!r}")
        completed = {**cls.fixed, **options}
        for name, default in cls.defaults.items():
            value, given = default(options) if callable(default) else default, options.get(name)
            if isinstance(value, Mapping):
                completed[name] = {**value, **(given or {})}
            else:
                completed.setdefault(name, value)
        return completed

    @property
    def encoded_dim(self) -> int:
        """The channels of a key with its position."""
        return self.head_dim + {"lrpe": self.head_dim, "half_lrpe": self.head_dim // 2}.get(self.position, 0)

    @property
    def op_options(self) -> dict[str, Any]:
        """Options of the op."""
        return {"scale": self.head_dim**-0.5, "chunk_size": self.chunk_size, "backend": self.backend}

    def mix(self, x: Tensor, state: State, packing: Packing, shared: Shared | None) -> tuple[Tensor, State]:
        position = packing.positions(state.get("position"), x.device)
        g, key, gain, new = None, None, None, {}
        qkv = self.qkv_proj(x)
        token = not x.is_cpu and self.one_kernel and self.decodes(qkv, state, packing)
        law = None
        if not x.is_cpu and self.decay is not None and (self.decay.leaves_law if token else self.joins_gates):
            law = partial(self.decay, position=position, parts=True, with_step=False)
        if self.decay is not None and law is None:
            f = self.decay_input(x, not x.is_cpu and self.decay.passes_law and not self.share_keys)
            parts, new = self.log_decays(f, position, state, packing, shared, with_step=self.share_keys)
            g = parts.g
            if self.update.stretch_gain and parts.log_stretch is not None:
                gain = parts.log_stretch().exp()
            if self.share_keys:
                key = self.decay.shared_key(f, parts, state.get("decay"), packing)
            if self.paired:
                g = torch.cat([g[..., : self.paired], g], -1)
        if token:
            run = lambda g: self._token(x, qkv, g, position, state, packing)  # noqa: E731
            o, memory = run(g) if law is None else law(self.decay_input(x, token), then=lambda parts: run(parts.g))
        else:
            units = None if qkv.is_cpu or qkv.dtype != ROOMY[qkv.dtype] else self.unit_outputs
            if self.conv is None:
                parts = (split_silu if self.activation == "silu" else split)(qkv, self.splits)
            else:
                given = (qkv, state.get("conv"), packing)
                parts, new["conv"] = self.conv(*given, units=units, splits=self.splits)
            q, k, v = self.heads(parts, key, position, units is not None, packing.kept)
            tokens = Tokens(x, q, k, v, g, gain, state, packing)
            run = lambda parts: self.update(self, tokens._replace(g=parts.g))  # noqa: E731
            o, memory = self.update(self, tokens) if law is None else law(self.decay_input(x), then=run)
        o, new = o.to(ROOMY[x.dtype]), new | memory
        if x.is_cpu or is_watched(self.gate):
            y = self.gate(o, x)
            return self.out_proj(y.half() if x.dtype == torch.float16 else y), new
        o = o.flatten(-2) if self.gate.over_all else o
        return map_of_gated(self.gate.norm, o, self.gate.logits(x), self.out_proj, x.dtype), new

    @property
    def joins_gates(self) -> bool:
        """Whether one pass computes the log-decays with other gates."""
        others = self.beta_proj is not None or self.memory_kind == "gate_rank"
        return self.update.takes_law and others and not (self.share_keys or self.paired) and self.joins(self.decay)

    @property
    def one_kernel(self) -> bool:
        """Whether one kernel takes a token from the projection to the outputs of the op."""
        plain = self.update.takes_law and self.feature_map == "none" and self.unit_queries == self.unit_keys
        plain = plain and (self.position == "none" or (self.position == "rope" and not self.paired))
        return plain and (self.conv is None or type(self.conv) is ShortConv) and not self.share_keys

    def _token(
        self, x: Tensor, qkv: Tensor, g: Any, position: Tensor, state: State, packing: Packing
    ) -> tuple[Tensor, State]:
        """The outputs of the op for one token of each sequence, and the new state."""
        query, key, _ = self.splits
        token = {
            "places": (0, query, query + key), "groups": self.num_key_heads, "unit": self.unit_keys,
            "most": self.update.most,
        }  # fmt: skip
        if self.position == "rope":
            token["angles"] = turns(qkv[..., : self.head_dim], position, ROPE_BASE, packing.kept)
        if self.conv is None:
            token = Unconvolved(qkv, None, None, None, silu=self.activation == "silu", **token)
        else:
            token = self.conv(qkv, state["conv"], packing, **token)
        beta = None if self.beta_proj is None else self.beta_proj(x)
        return self.memory(x, token, None, None, g, beta, state, packing, **self.op_options)

    def heads(
        self, parts: Sequence[Tensor], shared_key: Tensor | None, position: Tensor, normed: bool = False,
        kept: dict[Any, Any] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Queries `[B, T, G, K]`, keys `[B, steps · T, G, K]` and values `[B, steps · T, H, V]`.

        Queries and keys are activated, normalised and encoded (2 K channels under LRPE).

        Args:
            parts: the parts of the projection, after the short convolution or SiLU.
            shared_key: of the decay, or None for projected keys.
            normed: whether queries and keys are unit vectors already.
            kept: see `parts.rotary`.
        """
        q, *projected, v = parts
        q, v = self.featured(q.unflatten(-1, (self.num_key_heads, -1))), self._rows(v, self.value_dim)
        if shared_key is None:
            k = self.featured(self._rows(projected[0], self.head_dim))
        else:
            k = shared_key.to(q.dtype)
            k = torch.cat([k, k], -1) if self.position == "rope" else k
        if self.unit_keys and not normed and not self.update.norms_apart:
            q, k = (x.to(ROOMY[x.dtype]) for x in (q, k))
            q = l2_normalize(q, backend=self.pass_backend) if self.unit_queries else q
            k = l2_normalize(k, backend=self.pass_backend)
        if self.position == "rope":
            q, k = rotary(q, k, position, backend=self.pass_backend, kept=kept)
        elif self.position != "none":
            encode = {"lrpe": lrpe, "half_lrpe": half_lrpe}[self.position]
            q, k = encode(q, position), encode(k, position)
        return q, k, v

    def _rows(self, x: Tensor, size: int) -> Tensor:
        """`[B, T, steps · H · size]` → `[B, steps · T, H, size]`."""
        if self.update.steps == 1:
            return x.unflatten(-1, (-1, size))
        return x.unflatten(-1, (self.update.steps, -1, size)).flatten(1, 2)

    def featured(self, x: Tensor) -> Tensor:
        """The feature map of queries and keys."""
        return x if self.feature_map == "none" else FEATURE_MAPS[self.feature_map](x)
