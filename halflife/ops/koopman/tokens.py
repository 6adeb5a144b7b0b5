"""One operator a token by conjugate gradients, without any matrix a token.

With one decay a head, a product with the G of every token is a read of `linear_attention` with keys and values z and
the decays g; so are the products with M and C. The memory is that of `linear_attention`, and not r² a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from halflife.ops.koopman.call import KoopmanCall
from halflife.ops.koopman.decays import weigh_tokens
from halflife.ops.koopman.layout import KoopmanLayout
from halflife.ops.koopman.readout import KoopmanReadout, powers, weighted_sum
from halflife.ops.koopman.solve import unit_of
from halflife.ops.koopman.state import KoopmanMemory, Sums, add_to_sums
from halflife.ops.linear_attention import linear_attention

READ_CHUNK = 64  # tokens a chunk of `linear_attention`


def has_token_form(call: KoopmanCall) -> bool:
    """Whether `by_tokens` takes the call."""
    return (
        call.solver == "cg" and call.mode == "chunk" and call.tokens_per_operator == 1 and call.decays < 2
        and call.normalization in ("causal", "trace", "none")
    )  # fmt: skip


def by_tokens(call: KoopmanCall, memory: KoopmanMemory, readout: KoopmanReadout) -> tuple[Tensor, KoopmanMemory, int]:
    """`chunked` of `koopman.op`, for calls that `has_token_form` accepts."""
    layout, solver = KoopmanLayout(call.k, memory, 1, call.packing), readout.solver
    assert solver is not None
    k, v = layout.place(call.k), layout.place(call.v)
    g = k.new_zeros(*k.shape[:3], 1) if call.g is None else layout.place(call.g)
    previous = layout.previous(k, memory.last)
    rows = [k, previous * (g / 2).exp(), v, g]
    if not call.inclusive:  # a query reads the sums before its token, which are those after the token before it
        rows = [layout.previous(x, x.new_zeros(len(memory.last), *x.shape[2:])) for x in rows]
    sums = _TokenSums(*rows, first=memory.sums, boundaries=layout.boundaries)
    norm, last_norm = _norms(call, layout, k, g, memory.sums)
    unit = unit_of(sums.trace() if call.normalization == "trace" else norm)
    fixed = unit.detach()  # a constant, see `inverse_factor`
    ridge = readout.ridge * (unit / fixed)

    def solve(b: Tensor) -> Tensor:
        return solver(lambda x: sums.gram(x)[0] / fixed + ridge * x, b)

    gamma, weights = readout.gamma.squeeze(-1), readout.weights.squeeze(-1)
    xs = powers(solve, lambda x: sums.transition(x)[0], fixed, layout.place(call.q), gamma, readout.power)
    x = weighted_sum(weights, xs)
    y, value_sum = sums.values(x)
    leaving = Sums(sums.gram(x)[1], sums.transition(x)[1], value_sum, last_norm)
    if not call.inclusive:
        at = layout.first + (layout.total - 1).clamp(min=0)
        newest, before, value, decay = (part.flatten(0, 1)[at] for part in (k, previous, v, g))
        leaving = add_to_sums(newest, value, decay, memory._replace(sums=leaving, last=before)).sums
    leaving = leaving._replace(norm=last_norm).normalized(call.normalization, memory.sums.norm)
    y = y.flatten(0, 1).index_select(0, layout.slots).unflatten(0, layout.shape)
    return y, layout.final(leaving, k, v, None if call.g is None else g, memory), 0


@dataclass(frozen=True)
class _TokenSums:
    """The sums after every token of a timeline, as states of `linear_attention`.

    `gram`, `transition` and `values` return the products of G, M and C of each token with its row of
    `x [rows, T, H, R]`, and the sum after the last token.

    Attributes:
        keys, paired, written, g: the keys, the keys before them with the decay between them, the values, and the
            log-decays `[rows, T, H, 1]`.
        first: the sums before the first token.
        boundaries: those of the sequences on the timeline, or None if each is a row.
    """

    keys: Tensor
    paired: Tensor
    written: Tensor
    g: Tensor
    first: Sums
    boundaries: Tensor | None

    def gram(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self._read(x, self.keys, self.keys, self.first.gram)

    def transition(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self._read(x, self.paired, self.keys, self.first.transition)

    def values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self._read(x, self.keys, self.written, self.first.values)

    def trace(self) -> Tensor:
        """The trace of G after every token, `[rows, T, H, 1]`."""
        squares = self.keys.square().sum(-1, keepdim=True)
        ones = torch.ones_like(squares)
        return self._read(ones, ones, squares, self.first.norm[..., None, None])[0]

    def _read(self, x: Tensor, keys: Tensor, values: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        """Products with `Σ values keysᵀ`."""
        y, last = linear_attention(
            x, keys, values, self.g.squeeze(-1), scale=1, initial_state=first.mT, output_final_state=True,
            cu_seqlens=self.boundaries, chunk_size=READ_CHUNK,
        )  # fmt: skip
        assert last is not None
        return y, last.mT


def _norms(call: KoopmanCall, layout: KoopmanLayout, k: Tensor, g: Tensor, first: Sums) -> tuple[Tensor, Tensor]:
    """The largest squared norm that each query of the timeline sees `[rows, T, H, 1]`, and the last `[N, H]`."""
    keys = layout.split(k)
    tokens = weigh_tokens(keys, keys, keys, layout.split(g), -2)
    entering, leaving = layout.running_norms(tokens, first)
    if call.inclusive and tokens.decay is not None:
        entering = torch.maximum(tokens.norms.squeeze(-1), tokens.decay.norm.exp() * entering)
    entering = torch.ones_like(entering) if call.normalization == "none" else entering
    return entering.transpose(0, 1).unsqueeze(-1), leaving.flatten(0, 1)
