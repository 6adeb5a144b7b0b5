"""The updates of single rows of the design-space block: Gated DeltaNet-2's, Comba's, DeltaProduct's and MesaNet's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halflife.layers.design.updates import Block, Tokens, Update, by_dplr
from halflife.layers.memory.choice import one_state
from halflife.layers.mixer import State
from halflife.layers.parts import ShortConv
from halflife.ops import ridge_attention
from halflife.ops.backends.split import split
from halflife.ops.dplr import erase_write, feedback_keys
from halflife.packing import Packing
from halflife.precision import ROOMY, Float32Module, inverse_softplus_of


@dataclass(frozen=True, kw_only=True)
class EraseWrite(Update):
    """Gated DeltaNet-2's: an erase gate on the key's channels (`allow_neg_eigval`), and a write gate on the value's."""

    name, has_strength = "erase_write", False

    def add_maps(self, block: Block, hidden_size: int) -> None:
        block.erase_proj = nn.Linear(hidden_size, block.num_heads * block.head_dim, bias=False)
        block.write_proj = nn.Linear(hidden_size, block.num_heads * block.value_dim, bias=False)

    def __call__(self, block: Block, tokens: Tokens) -> tuple[Tensor, State]:
        x, q, k, v, g, *_ = tokens
        assert g is not None
        gates = block.erase_proj(x), block.write_proj(x)
        read, v = erase_write(*gates, k, v, g, self.most, block.pass_backend)
        return by_dplr(block, tokens, q, k, v, read, None)


@dataclass(frozen=True, kw_only=True)
class Feedback(Update):
    """Comba's: a fraction of the key reads the state.

    Attributes:
        correction: initial d. The authors suggest 0.02 for small models.
        normalize_feedback: whether p is L2-normalised in the state, as in fla's layer, which cancels σ(b) there.
    """

    name, norms_apart = "feedback", True
    correction: float = 1.0
    normalize_feedback: bool = False

    def add_maps(self, block: Block, hidden_size: int) -> None:
        block.feedback = FeedbackShare(block.num_heads, self.correction)

    def __call__(self, block: Block, tokens: Tokens) -> tuple[Tensor, State]:
        x, q, k, v, *_ = tokens
        settings = self.most, self.normalize_feedback, ROOMY[v.dtype], block.pass_backend
        q, written, read = block.feedback(q, k, block.beta_proj(x), *settings)
        return by_dplr(block, tokens, q, written, v, read, None)


class FeedbackShare(nn.Module):
    """Comba's two numbers of a head: the share σ(b) of the key that reads the state, and the weight d of its output.

    Both start at fla's values: b = 1, and d = `correction`.
    """

    def __init__(self, num_heads: int, correction: float) -> None:
        super().__init__()
        self.correction = correction
        self.share = nn.Parameter(torch.empty(num_heads))
        self.output = nn.Parameter(torch.empty(num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.share)
        nn.init.constant_(self.output, self.correction)

    def forward(self, q: Tensor, k: Tensor, logits: Tensor, *settings: Any) -> tuple[Tensor, Tensor, Tensor]:
        """`ops.dplr.feedback_keys` with these numbers."""
        return feedback_keys(q, k, logits, self.share, self.output, *settings)


@dataclass(frozen=True, kw_only=True)
class Product(Update):
    """DeltaProduct's: several steps of the delta rule for each token.

    Attributes:
        allow_neg_eigval: whether β lies in (0, 2), as in the paper, or in (0, 1).
        num_householder: n, the steps of a token.
    """

    name = "product"
    allow_neg_eigval: bool = True
    num_householder: int = 2

    @property
    def steps(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.num_householder

    def __call__(self, block: Block, tokens: Tokens) -> tuple[Tensor, State]:
        x, q, k, v, g, _, state, packing = tokens
        beta, more = self.strength(block, x).unflatten(-1, (self.steps, -1)).flatten(1, 2), self.steps - 1
        q = F.pad(q.unsqueeze(2), (0, 0, 0, 0, more, 0)).flatten(1, 2)
        if g is not None:
            g = F.pad(g.unsqueeze(2), (*[0, 0] * (g.ndim - 2), 0, more)).flatten(1, 2)
        o, new = one_state(x, q, k, v, g, beta, state, packing.repeated(self.steps), **block.op_options)
        return o[:, more :: self.steps], new


@dataclass(frozen=True, kw_only=True)
class Ridge(Update):
    """MesaNet's: ridge regression on all tokens so far. Its short convolution leaves the values out.

    Attributes:
        iterations, tolerance: of conjugate gradients, see `ops.ridge_attention`.
    """

    name, strength_bias = "ridge", True
    iterations: int = 30
    tolerance: float = 1e-6

    def convolution(self, splits: Sequence[int], size: int) -> ShortConv:
        return KeyConv(sum(splits[:2]), size)

    def add_maps(self, block: Block, hidden_size: int) -> None:
        block.ridge = LearnedRidge(block.num_heads, block.encoded_dim)

    def __call__(self, block: Block, tokens: Tokens) -> tuple[Tensor, State]:
        x, q, k, v, g, _, state, packing = tokens
        assert g is not None
        o, sums = ridge_attention(
            q, k, v.to(ROOMY[v.dtype]), g, self.strength(block, x), block.ridge().to(g.dtype),
            initial_state=(state["gram"], state["memory"]) if "gram" in state else None, output_final_state=True,
            cu_seqlens=packing, chunk_size=block.chunk_size, backend=block.backend, iterations=self.iterations,
            tolerance=self.tolerance,
        )  # fmt: skip
        assert sums is not None
        return o, {"gram": sums[0], "memory": sums[1]}


class KeyConv(ShortConv):
    """A short convolution on the first channels, those of q and k. The others pass unchanged."""

    def forward(
        self, x: Tensor, state: Tensor | None, packing: Packing, splits: Sequence[int], **options: Any
    ) -> tuple[list[Tensor], Tensor]:
        convolved, others = split(x, [sum(splits[:2]), splits[2]])
        parts, last = super().forward(convolved, state, packing, splits=splits[:2], **options)
        return [*parts, others], last


class LearnedRidge(Float32Module):
    """`λ = softplus(l) + λ_min` of each head and key channel, 1 at the start."""

    SMALLEST = 0.25  # λ_min

    def __init__(self, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.logit = nn.Parameter(torch.empty(num_heads, head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.logit, inverse_softplus_of(1 - self.SMALLEST))

    def forward(self) -> Tensor:
        """`[H, K]`."""
        return F.softplus(self.logit) + self.SMALLEST
