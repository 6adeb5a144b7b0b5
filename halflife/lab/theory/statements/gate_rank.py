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


def chunked_by_the_equations(
    q: Tensor, k: Tensor, v: Tensor, slow: Tensor, fast: Tensor, *, size: int, form: str
) -> Tensor:
    """Return the outputs of Eqs. 17 to 19 to the letter, `[N, T, V]`.

    Args:
        q, k, v: `[N, T, K]` and `[N, T, V]`.
        slow, fast: log-decays `[N, T]`.
        size: tokens of a chunk, C.
        form: "printed", with r_next and λ of Eqs. 14 and 15; "corrected", where r_next(r, l) is the first reset after r
            and λ the running product of the chunk; or "redefined", where also no token of the last reset segment has a
            reset after it up to C itself.
    """
    states = q.new_zeros(2, q.shape[0], k.shape[-1], v.shape[-1])  # fast, slow
    outputs = []
    for q_, k_, v_, a, b in zip(*(x.split(size, 1) for x in (q, k, v, slow, fast)), strict=True):
        steps, reset, gamma = torch.arange(a.shape[1]), a != 0, a.cumsum(-1)
        last = len(steps) - 1
        total = torch.nn.functional.pad(b.cumsum(-1), (1, 0))
        product = total[..., 1:]  # log λ
        if form == "printed":
            product = product - total.gather(-1, torch.where(reset, steps, -1).cummax(-1).values + 1)
        at = torch.where(reset, steps, len(steps)).flip(-1).cummin(-1).values.flip(-1)  # the first reset in [r, C]
        first = at[:, :1]
        following = at if form == "printed" else torch.nn.functional.pad(at[:, 1:], (0, 1), value=len(steps))
        nearest = torch.minimum(following.unsqueeze(-2), steps.unsqueeze(-1))  # r_next(j, i), [i, j]
        masked = product.unsqueeze(-2).expand(nearest.shape).gather(-1, nearest) - product.unsqueeze(-2)
        d_last, d_first = masked[:, -1], product.gather(-1, torch.minimum(first, steps))
        ongoing = following > last if form == "redefined" else following >= last
        flag = reset.any(-1)[:, None, None]
        mask = (masked + gamma.unsqueeze(-1) - gamma.unsqueeze(-2)).exp().tril()
        near = ((q_ @ k_.mT) * mask) @ v_
        outputs.append(((gamma + d_first).exp()[..., None] * q_) @ states[0]
                       + (gamma.exp()[..., None] * q_) @ states[1] + near)  # fmt: skip
        keys = (gamma[:, -1:] - gamma + d_last).exp()[..., None] * k_
        entering = (gamma[:, -1] + d_first[:, -1]).exp()[:, None, None] * states[0]
        own, kept = ongoing[..., None] * keys, ~ongoing[..., None] * keys
        states = torch.stack([
            ~flag * entering + own.mT @ v_,
            gamma[:, -1].exp()[:, None, None] * states[1] + flag * entering + kept.mT @ v_,
        ])  # fmt: skip
    return torch.cat(outputs, 1)


def _equations(q: Tensor, k: Tensor, v: Tensor, slow: Tensor, fast: Tensor) -> dict[str, float]:
    """Form → the largest error of Eqs. 17 to 19 over chunks of 4, 8 and 16 tokens, relative to the recurrence."""
    parts = [x.squeeze(2) for x in (q, k, v)] + [x.squeeze(-1) for x in (slow, fast)]
    within = torch.where((torch.arange(LENGTH) % 4 == 3), 0, parts[3])  # no reset on the last token of a chunk
    found: dict[str, float] = {}
    for name, form, gates in (
        ("printed", "printed", parts[3]), ("corrected, resets within chunks", "corrected", within),
        ("corrected", "corrected", parts[3]), ("redefined", "redefined", parts[3]),
    ):  # fmt: skip
        whole, _ = gate_rank(q, k, v, gates.unsqueeze(-1), fast, scale=1.0, backend="reference")
        results = (
            chunked_by_the_equations(parts[0], parts[1], parts[2], gates, parts[4], size=size, form=form)
            for size in (4, 8, 16)
        )
        found[name] = max(float(error(one.unsqueeze(2), whole)) for one in results)
    return found


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
        **{
            f"equations {form}": row(
                "GateRank, Eqs. 17–19", f"error of the equations, {form}, against the recurrence", IDENTITY, value
            )
            for form, value in _equations(q, k, v, slow, fast).items()
        },
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
