"""The token loop that defines every op on a state, and a token of a layer that decodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halflife.ops.arguments import alike, dense
from halflife.ops.backends import triton
from halflife.ops.call import Call
from halflife.ops.chunked.groups import each_head
from halflife.ops.laws import Unevaluated
from halflife.ops.laws.gates import SlowInput
from halflife.precision import autocast_dtype


def token_loop(
    token: Callable[..., tuple[Tensor, Tensor]], call: Call, *others: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Run the definition of an op: `o_t, state = token(state, q_t, k_t, v_t, *others_t, g_t)` for one token at a time.

    Groups of q and k are repeated for their heads, and values are multiplied by their gain. `others` are `[B, T, H, …]`
    or None. A scalar log-decay reaches `token` as `[B, H, 1]`. It returns `[B, T, H, V]` in v's dtype, and the final
    states `[N, H, num_states · K, V]` in the compute dtype.
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
        weight, bias, state: of the convolution, as in `causal_conv1d`; None is no convolution.
        places: the first channels of queries, keys and values.
        groups: groups of heads that share queries and keys.
        silu: whether queries and keys get SiLU; after a convolution values too.
        unit: whether queries and keys get norm 1.
        most: the writing strength β of the delta rule is most · σ(beta).
        gain: factor of the values `[B, 1, H]`, or None.
        skip: D `[H]`, with which the convolved values are added to the outputs, or None.
        gains: whether the step size of an `Unevaluated` decay is a factor of the values.
        angles: cos and sin of RoPE, `[1, K / 2]` or `[B, 1, K / 2]`, or None.
    """

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    state: Tensor | None
    places: tuple[int, int, int]
    groups: int
    silu: bool = True
    unit: bool = False
    most: float = 1.0
    gain: Tensor | None = None
    skip: Tensor | None = None
    gains: bool = False
    angles: tuple[Tensor, Tensor] | None = None

    def step(
        self, g: Tensor | Unevaluated | None, g_slow: Tensor | SlowInput | None, beta: Tensor | None,
        states: tuple[Tensor, Tensor | None], scale: float, dtype: torch.dtype,
    ) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
        """The outputs `[B, 1, H, V]` in `dtype`, and the next states of convolutions and of the memory by name.

        `beta` are the logits of writing strengths. The states are fast and slow.
        """
        taps = [x.contiguous() for x in (self.weight, self.bias) if x is not None]
        conv, (state, slow) = None if self.state is None else self.state.contiguous(), alike(*states)
        gate: list[Tensor] = []
        if isinstance(g_slow, SlowInput):
            gate, g_slow = [dense(g_slow.f), *(x.contiguous() for x in g_slow[1:] if x is not None)], None
        up: list[Tensor] = []
        law: list[Any] = [[], 1.0]
        if isinstance(g, Unevaluated):
            g, up, law = g.given()
            law.append(self.gains)
        if g is not None and (up or g.ndim == 4):  # else any strides
            g = dense(g)
        cos, sin = per_sequence(self.angles)
        o, *found = triton.custom_op("token")(
            dense(self.x), taps, conv, g, up, g_slow, gate, beta, self.gain, self.skip, state, slow,
            list(self.places), self.groups, self.silu, self.unit, self.most, scale, dtype, *law, cos=cos, sin=sin,
        )  # fmt: skip
        held = {"conv": conv is not None, "memory": True, "slow": slow is not None, "slow_conv": bool(gate)}
        return o, dict(zip([name for name, there in held.items() if there], found, strict=True))


def maps_of_norm(
    x: Tensor, norm: Tensor | None, eps: float, weights: Sequence[Tensor], *, branch: Tensor | None = None,
    gate: Tensor | None = None, kind: str = "none", groups: int = 1, keeps: bool = False,
) -> list[Tensor]:  # fmt: skip
    """Maps `[B, 1, ΣFᵢ]` of the norm of x, beside each other; with a branch the sum; and if it `keeps` it, the norm.

    `takes_map` must accept these tensors.

    Args:
        x, branch, gate: channels `[B, 1, D]`. With a branch it is the norm of `x + branch`.
        norm, eps: weight `[D]`, or that of each group, and eps of the norm; None is no norm.
        weights: W `[Fᵢ, D]` of one dtype, at most `MOST_MAPS`.
        kind: what the gate is: "none", or "silu" or "sigmoid" of it "_before" or "_after" the norm; or "relu_square",
            relu(x)² without a gate.
        groups: groups of channels, each with its own mean square.
    """
    return triton.custom_op("map")(x, branch, gate, norm, list(weights), kind, groups, eps, keeps)


