"""Statements of GateRank about its decay mask, and its equations for the recurrence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halflife.ops import gate_rank
from halflife.ops.gate_rank import masks
from halflife.theory.gradients import numerical_rank
from halflife.theory.statements.row import IDENTITY, NUMBER, error, row

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
        "streamed": row(
            "GateRank, Abstract", "error of two halves with a state", IDENTITY,
            error(torch.cat([first, second], 1), recurrent),
        ),
        "parallel": row(
            "GateRank, Eqs. 13–16", "error of the parallel form, against the recurrence of its mask", IDENTITY,
            error(quadratic, recurrent),
        ),
        "printed recurrence": row(
            "GateRank, Eqs. 10–12", "error of the printed recurrence, against Eqs. 13–16", IDENTITY,
            error(printed, quadratic),
        ),
    }  # fmt: skip
