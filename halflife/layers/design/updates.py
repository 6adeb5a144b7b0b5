"""The updates of the design-space block: how a token changes the state. Each is a group of options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from halflife.layers.mixer import State
from halflife.layers.parts import ShortConv
from halflife.ops import dplr
from halflife.ops.chunked.groups import weigh
from halflife.ops.laws import Unevaluated
from halflife.packing import Packing
from halflife.precision import ROOMY
from halflife.registry import check_choice

Block = Any  # a `LinearMixer`, whose module imports this one


class Tokens(NamedTuple):
    """What an update reads: the input x, queries, keys, values and log-decays, and the state before them.

    `gain` is the factor of what is written, `[T, H]` or `[B, T, H]`, under `stretch_gain`. g may be `Unevaluated`.
    """

    x: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    g: Any
    gain: Tensor | None
    state: State
    packing: Packing


@dataclass(frozen=True, kw_only=True)
class Update:
    """How a token changes the state of the block.

    Its maps are children of the block, so they have the names that checkpoints know. The block has `beta_proj`, the
    projection to the writing strengths β, where the update `has_strength`.

    Class attributes:
        name: what messages call it.
        has_strength, strength_bias: whether the update has β, and their projection a bias.
        unit_keys, unit_queries: whether keys must have norm 1, and whether queries then have it too.
        steps: the number of steps of a token, each with its key, value and strength.
        stretch_gain: whether PoST stretches what is written.
        norms_apart: whether the update itself normalises queries and keys.
        takes_law: whether it takes `Unevaluated` log-decays.

    Attributes:
        allow_neg_eigval: writing strengths β in (0, 2) instead of (0, 1). The transition `I − β k kᵀ` of the delta rule
            can then have negative eigenvalues, which state tracking needs (Grazzi et al. 2025).
    """

    name: ClassVar[str]
    has_strength = True
    strength_bias = False
    unit_keys = True
    unit_queries = True
    steps = 1
    stretch_gain = False
    norms_apart = False
    takes_law = False
    allow_neg_eigval: bool = False

    def chosen(self, vector: bool) -> Update:
        """The update under a vector decay, or under a scalar one or none."""
        return self

    def convolution(self, splits: Sequence[int], size: int) -> ShortConv:
        """The short convolution on queries, keys and values of `splits` channels."""
        return ShortConv(sum(splits), size)

    def add_maps(self, block: Block, hidden_size: int) -> None:
        """Add the maps that only this update has."""

    @property
    def most(self) -> float:
        """The limit of writing strengths, or of an erase gate."""
        return 2.0 if self.allow_neg_eigval else 1.0

    def strength(self, block: Block, x: Tensor) -> Tensor:
        """The writing strengths β `[B, T, steps · H]`."""
        beta = block.beta_proj(x)
        beta = beta.to(ROOMY[beta.dtype]).sigmoid()
        return 2 * beta if self.allow_neg_eigval else beta

    def __call__(self, block: Block, tokens: Tokens) -> tuple[Tensor, State]:
        """Return the outputs `[B, T, H, V]` of the op, and the memories after it by name."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class UpdateChoice(Update):
    """An update of linear attention, the delta rule or DPLR.

    Attributes:
        update: "linear", "delta", or "dplr", `S_t = (diag λ_t − β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ`. DPLR reads the
            state before the decay, and the delta rule after it; without a decay they are the same. "dplr_released", as
            the Decay paper's authors ran it, has β in (0, 2), and queries of any norm. It is the delta rule for a
            scalar decay, and `S_t = (I − β_t k_t k_tᵀ) diag λ_t S_{t−1} + k_t v_tᵀ` for a vector decay.
        stretch_gain: whether PoST stretches what is written as the decay: β of the delta rule, and else k.
    """

    update: str = "linear"
    stretch_gain: bool = False

    def __post_init__(self) -> None:
        check_choice("update", self.update, UPDATES)
        if self.allow_neg_eigval and self.update == "linear":
            raise ValueError(
                "allow_neg_eigval changes the writing strength β of the delta rule, but the update is linear"
            )

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.update

    @property
    def has_strength(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.update != "linear"

    unit_keys = has_strength

    @property
    def takes_law(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.update in ("linear", "delta") and not self.stretch_gain

    def chosen(self, vector: bool) -> Update:
        if self.update != "dplr_released":
            return self
        update = self.update if vector else "delta"
        return ReleasedUpdate(update=update, allow_neg_eigval=True, stretch_gain=self.stretch_gain)

    def __call__(self, block: Block, tokens: Tokens) -> tuple[Tensor, State]:
        if isinstance(tokens.g, Unevaluated):
            logits = block.beta_proj(tokens.x) if self.has_strength else None
            return _remember(block, tokens._replace(g=tokens.g._replace(most=self.most)), tokens.k, logits)
        gain = None if tokens.gain is None else tokens.gain.to(tokens.k.dtype)
        if not self.has_strength:
            k = tokens.k if gain is None else weigh(tokens.k, gain.expand(*tokens.k.shape[:2], -1).unsqueeze(-1), 2)
            return _remember(block, tokens, k, None)
        beta = self.strength(block, tokens.x)
        return UPDATES[self.update](block, tokens, tokens.k, beta if gain is None else beta * gain)


class ReleasedUpdate(UpdateChoice):
    """What "dplr_released" is under a vector decay, or under a scalar one or none."""

    unit_queries = False


def _remember(block: Block, tokens: Tokens, k: Tensor, beta: Tensor | None) -> tuple[Tensor, State]:
    x, q, _, v, g, _, state, packing = tokens
    return block.memory(x, q, k, v, g, beta, state, packing, **block.op_options)


def _dplr(block: Block, tokens: Tokens, k: Tensor, beta: Tensor) -> tuple[Tensor, State]:
    return by_dplr(block, tokens, tokens.q, k * beta.unsqueeze(-1), tokens.v, -k, None)


def _released_dplr(block: Block, tokens: Tokens, k: Tensor, beta: Tensor) -> tuple[Tensor, State]:
    assert tokens.g is not None
    written = k * beta.unsqueeze(-1)
    return by_dplr(block, tokens, tokens.q, k, tokens.v, -k * tokens.g.exp().to(k.dtype), written)


UPDATES = {"linear": _remember, "delta": _remember, "dplr": _dplr, "dplr_released": _released_dplr}


def by_dplr(
    block: Block, tokens: Tokens, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor | None
) -> tuple[Tensor, State]:
    """`S_t = diag λ_t S_{t−1} + b_t (a_tᵀ S_{t−1}) + k_t v_tᵀ`, where no b is k."""
    o, memory = dplr(
        q, k, v.to(ROOMY[v.dtype]), a, b, tokens.g,
        initial_state=tokens.state.get("memory"), output_final_state=True,
        cu_seqlens=tokens.packing, **block.op_options,
    )  # fmt: skip
    assert memory is not None
    return o, {"memory": memory}