@contextmanager
def known_outputs(maps: Sequence[nn.Linear], x: Tensor, outputs: Sequence[Tensor]) -> Iterator[None]:
    """Inside this block, the maps return these outputs for the input x."""

    def run(module: nn.Linear, output: Tensor, input: Tensor) -> Tensor:
        return output if input is x else F.linear(input, module.weight, module.bias)

    for module, output in zip(maps, outputs, strict=True):
        module.forward = partial(run, module, output)
    try:
        yield
    finally:
        for module in maps:
            vars(module).pop("forward", None)


def takes_map(x: Tensor, *others: Tensor | None) -> bool:
    """Whether a kernel takes maps of tokens x, with these other tensors and weights (None: not given)."""
    if torch.is_grad_enabled() or x.shape[1] != 1 or len(x) > MOST_TOKENS:
        return False
    plain = autocast_dtype(x.device) is None and runs_kernels(x.device)
    return plain and triton.why_not_pass("a token", CUDA, (x, *others)) is None


MOST_MAPS = 5  # of one kernel
MOST_TOKENS = 4  # whose products need no tensor cores: reading the weights takes longer


def takes_token(x: Tensor, conv: Tensor | None, state: Tensor) -> bool:
    """Whether a kernel takes an `Unconvolved` token from channels `x`, with these states."""
    fits = state.shape[-2] <= triton.SIZES[-1] and (conv is None or conv.shape[-1] > 0) and not torch.is_grad_enabled()
    return fits and runs_kernels(x.device) and triton.why_not_pass("a token", CUDA, (x, conv, state)) is None


def attention_of_token(
    q: Tensor, k: Tensor, v: Tensor, angles: tuple[Tensor, Tensor] | None, keys: Tensor, values: Tensor, seen: Tensor
) -> list[Tensor]:
    """Softmax attention of one token of each sequence to a cache: the outputs, and the next keys and values.

    `takes_attention` must accept these tensors.

    Args:
        q: `[N, 1, H, K]`.
        k, v: `[N, 1, G, K]`; each head of them serves H / G heads of queries.
        angles: cos and sin `[1, K / 2]` or `[N, 1, K / 2]` by which queries and keys are rotated, or None.
        keys, values: the cache `[N, S, G, K]`, of which each sequence has filled its first slots.
        seen: the number of these `[N]`.
    """
    cos, sin = per_sequence(angles)
    return triton.custom_op("attend")(q, k, v, cos, sin, keys, values, seen, q.shape[-1] ** -0.5)


def per_sequence(angles: tuple[Tensor, Tensor] | None) -> list[Tensor | None]:
    """cos and sin `[1, 1, K / 2]` or `[B, 1, K / 2]` of angles with or without the first axis; None for no angles."""
    if angles is None:
        return [None, None]
    return [x.contiguous() if x.ndim == 3 else x.unsqueeze(0).contiguous() for x in angles]


def takes_attention(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether kernels take `attention_of_token` of these tensors."""
    if torch.is_grad_enabled() or not runs_kernels(q.device) or len({x.dtype for x in (q, k, v, keys, values)}) > 1:
        return False
    small = q.shape[-1] <= triton.SIZES[-1] and q.shape[2] // k.shape[2] <= MOST_QUERIES
    return small and triton.why_not_pass("a token", CUDA, (q, k, v, keys, values)) is None


MOST_QUERIES = 16  # that share a key, all in one program
CUDA = torch.device("cuda")


def runs_kernels(device: torch.device) -> bool:
    """Whether kernels of Triton run on `device` without being asked for."""
    return device.type == "cuda"
