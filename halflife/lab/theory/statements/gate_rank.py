"""Statements of GateRank about its decay mask, and its equations for the recurrence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halflife.lab.theory.gradients import numerical_rank
from halflife.lab.theory.statements.row import IDENTITY, NUMBER, error, row
from halflife.ops import gate_rank
from halflife.ops.gate_rank import masks

LENGTH, DRAWS, ROWS = 48, 8, 8
RESETS = (0, 1, 2, 4, 8, 16)


def draw_gates(resets: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return log-decays `[DRAWS, LENGTH, 1]`, slow and fast, with resets at so many random tokens after the first."""
    places = torch.rand(DRAWS, LENGTH - 1, generator=generator).argsort(-1)[:, :resets] + 1
    slow = torch.zeros(DRAWS, LENGTH, dtype=torch.float64)
    slow.scatter_(1, places, -0.01 - torch.rand(DRAWS, resets, generator=generator, dtype=torch.float64))
    fast = -0.2 * torch.rand(DRAWS, LENGTH, generator=generator, dtype=torch.float64)
    return slow.unsqueeze(-1), fast.unsqueeze(-1)


def greatest_rank(mask: Tensor) -> int:
    """Return the greatest rank of a block of rows ≥ m and columns < m of `[…, T, T]`, over all m."""
    return max(int(numerical_rank(mask[..., m:, :m]).max()) for m in range(1, mask.shape[-1]))


def printed_mask(slow: Tensor, fast: Tensor) -> Tensor:
    """Return Λ `[…, T, T]` of log-decays `[…, T]` by Eqs. 14 to 16 to the letter.

    The next reset after j may be j itself (Eq. 14), and the product λ_i begins after a reset at i (Eq. 15).
    """
    length = slow.shape[-1]
    steps, reset = torch.arange(length), slow != 0
    start = torch.where(reset, steps, -1).cummax(-1).values + 1  # s_i
    total = torch.nn.functional.pad(fast.cumsum(-1), (1, 0))
    product = total[..., 1:] - total.gather(-1, start)  # log λ_i
    later = torch.where(reset, steps, length).flip(-1).cummin(-1).values.flip(-1)
    following = torch.minimum(later.unsqueeze(-2), steps.unsqueeze(-1))  # r_next(j, i), [i, j]
    at_next = product.unsqueeze(-2).expand(*following.shape).gather(-1, following)
    return (at_next - product.unsqueeze(-2)).exp().tril()


def statements(seed: int) -> dict[str, dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    ranks = [greatest_rank(torch.mul(*masks(*draw_gates(count, generator)))) for count in RESETS]
    slow, fast = draw_gates(8, generator)
    q, k, v = torch.randn(3, DRAWS, LENGTH, 1, ROWS, generator=generator, dtype=torch.float64)
    recurrent, _ = gate_rank(q, k, v, slow, fast, backend="reference")
    quadratic, _ = gate_rank(q, k, v, slow, fast, backend="mask")
    chunked, _ = gate_rank(q, k, v, slow, fast, backend="chunked", chunk_size=16)
    printed, _ = gate_rank(q, k, v, slow, fast, reset_law="printed", backend="reference")
    half = LENGTH // 2
    first, state = gate_rank(*(x[:, :half] for x in (q, k, v, slow, fast)), output_final_state=True)
    second, _ = gate_rank(*(x[:, half:] for x in (q, k, v, slow, fast)), initial_state=state)
    return {
        "mask resets": row("GateRank, §3.2", "resets in a sequence", NUMBER, list(RESETS)),
        "mask rank": row("GateRank, §3.2", "greatest rank of the mask below the diagonal, by resets", NUMBER, ranks),
        "chunked": row("GateRank, Eqs. 17–19", "error of the chunked form", IDENTITY, error(chunked, recurrent)),
        "streamed": row("GateRank, Abstract", "error of two halves with a state", IDENTITY,
            error(torch.cat([first, second], 1), recurrent)),
        "parallel": row(
            "GateRank, Eq. 13, Figure 2a", "error of the parallel form, against the recurrence of its mask", IDENTITY,
            error(quadratic, recurrent)),
        "printed mask": row("GateRank, Eqs. 14–16", "largest entry of the printed Λ, whose gates are below 1", NUMBER,
            printed_mask(slow.squeeze(-1), fast.squeeze(-1)).max()),
        "printed recurrence": row(
            "GateRank, Eqs. 10–12", "error of the printed recurrence, against the mask of Figure 2a", IDENTITY,
            error(printed, quadratic)),
    }  # fmt: skip
