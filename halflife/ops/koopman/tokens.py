"""One operator a token by conjugate gradients, without any matrix a token.

With one decay a head, a product with the G of every token is a read of `linear_attention` with keys and values z and
the decays g; so are the products with M and C. The memory is that of `linear_attention`, and not r² a token.
"""

from __future__ import annotations

from functools import partial

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
    layout, first, solver = KoopmanLayout(call.k, memory, 1, call.cu_seqlens), memory.sums, readout.solver
    assert solver is not None
    k, v, q = (layout.place(x) for x in (call.k, call.v, call.q))
    g = k.new_zeros(*k.shape[:3], 1) if call.g is None else layout.place(call.g)
    previous = layout.previous(k, memory.last)
    rows = [k, previous * (g / 2).exp(), v, g]
    if not call.inclusive:  # a query reads the sums before its token, which are those after the token before it
        rows = [layout.previous(x, x.new_zeros(len(memory.last), *x.shape[2:])) for x in rows]
    keys, paired, values, decays = rows
    read = partial(
        linear_attention, g=decays.squeeze(-1), scale=1, cu_seqlens=layout.boundaries, chunk_size=READ_CHUNK,
        output_final_state=True,
    )  # fmt: skip

    norm, last_norm = _norms(call, layout, k, g, first)
    if call.normalization == "trace":
        ones = torch.ones_like(keys[..., :1])
        squares = keys.square().sum(-1, keepdim=True)
        norm = read(ones, ones, squares, initial_state=first.norm[..., None, None])[0]
    unit = unit_of(norm)
    fixed = unit.detach()  # a constant, see `inverse_factor`
    ridge = readout.ridge * (unit / fixed)

    def solve(b: Tensor) -> Tensor:
        return solver(lambda x: read(x, keys, keys, initial_state=first.gram)[0] / fixed + ridge * x, b)

    def advance(x: Tensor) -> Tensor:
        return read(x, paired, keys, initial_state=first.transition.mT)[0]

    gamma, weights = readout.gamma.squeeze(-1), readout.weights.squeeze(-1)
    x = weighted_sum(weights, powers(solve, advance, fixed, q, gamma, readout.power))
    y, value_sum = read(x, keys, values, initial_state=first.values.mT)
    gram, transition = (
        read(x, a, keys, initial_state=state)[1] for a, state in ((keys, first.gram), (paired, first.transition.mT))
    )
    assert gram is not None
    assert transition is not None
    assert value_sum is not None
    leaving = Sums(gram, transition.mT, value_sum.mT, last_norm)
    if not call.inclusive:
        at = layout.first + (layout.total - 1).clamp(min=0)
        newest, before, value, decay = (x.flatten(0, 1)[at] for x in (k, previous, v, g))
        leaving = add_to_sums(newest, value, decay, memory._replace(sums=leaving, last=before)).sums
    leaving = leaving._replace(norm=last_norm).normalized(call.normalization, first.norm)
    y = y.flatten(0, 1).index_select(0, layout.slots).unflatten(0, layout.shape)
    return y, layout.final(leaving, k, v, None if call.g is None else g, memory), 0


def _norms(call: KoopmanCall, layout: KoopmanLayout, k: Tensor, g: Tensor, first: Sums) -> tuple[Tensor, Tensor]:
    """The largest squared norm that each query of the timeline sees `[rows, T, H, 1]`, and the last `[N, H]`."""
    keys = layout.split(k)
    tokens = weigh_tokens(keys, keys, keys, layout.split(g), -2)
    entering, leaving = layout.running_norms(tokens, first)
    if call.inclusive and tokens.decay is not None:
        entering = torch.maximum(tokens.norms.squeeze(-1), tokens.decay.norm.exp() * entering)
    entering = torch.ones_like(entering) if call.normalization == "none" else entering
    return entering.transpose(0, 1).unsqueeze(-1), leaving.flatten(0, 1)
