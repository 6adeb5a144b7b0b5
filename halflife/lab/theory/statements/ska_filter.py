"""Statements of Echo about the power filter of its operator (Appendices D and I.6 to I.8)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from halflife.analysis.koopman import Operator, excess_risk, filter_bias, filtered_amplitude, filtered_readout, norm
from halflife.lab.theory.koopman_bounds import regime
from halflife.lab.theory.statements.row import BOUND, IDENTITY, NUMBER, error, quotient, row
from halflife.ops import koopman_attention

DRAWS, RANK, EPSILON = 200, 8, 1e-3
PRINTED_POWERS = {2: (0.902, 0.810, 0.490, 0.250, 0.090), 4: (0.815, 0.656, 0.240, 0.063, 0.008)}  # Prop. D.1
MODULI = (0.95, 0.9, 0.7, 0.5, 0.3)
HELD, POWERS = tuple(range(1, 10)), (0, 1, 2)


def recall_of_held(power: int, held: int, *, pairs: int = 16, rank: int = 48, draws: int = 8) -> float:
    """Return the share of pairs that untrained SKA recalls if every token is held for `held` steps.

    Keys and values are random unit vectors of size `rank`, and a query is a key. The answer is the value with the
    largest product.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(draws, 2 * pairs, 1, rank, generator=generator, dtype=torch.float64)
    tokens = torch.nn.functional.normalize(tokens, dim=-1)
    steps = tokens.repeat_interleave(held, 1)
    read, _ = koopman_attention(tokens[:, ::2], steps, steps, power=power, mode="prefix", backend="reference")
    found = (read[:, :, 0] @ tokens[:, 1::2, 0].mT).argmax(-1)
    return (found == torch.arange(pairs)).double().mean().item()


def normal_operator(eigenvalues: Tensor, generator: torch.Generator) -> Operator:
    """Return statistics with A_w = diag(eigenvalues) `[…, R]`, G̃ = I and random values, for Theorem I.11."""
    eye = torch.eye(eigenvalues.shape[-1], dtype=torch.float64).expand(*eigenvalues.shape, -1)
    values = torch.randn(eye.shape, generator=generator, dtype=torch.float64)
    ridge = torch.full(eigenvalues.shape[:-1], EPSILON, dtype=torch.float64)
    return Operator((1 - EPSILON) * eye, torch.diag_embed(eigenvalues), values, ridge)


def statements(
    operator: Operator, keys: Tensor, query: Tensor, generator: torch.Generator
) -> dict[str, dict[str, Any]]:
    """Evaluate those of Appendices D and I.6 to I.8, and of §3.2.3, on the draws of `ska`."""
    shifted = torch.linalg.solve_triangular(operator.factor, operator.power(2), upper=False, left=False)
    biased = filtered_readout(operator, 2)
    expected = operator.values @ torch.linalg.inv(operator.regularised) @ operator.factor @ shifted
    draws = torch.rand(DRAWS, RANK, generator=generator, dtype=torch.float64)
    kinds = torch.rand(DRAWS, RANK, generator=generator) < 0.5
    normal = normal_operator(torch.where(kinds, 0.7 + 0.3 * draws, 0.7 * draws), generator)
    distances, bounds = _errors(normal, query)
    blind = dataclasses.replace(normal, values=normal.values * kinds.unsqueeze(-2))  # reads no transient mode
    moduli = torch.tensor(MODULI, dtype=torch.float64)
    gamma = 1.5
    return {
        "filter": row("Echo, Prop. I.8", "error of C G̃⁻¹ L Â² L⁻¹", IDENTITY, error(biased, expected)),
        "filter bias": row("Echo, Prop. I.10", "error of the excess risk of the filter", IDENTITY,
            error(filter_bias(operator, 2), excess_risk(operator, biased))),
        "regime": row(
            "Echo, Thm I.11", "distance to the persistent target / bound", BOUND, quotient(distances[0], bounds[0])),
        "regime without": row(
            "Echo, Cor. I.12", "the same at K = 0", BOUND, quotient(distances[1], bounds[1].clamp(min=1e-12))),
        "regime helped": row(
            "Echo, Cor. I.12", "share of draws where the filter has the smaller bound, and of those where it is nearer",
            NUMBER, _helped(distances, bounds)),
        "regime lost": row("Echo, Cor. I.12", "the same if the read-out has no transient modes", NUMBER,
            _helped(*_errors(blind, query))),
        "printed powers": row("Echo, Prop. D.1", "largest difference from the printed tables", NUMBER,
            max(
                (filtered_amplitude(moduli, power) - torch.tensor(printed, dtype=moduli.dtype)).abs().max().item()
                for power, printed in PRINTED_POWERS.items()
            )),
        "energy left": row("Echo, Remark 3, §6.1", "energy of a mode at |λ| = 0.9 after K = 2, as a share", NUMBER,
            (filtered_amplitude(moduli, 2) ** 2)[1]),
        "restored": row("Echo, Prop. D.3", "‖(γ A_w)²‖ / γ²", BOUND,
            quotient(norm(operator.power(2, gamma)), torch.tensor(gamma**2))),
        "linear in the query": row(
            "Echo, Prop. I.13", "error of linearity in the query", IDENTITY, _nonlinearity(keys, query)),
        "held": row("Echo, §3.2.3", "steps for which every token is held", NUMBER, list(HELD)),
        "held recall": row("Echo, §3.2.3", "share of pairs recalled by K = 0, 1, 2, by steps", NUMBER,
            {str(power): [recall_of_held(power, held) for held in HELD] for power in POWERS}),
    }  # fmt: skip


def _errors(operator: Operator, query: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Return the distances of the answers of K = 2 and K = 0 to the persistent target, and their bounds."""
    target, filtered, unfiltered = regime(operator, query)
    answers = [(filtered_readout(operator, power) @ query.unsqueeze(-1)).squeeze(-1) for power in (2, 0)]
    return [(answer - target).norm(dim=-1) for answer in answers], [filtered.paper, unfiltered]


def _helped(distances: Sequence[Tensor], bounds: Sequence[Tensor]) -> list[float]:
    """Return the share of draws where K = 2 has the smaller bound, and of those where it is nearer."""
    better = bounds[0] < bounds[1]
    return [better.double().mean().item(), (distances[0] < distances[1])[better].double().mean().item()]


def _nonlinearity(keys: Tensor, query: Tensor) -> float:
    """Compare y(q₁ + q₂) of the op with y(q₁) + y(q₂)."""
    queries = torch.stack([query, query.flip(0), query + query.flip(0)], 1).unsqueeze(2)
    read, _ = koopman_attention(queries, keys.unsqueeze(2), keys.unsqueeze(2), mode="prefix", backend="reference")
    return error(read[:, 2], read[:, 0] + read[:, 1])
