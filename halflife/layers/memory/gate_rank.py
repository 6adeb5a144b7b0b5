"""GateRank in a layer: the gate of the slow state, and the op that updates the fast and the slow state."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from statistics import NormalDist
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halflife.initial import draws
from halflife.layers.init import Law, drawn, reset, uniform
from halflife.layers.mixer import State
from halflife.ops import causal_conv1d, gate_rank, laws
from halflife.ops.arguments import peek_interpreter_stack
from halflife.ops.gate_rank import check_reset_law
from halflife.ops.laws.gates import gates
from halflife.ops.recurrent import SlowInput, Unconvolved
from halflife.packing import Packing
from halflife.precision import ROOMY, Float32Module, compute_dtype, without_autocast
from halflife.registry import check_choice


class SlowGate(Float32Module):
    """`log α_t = −A_slow · relu(conv(f)_t + b)`, one per head, in float32. 0 (no reset) where the sum is negative.

    For f of unit variance, conv(f) is initially a standard normal number, and `b = Φ⁻¹(reset_rate)`. `A_slow` starts
    log-uniform in [0.01, 1].
    Source: GateRank, Eq. 8 (with corrected subscripts of A). The paper does not give the number of gates or the initial
    values of b and A, so these are ours (docs/log.md).

    Args:
        reset_rate: initial share of tokens that are resets, in (0, 1); 0.5 is a bias of zero.
        conv_size: taps of the causal convolution.
        gates: "head" for a gate per head, or "layer" for one gate of all heads, `f [B, T, 1]`.
        bias: "after" the convolution, or "before" it, which is conv(f + b), as the paper prints it.
        rate_start: initial A_slow, "log_uniform", or "uniform_1_16" as Mamba-2 has it.
    """

    SLOWEST, FASTEST = 0.01, 1.0
    GATES, BIASES, RATE_STARTS = ("head", "layer"), ("after", "before"), ("log_uniform", "uniform_1_16")

    pass_backend = "auto"  # see `parts.set_backend`

    def __init__(
        self,
        num_heads: int,
        reset_rate: float,
        conv_size: int,
        gates: str = "head",
        bias: str = "after",
        rate_start: str = "log_uniform",
    ) -> None:
        super().__init__()
        check_choice("gates", gates, self.GATES)
        check_choice("bias", bias, self.BIASES)
        check_choice("rate_start", rate_start, self.RATE_STARTS)
        if not 0 < reset_rate < 1:
            raise ValueError(f"reset_rate is a share of the tokens and must lie between 0 and 1; got {reset_rate}")
        if conv_size < 1:
            raise ValueError(f"GateRank's conv_size must be at least 1; got {conv_size}")
        if bias == "before" and reset_rate != 0.5:
            raise ValueError(f"with the bias before the convolution, it starts at 0: reset_rate 0.5; got {reset_rate}")
        self.quantile = NormalDist().inv_cdf(reset_rate)
        self.num_heads, self.bias_place, self.rate_start = num_heads, bias, rate_start
        self.num_gates = num_heads if gates == "head" else 1
        self.taps = nn.Parameter(torch.empty(self.num_gates, conv_size))
        self.bias = nn.Parameter(torch.empty(self.num_gates))
        self.A_log = nn.Parameter(torch.empty(self.num_gates))
        self.reset_parameters()

    @draws
    def reset_parameters(self) -> None:
        self.taps.copy_(F.normalize(torch.empty_like(self.taps).normal_(), dim=-1))
        self.bias.fill_(self.quantile)
        if self.rate_start == "log_uniform":
            self.A_log.uniform_(math.log(self.SLOWEST), math.log(self.FASTEST))
        else:
            self.A_log.uniform_(1, 16).log_()

    @property
    def leaves_law(self) -> bool:
        """Whether `forward` takes `then`. It does not where a hook reads the log-decays that it returns."""
        return self.bias_place == "after" and not self._forward_hooks

    def forward(
        self, f: Tensor, state: Tensor | None, packing: Packing, then: Callable[[SlowInput], Any] | None = None
    ) -> Any:
        """`f [B, T, gates]` → `(g_slow [B, T, H], the convolution's last inputs [N, gates, W − 1])`.

        With `then`, for a kernel that computes it, the result is that of `then`. Its tensors may be freed after it.
        """
        if then is not None:
            return then(SlowInput(f, self.taps, self.bias, self.A_log, state))
        wide = compute_dtype(f)
        taps, bias = self.taps.to(wide), self.bias.to(wide)
        if self.bias_place == "before":
            f, bias = f + bias, None
        with without_autocast(f.device):
            y, state = causal_conv1d(
                f, taps, bias, activation=None, initial_state=state, output_final_state=True,
                cu_seqlens=packing, backend=self.pass_backend, dtype=wide,
            )  # fmt: skip
        assert state is not None
        g, _ = laws.log_decay(y, laws.Law("relu", rate=self.A_log))
        return g.expand(*y.shape[:2], self.num_heads), state


class GateRank(nn.Module):
    """`ops.gate_rank` in a mixer. The mixer's decay acts on the fast state, `SlowGate` of f = x W on the slow state.

    In training mode it counts resets, which `statistics` reports.

    Args:
        reset_rate, conv_size, gates, bias, rate_start: see `SlowGate`.
        reset_law: see `ops.gate_rank`.
        trained: whether the gate is trained. Without, its parameters stay as they start, and no gradient flows through
            it into x, which tells the effect of a second state from that of a learned gate.
    """

    # x of unit mean square gives f of unit variance
    initial: ClassVar[dict[str, Law]] = {"proj": uniform(math.sqrt(3))}

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        reset_rate: float = 0.1,
        conv_size: int = 4,
        gates: str = "head",
        bias: str = "after",
        rate_start: str = "log_uniform",
        reset_law: str = "mask",
        trained: bool = True,
    ) -> None:
        super().__init__()
        self.slow_gate = SlowGate(num_heads, reset_rate, conv_size, gates, bias, rate_start)
        self.proj = drawn(hidden_size, self.slow_gate.num_gates, self.initial["proj"])
        check_reset_law(reset_law, delta=False)
        self.reset_law, self.trained = reset_law, trained
        self.requires_grad_(trained)
        # Sums since the last call of `statistics`: resets, tokens, sequences, and squares of the fast and slow states.
        # On a GPU they are of the first step alone, as they would take four launches of every other one.
        self.counts: tuple[Tensor, ...] | None = None

    def reset_parameters(self) -> None:
        reset(self, self.initial)

    def forward(
        self, x: Tensor, q: Tensor | Unconvolved, k: Tensor | None, v: Tensor | None, g: Any,
        beta: Tensor | None, state: State, packing: Packing, **options: Any,
    ) -> tuple[Tensor, State]:  # fmt: skip
        """Run `ops.gate_rank` on `q, k, v, g, beta`, with the gate of the slow state computed from `x [B, T, D]`.

        An `Unconvolved` q has k and v in it. Of `Unevaluated` log-decays beta are the logits of writing strengths.

        Returns:
            `o [B, T, H, V]` and the new states `memory` (fast), `slow` and `slow_conv` (the gate's convolution).
        """
        f = self.proj(x if self.trained or not torch.is_grad_enabled() else x.detach())
        initial = (state["memory"], state["slow"]) if "memory" in state else None
        if isinstance(q, Unconvolved):
            assert initial is not None
            step = partial(q.step, g, beta=beta, states=initial, scale=options["scale"], dtype=ROOMY[x.dtype])
            if self.slow_gate.leaves_law:
                return self.slow_gate(f, state["slow_conv"], packing, then=step)
            g_slow, conv = self.slow_gate(f, state["slow_conv"], packing)
            o, new = step(g_slow)
            return o, {**new, "slow_conv": conv}
        before = state.get("slow_conv")
        if isinstance(g, laws.Unevaluated):
            found = self.slow_gate(f, before, packing, then=partial(gates, g, beta, packing=packing))
            g, step, beta, g_slow, conv = found
            g_slow = g_slow.expand(*g_slow.shape[:2], self.slow_gate.num_heads)
            options["gain"] = options.get("gain") if step is None else step
        else:
            g_slow, conv = self.slow_gate(f, before, packing)
        assert k is not None
        assert v is not None
        o, final = gate_rank(
            q, k, v.to(ROOMY[v.dtype]), g_slow, g, beta,
            initial_state=initial, output_final_state=True, cu_seqlens=packing, reset_law=self.reset_law, **options,
        )  # fmt: skip
        assert final is not None
        # Under torch.func there are no numbers to keep.
        counts = self.training and (torch.compiler.is_compiling() or peek_interpreter_stack() is None)
        if counts and x.shape[1] and (x.is_cpu or self.counts is None):  # no tokens have no segments
            self._count(g_slow.detach(), final[0].detach(), final[1].detach(), packing)
        return o, {"memory": final[0], "slow": final[1], "slow_conv": conv}

    def _count(self, g_slow: Tensor, fast: Tensor, slow: Tensor, packing: Packing) -> None:
        fast, slow, states = fast.float().flatten(), slow.float().flatten(), fast.shape[:2]
        squares = torch.dot(fast, fast), torch.dot(slow, slow)
        key = "sizes", self.slow_gate.num_heads, fast.device  # not T, of which a compiled block has one graph
        if key not in packing.kept:
            packing.kept[key] = fast.new_full((), g_slow.numel()), fast.new_full((), states.numel())
        sizes = packing.kept[key]
        sums = torch.linalg.vector_norm(g_slow, 0).float(), *sizes, *squares
        if self.counts is not None:
            sums = torch._foreach_add(self.counts, sums)  # pyright: ignore[reportPrivateImportUsage]
        self.counts = sums

    def statistics(self) -> dict[str, float]:
        """Return statistics of the training steps since the last call (on a GPU of the first one), or an empty dict.

        Returns:
            `reset_rate`, the share of resets over tokens and heads; `segment_length`, the mean number of tokens between
            resets, where a sequence without resets is one segment; and `slow_share`, the share of ‖slow‖² in
            ‖fast‖² + ‖slow‖² of the final states.
        """
        if self.counts is None:
            return {}
        resets, tokens, sequences, fast, slow = torch.stack(self.counts).tolist()
        segments = resets + sequences
        self.counts = None
        return {
            "reset_rate": resets / max(tokens, 1), "segment_length": tokens / max(segments, 1),
            "slow_share": slow / max(fast + slow, 1e-30),
        }  # fmt: skip


def gate_statistics(model: nn.Module) -> dict[str, dict[str, float]]:
    """`GateRank.statistics` of all GateRank modules that trained since the last call, by module name."""
    statistics = {name: m.statistics() for name, m in model.named_modules() if isinstance(m, GateRank)}
    return {name: values for name, values in statistics.items() if values}
