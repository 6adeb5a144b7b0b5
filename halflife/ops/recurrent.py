"""The token loop that defines every op on a state."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from halflife.ops.call import Call
from halflife.ops.chunked.groups import each_head


def token_loop(
    token: Callable[..., tuple[Tensor, Tensor]], call: Call, *others: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Run the definition of an op: `o_t, state = token(state, q_t, k_t, v_t, *others_t, g_t)` for one token at a time.

    Groups of q and k are repeated for their heads. `others` are `[B, T, H, …]`, or None. A scalar log-decay reaches
    `token` as `[B, H, 1]`. The outputs are `[B, T, H, V]` in v's dtype, and the final states
    `[N, H, num_states · K, V]` in the compute dtype.
    """
    states, scale, g, heads = call.first_state(), call.output_scale, call.decay, call.sizes["H"]
    if g is not None and g.ndim == 3:
        g = g.unsqueeze(-1)
    inputs = [None if x is None else x.to(states.dtype) for x in (call["q"], call["k"], call["v"], *others, g)]
    outputs, finals = [], []
    for rows, tokens in call.packing.pieces():
        state = states[rows]
        for t in range(tokens.start, tokens.stop):
            o, state = token(state, *(None if x is None else each_head(x[:, t], heads) for x in inputs))
            outputs.append(o * scale)
        finals.append(state)
    o = torch.stack(outputs, 1).to(call.output_dtype) if outputs else torch.zeros_like(call["v"])
    return o, torch.cat(finals) if finals else states
