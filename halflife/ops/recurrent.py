"""The token loop that defines every op on a state, and a token of a layer that decodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halflife.ops.arguments import dense
from halflife.ops.backends import triton
from halflife.ops.call import Call
from halflife.ops.chunked.groups import each_head
from halflife.ops.laws import Unevaluated
from halflife.precision import autocast_dtype


def token_loop(
    token: Callable[..., tuple[Tensor, Tensor]], call: Call, *others: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Run the definition of an op: `o_t, state = token(state, q_t, k_t, v_t, *others_t, g_t)` for one token at a time.

    Groups of q and k are repeated for their heads, and values are multiplied by their gain. `others` are
    `[B, T, H, …]`, or None. A scalar log-decay reaches `token` as `[B, H, 1]`. The outputs are `[B, T, H, V]` in v's
    dtype, and the final states `[N, H, num_states · K, V]` in the compute dtype.
    """
    states, scale, g, heads = call.first_state(), call.output_scale, call.decay, call.sizes["H"]
    if g is not None and g.ndim == 3:
        g = g.unsqueeze(-1)
    inputs = [None if x is None else x.to(states.dtype) for x in (call["q"], call["k"], call["v"], *others, g)]
    if (gain := call.get("gain")) is not None:
        inputs[2] = inputs[2] * gain.to(states.dtype).unsqueeze(-1)
    outputs, finals = [], []
    for rows, tokens in call.packing.pieces():
        state = states[rows]
        for t in range(tokens.start, tokens.stop):
            o, state = token(state, *(None if x is None else each_head(x[:, t], heads) for x in inputs))
            outputs.append(o * scale)
        finals.append(state)
    o = torch.stack(outputs, 1).to(call.output_dtype) if outputs else torch.zeros_like(call["v"])
    return o, torch.cat(finals) if finals else states


class Unconvolved(NamedTuple):
    """Queries, keys and values of one token of each sequence, before the short convolution that makes them.

    A kernel convolves them and steps the states at once (`backends/triton/passes/token.py`). A layer passes it to its
    memory in the place of queries.

    Attributes:
        x: channels `[B, 1, D]` of queries, keys and values.
        weight, bias, state: of the convolution, as in `causal_conv1d`.
        places: the first channels of queries, keys and values.
        groups: groups of heads that share queries and keys.
        unit: whether queries and keys get norm 1.
        most: the writing strength β of the delta rule is most · σ(beta).
        gain: factor of the values `[B, 1, H]`, or None.
        skip: D `[H]`, with which the convolved values are added to the outputs, or None.
        gains: whether the step size of an `Unevaluated` decay is a factor of the values.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    state: Tensor
    places: tuple[int, int, int]
    groups: int
    unit: bool = False
    most: float = 1.0
    gain: Tensor | None = None
    skip: Tensor | None = None
    gains: bool = False

    def step(
        self, g: Tensor | Unevaluated | None, g_slow: Tensor | None, beta: Tensor | None,
        states: tuple[Tensor, Tensor | None], scale: float, dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
        """The outputs `[B, 1, H, V]` in `dtype`, and the next states of the convolution and of the memory.

        `beta` are the logits of writing strengths. The states are fast and slow.
        """
        weight, bias, conv = [None if x is None else x.contiguous() for x in (self.weight, self.bias, self.state)]
        state, slow = (None if x is None else x.contiguous() for x in states)
        law: tuple[Any, ...] = ()
        if isinstance(g, Unevaluated):
            (vectors, settings), g = g.given(), g.f
            law = *vectors, *settings, self.gains
        o, conv, *new = triton.custom_op("token")(
            dense(self.x), weight, bias, conv, g, g_slow, beta, self.gain, self.skip, state, slow, list(self.places),
            self.groups, self.unit, self.most, scale, dtype, *law,
        )  # fmt: skip
        return o, conv, new


def map_of_norm(
    x: Tensor, norm: Tensor, eps: float, weight: Tensor, other: Tensor | None = None, *, branch: Tensor | None = None,
    gate: Tensor | None = None, groups: int = 1,
) -> list[Tensor]:  # fmt: skip
    """`RMSNorm(x ⊙ silu(gate)) Wᵀ`, or `RMSNorm(x + branch) Wᵀ` and the sum, of tokens that `takes_map` accepts.

    Args:
        x, branch, gate: channels `[B, 1, D]`.
        norm, eps: weight `[D]` and eps of the norm.
        weight: W `[F, D]`.
        other: U `[F, D]`; the first result is then `silu(n Wᵀ) ⊙ (n Uᵀ)`, with n the norm.
        groups: groups of channels, each with its own mean square.
    """
    return triton.custom_op("map")(x, branch, gate, norm, weight, other, groups, eps)


def takes_map(x: Tensor, *others: Tensor | None) -> bool:
    """Whether a kernel takes the map of tokens x, with these other tensors and weights."""
    if torch.is_grad_enabled() or x.shape[1] != 1 or len(x) > MOST_TOKENS or any(part is None for part in others):
        return False
    plain = autocast_dtype(x.device) is None and runs_kernels(x.device)
    return plain and triton.why_not_pass("a token", _CUDA, (x, *others)) is None


MOST_TOKENS = 4  # whose products need no tensor cores: reading the weights takes longer


def takes_token(x: Tensor, conv: Tensor, state: Tensor) -> bool:
    """Whether a kernel takes an `Unconvolved` token from channels `x`, with these states."""
    fits = state.shape[-2] <= triton.SIZES[-1] and conv.shape[-1] > 0 and not torch.is_grad_enabled()
    return fits and runs_kernels(x.device) and triton.why_not_pass("a token", _CUDA, (x, conv, state)) is None


_CUDA = torch.device("cuda")


def runs_kernels(device: torch.device) -> bool:
    """Whether kernels of Triton run on `device` without being asked for."""
    return device.type == "cuda"
