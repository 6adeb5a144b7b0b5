"""A cascade of states in a layer: the gates that pass the content of one state on to the next."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halflife.layers.gate_rank import SlowGate
from halflife.layers.init import UniformLinear
from halflife.ops import cascade
from halflife.ops.cascade.forms import weights
from halflife.ops.cascade.op import transitions

State = dict[str, Tensor]
SHARPNESS = 4.0  # of soft resets: a share of 0.5 at y = 0, and of 0.98 at y = 1


class Cascade(nn.Module):
    """`ops.cascade` in a mixer. The mixer's decay acts on the first state, and gates y = conv(x W) + b on the others.

    | resets | share of state n that moves to state n + 1 | log-decay of state n + 1 |
    |---|---|---|
    | hard | r = 1 if y > 0, else 0 | −A relu(y) |
    | soft | r = σ(4 y) | −A softplus(4 y) / 4 |

    With two states and hard resets this is `GateRank`. A hard gate that is closed has no gradient, and a soft one has.
    Initially state n resets at `reset_rate^n` of the tokens (hard), so that each state lasts longer than the last.

    Args:
        hidden_size, num_heads: those of the mixer.
        num_states: N, at least 2.
        resets: "hard" or "soft".
        reset_rate, conv_size: see `SlowGate`.
    """

    RESETS = ("hard", "soft")

    def __init__(
        self, hidden_size: int, num_heads: int, *, num_states: int = 3, resets: str = "hard", reset_rate: float = 0.1,
        conv_size: int = 4,
    ) -> None:  # fmt: skip
        super().__init__()
        if num_states < 2:
            raise ValueError(f"a cascade has at least 2 states; got num_states = {num_states}")
        if resets not in self.RESETS:
            raise ValueError(f"resets must be one of {', '.join(self.RESETS)}; got {resets!r}")
        self.gates = nn.ModuleList(SlowGate(num_heads, reset_rate**n, conv_size) for n in range(1, num_states))
        self.proj = UniformLinear(hidden_size, (num_states - 1) * num_heads, gain=3**0.5)
        self.soft = resets == "soft"

    def gate(
        self, x: Tensor, g: Tensor, convs: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The log-decays `[B, T, H, N]` and shares `[B, T, H, N − 1]`, and the convolutions' last inputs."""
        inputs = self.proj(x).chunk(len(self.gates), -1)
        before = [None] * len(self.gates) if convs is None else convs.chunk(len(self.gates), 1)
        decays, shares, after = [g], [], []
        for gate, f, conv in zip(self.gates, inputs, before, strict=True):
            assert isinstance(gate, SlowGate)
            y, conv = gate.signal(f, conv, cu_seqlens)
            decays.append(-gate.A_log.exp() * (F.softplus(SHARPNESS * y) / SHARPNESS if self.soft else F.relu(y)))
            shares.append((SHARPNESS * y).sigmoid() if self.soft else (y > 0).to(y.dtype))
            after.append(conv)
        return torch.stack([each.to(decays[-1]) for each in decays], -1), torch.stack(shares, -1), torch.cat(after, 1)

    def masks(self, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        """The mask of all pairs `[B, H, T, T]` in float64, of a sequence from its start, and ones on and below it."""
        decays, shares, _ = self.gate(x, g)
        matrices, length = transitions(decays.double(), shares.double()).transpose(1, 2), x.shape[1]
        size = 1 << (length - 1).bit_length()
        whole = weights(F.pad(matrices, (0, 0, 0, 0, 0, size - length))).pairs[..., :length, :length]
        return whole, torch.ones_like(whole).tril()

    def forward(
        self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, state: State,
        cu_seqlens: Tensor | None, **options: Any,
    ) -> tuple[Tensor, State]:  # fmt: skip
        """Run the op on `q, k, v, g, beta`, with the gates computed from `x [B, T, D]`.

        Returns:
            `o [B, T, H, V]`, and the new states `memory [N, H, states, K, V]` and `slow_conv` (of the gates).
        """
        decays, shares, conv = self.gate(x, g, state.get("slow_conv"), cu_seqlens)
        o, final = cascade(
            q, k, v, decays, shares, beta,
            initial_state=state.get("memory"), output_final_state=True, cu_seqlens=cu_seqlens, **options,
        )  # fmt: skip
        assert final is not None
        return o, {"memory": final, "slow_conv": conv}
