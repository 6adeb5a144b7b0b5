"""Statements of Echo about the operator of its keys, ridge retrieval and the filter (Appendices A to D and I)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from halflife.analysis import koopman
from halflife.analysis.koopman import Operator
from halflife.evaluation.memory import ska_crossover, ska_state_size
from halflife.lab.theory.koopman_bounds import bauer_fike, eigenvalue_bound, perturbation_bound, regime
from halflife.lab.theory.statements.row import BOUND, IDENTITY, NUMBER, error, quotient, row
from halflife.layers.mlp import ClampedEigenvalues, KoopmanMLP
from halflife.layers.parts import clebsch_gordan
from halflife.ops import koopman_attention

TOKENS, WIDTH = 40, 8
DRAWS, RANK, EPSILON = 200, 8, 1e-3
PRINTED_POWERS = {2: (0.902, 0.810, 0.490, 0.250, 0.090), 4: (0.815, 0.656, 0.240, 0.063, 0.008)}  # Prop. D.1
MODULI = (0.95, 0.9, 0.7, 0.5, 0.3)
HELD, POWERS = tuple(range(1, 10)), (0, 1, 2)
PAIRS = (8, 16, 24, 48, 96, 192)


def recall_of_ridge(pairs: Sequence[int]) -> dict[str, list[float]]:
    """Recall random pairs by ridge regression (K = 0), with T = `pairs` in a state of one size.

    Returns:
        "recall", the share of pairs whose value is the nearest one, and "least", the mean λ_min(G̃), by T.
    """
    generator = torch.Generator().manual_seed(0)
    columns: dict[str, list[float]] = {"recall": [], "least": []}
    for count in pairs:
        keys, values = torch.nn.functional.normalize(
            torch.randn(2, 8, count, 24, generator=generator, dtype=torch.float64), dim=-1
        )
        operator = Operator.of_tokens(keys, values, EPSILON)
        found = (keys @ operator.readout.mT @ values.mT).argmax(-1)
        columns["recall"].append((found == torch.arange(count)).double().mean().item())
        columns["least"].append(koopman.lambda_min(operator).mean().item())
    return columns


def power_traces(matrix: Tensor) -> Tensor:
    """Return tr A, tr A², … tr A^R `[…, R]`, which are equal if and only if the eigenvalues are."""
    return torch.stack([
        torch.linalg.matrix_power(matrix, n).diagonal(dim1=-2, dim2=-1).sum(-1) for n in range(1, matrix.shape[-1] + 1)
    ], -1)  # fmt: skip


def weak_direction(keys: Tensor) -> float:
    """Return the power of σ as which ‖M G̃⁻¹ v‖ falls, for a weak direction v with vᵀ G v = σ ≪ ε (Prop. A.2).

    It is 1 where M v = σ A v, as with exact dynamics. Other keys have ‖M v‖ of order √σ.
    """
    levels = []
    for size in (1e-4, 1e-5):
        weak = torch.cat([keys[..., :-1], size * keys[..., -1:]], -1)
        operator = Operator.of_tokens(weak, keys, EPSILON)
        support, directions = torch.linalg.eigh(operator.gram)
        moved = (operator.transition @ directions[..., :1]).norm(dim=(-2, -1)) / (support[..., 0] + operator.ridge)
        levels.append(torch.stack([support[..., 0], moved]).log())
    change = levels[0] - levels[1]
    return (change[1] / change[0]).mean().item()


def koopman_mlp_quotient(generator: torch.Generator) -> float:
    """Return the largest ‖J‖ of the Koopman MLP over `c ‖W_read‖ ‖W_lift‖`, c = sup SiLU′ ≈ 1.0998 (Prop. J.8)."""
    layer, steepest = KoopmanMLP(RANK, 2 * RANK, clamped=True).double(), 1.09984
    found = []
    with torch.no_grad():
        for part in layer.parameters():
            part.copy_(torch.randn(part.shape, generator=generator, dtype=torch.float64))
    for _ in range(20):
        x = 3 * torch.randn(RANK, generator=generator, dtype=torch.float64)
        found.append(koopman.norm(torch.func.jacrev(layer)(x)))
    bound = steepest * koopman.norm(layer.read.weight) * koopman.norm(layer.lift.weight)
    return quotient(torch.stack(found), bound)


def statements(seed: int) -> dict[str, dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    keys, values, query = normal(DRAWS, TOKENS, RANK), normal(DRAWS, TOKENS, WIDTH), normal(DRAWS, RANK)
    operator = Operator.of_tokens(keys, values, EPSILON)
    noisy = Operator.of_tokens(keys + 0.1 * normal(*keys.shape), values, EPSILON)
    return {
        **_operators(operator, noisy, keys),
        **_retrieval(operator, keys, values, query),
        **_filter(operator, keys, query, generator),
        **_memory(),
        **_printed(keys, values, query, generator),
    }


def _operators(operator: Operator, noisy: Operator, keys: Tensor) -> dict[str, dict[str, Any]]:
    """Appendices A to C."""
    inverse = torch.linalg.inv(operator.regularised)
    unwhitened, reversed_order = operator.transition @ inverse, inverse @ operator.transition
    traces = power_traces(operator.whitened)
    support, directions = torch.linalg.eigh(operator.gram)
    before, after = keys[:, :-1], keys[:, 1:]
    fitted = torch.linalg.lstsq(before, after).solution.mT  # z_{t+1} ≈ A z_t
    least_squares = (after.mT @ before) @ torch.linalg.inv(before.mT @ before)
    other = noisy.transition @ torch.linalg.inv(noisy.regularised)
    moved = (noisy.eigenvalues.unsqueeze(-1) - operator.eigenvalues.unsqueeze(-2)).abs().amin(-1).amax(-1)
    change = noisy.whitened - operator.whitened
    angle = 7 * keys[..., :4]
    pairs, phases = torch.complex(keys[..., :4], keys[..., 4:]), torch.polar(torch.ones_like(angle), angle)
    invariant, turned = (
        clebsch_gordan(torch.view_as_real(each).flatten(-2))[..., :4] for each in (pairs, pairs * phases)
    )
    return {
        "least squares": row("Echo, Prop. A.1", "error of M G⁻¹", IDENTITY, error(least_squares, fitted)),
        "whitened": row("Echo, Props. A.3, I.4", "difference of tr A_wⁿ and tr (M G̃⁻¹)ⁿ", IDENTITY,
            error(power_traces(unwhitened), traces)),
        "reversed": row("Echo, Remark 2", "difference of tr (G̃⁻¹ M)ⁿ and tr (M G̃⁻¹)ⁿ", IDENTITY,
            error(power_traces(reversed_order), traces)),
        "ridge by direction": row("Echo, Prop. A.2", "error of M V diag(1 / (σ + ε)) Vᵀ", IDENTITY,
            error((operator.transition @ directions / (support + operator.ridge.unsqueeze(-1)).unsqueeze(-2))
                  @ directions.mT, unwhitened)),
        "weak direction": row("Echo, Prop. A.2", "power of σ as which ‖M G̃⁻¹ v‖ falls for σ ≪ ε", NUMBER,
            weak_direction(keys)),
        "positive definite": row("Echo, Lemmas A.4, I.1", "ε / λ_min(G̃)", BOUND,
            quotient(operator.ridge, torch.linalg.eigvalsh(operator.regularised)[..., 0])),
        "lift": row("Echo, Thm B.2", "change of |k|² under a phase", IDENTITY, error(turned, invariant)),
        "perturbation": row("Echo, Thm C.1", "‖Â − A‖ / bound", BOUND,
            quotient(koopman.norm(other - unwhitened), perturbation_bound(operator, noisy).paper)),
        "bauer fike": row("Echo, Thm C.3", "movement of an eigenvalue / bound", BOUND,
            quotient(moved, bauer_fike(operator.whitened, change))),
        "combined": row("Echo, Cor. C.4", "movement of an eigenvalue / bound", BOUND,
            quotient(moved, eigenvalue_bound(operator, noisy).paper)),
        "largest whitened": row(
            "Echo, Eq. 12, Prop. D.2", "largest σ_max(A_w) before normalisation", NUMBER,
            koopman.sigma_max(operator).max()),
        "largest main text": row("Echo, Eq. 11", "least and largest σ_max(M G̃⁻¹)", NUMBER,
            [koopman.norm(unwhitened).min().item(), koopman.norm(unwhitened).max().item()]),
    }  # fmt: skip


def _retrieval(operator: Operator, keys: Tensor, values: Tensor, query: Tensor) -> dict[str, dict[str, Any]]:
    """Appendix I, without the filter."""
    ridge, best = operator.ridge[..., None, None], operator.readout
    stacked = torch.cat([keys, (ridge.sqrt() * torch.eye(RANK, dtype=keys.dtype)).expand(DRAWS, -1, -1)], 1)
    padded = torch.nn.functional.pad(values, (0, 0, 0, RANK))
    fitted = torch.linalg.lstsq(stacked, padded).solution.mT
    energy = values.square().sum((-2, -1))
    linear = operator.values
    excess = koopman.loss(operator, linear, energy) - koopman.loss(operator, best, energy)
    start = torch.zeros_like(linear, requires_grad=True)
    koopman.loss(operator, start, energy).sum().backward()
    assert start.grad is not None
    read, scaled = (linear @ query.unsqueeze(-1)), (best @ query.unsqueeze(-1))
    distance = (read - koopman.linear_scale(operator)[..., None, None] * scaled).squeeze(-1).norm(dim=-1)
    bound = koopman.norm(linear) * koopman.linear_bound(operator) * query.norm(dim=-1)
    direction = torch.linalg.eigh(operator.regularised).eigenvectors[..., 0:1]  # a query that linear attention solves
    along, solved = linear @ direction, best @ direction
    size = (along * solved).sum((-2, -1)) / solved.square().sum((-2, -1))
    answers = [
        koopman_attention(
            query[:, None, None], keys.unsqueeze(2), values.unsqueeze(2), power=power, ridge=EPSILON, mode="prefix",
            backend="reference",
        )[0][:, 0, 0]
        for power in (0, 2)
    ]  # fmt: skip
    filtered = (koopman.filtered_readout(operator, 2) @ query.unsqueeze(-1)).squeeze(-1)
    ridge_recall = recall_of_ridge(PAIRS)
    return {
        "ridge": row("Echo, Prop. I.2", "error of C G̃⁻¹ as a least-squares solution", IDENTITY, error(best, fitted)),
        "excess": row("Echo, Prop. I.3", "error of the excess risk of C", IDENTITY,
            error(koopman.excess_risk(operator, linear), excess)),
        "gradient step": row(
            "Echo, Prop. I.5", "C against half a gradient step from 0", IDENTITY, error(-0.5 * start.grad, linear)),
        "linear distance": row("Echo, Thm I.6", "‖C q − a* B* q‖ / bound", BOUND, quotient(distance, bound)),
        "unavoidable": row("Echo, §I.10", "distance of C q from a B* q for an eigenvector q", IDENTITY,
            error(size[..., None, None] * solved, along)),
        "ridge at K = 0": row("Echo, Props. I.7, I.8, Cor. I.9", "error of the op at K = 0", IDENTITY,
            error(answers[0], scaled.squeeze(-1))),
        "pipeline": row("Echo, Prop. I.8", "error of the op at K = 2", IDENTITY, error(answers[1], filtered)),
        "pairs": row("Echo, §3.2.2", "pairs in a state of rank 24", NUMBER, list(PAIRS)),
        "pairs recalled": row(
            "Echo, §3.2.2", "share that ridge regression recalls, by pairs", NUMBER, ridge_recall["recall"]),
        "pairs least": row("Echo, §3.2.2", "mean λ_min(G̃), by pairs", NUMBER, ridge_recall["least"]),
    }  # fmt: skip


def _printed(keys: Tensor, values: Tensor, query: Tensor, generator: torch.Generator) -> dict[str, dict[str, Any]]:
    """Sentences of §3.2.2 and §3.3."""
    louder = torch.cat([keys[:, :-1], 10 * keys[:, -1:]], 1)
    early = [
        koopman_attention(
            query[:, None, None].expand(-1, TOKENS, -1, -1), each.unsqueeze(2), values.unsqueeze(2),
            normalization="sequence", chunk_size=2, backend="reference",
        )[0][:, : TOKENS // 2]
        for each in (louder, keys)
    ]  # fmt: skip
    eigenvalues = ClampedEigenvalues(DRAWS).double()
    with torch.no_grad():
        for part in eigenvalues.parameters():
            part.copy_(torch.randn(DRAWS, generator=generator, dtype=torch.float64))
        real, imaginary = eigenvalues()
    blocks = torch.stack([real, imaginary, -imaginary, real], -1).unflatten(-1, (2, 2))
    return {
        "future key": row(
            "Echo, Eq. 3", "change of the outputs of the first half if the last key is ten times as long", IDENTITY,
            error(*early)),
        "koopman mlp": row("Echo, Props. J.7, J.8", "‖Jacobian of the Koopman MLP‖ / bound", BOUND,
            koopman_mlp_quotient(generator)),
        "rotation": row("Echo, §3.3", "smallest σ of the blocks of Eq. 14, with clamped random γ and ω", NUMBER,
            torch.linalg.svdvals(blocks).min()),
    }  # fmt: skip


def _memory() -> dict[str, dict[str, Any]]:
    rank, width = 56, 64
    cache = [length * (rank + width) for length in range(1, 1000)]
    smaller = next(length for length, size in enumerate(cache, 1) if size > ska_state_size(rank, width))
    return {
        "crossover": row(
            "Echo, Prop. I.14", "first length at which a cache is larger, counted and by the formula (r 56, P 64)",
            NUMBER, [smaller, ska_crossover(rank, width)]),
        "state kB": row("Echo, §3.5", "kB of the SKA states of the 50M model in float32", NUMBER,
            4 * 4 * 7 * ska_state_size(rank, width) / 1000),
    }  # fmt: skip


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


def _filter(operator: Operator, keys: Tensor, query: Tensor, generator: torch.Generator) -> dict[str, dict[str, Any]]:
    """Appendices D and I.6 to I.8, and §3.2.3."""
    shifted = torch.linalg.solve_triangular(operator.factor, operator.power(2), upper=False, left=False)
    biased = koopman.filtered_readout(operator, 2)
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
            error(koopman.filter_bias(operator, 2), koopman.excess_risk(operator, biased))),
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
                (koopman.filtered_amplitude(moduli, power) - moduli.new_tensor(printed)).abs().max().item()
                for power, printed in PRINTED_POWERS.items()
            )),
        "energy left": row("Echo, Remark 3, §6.1", "energy of a mode at |λ| = 0.9 after K = 2, as a share", NUMBER,
            (koopman.filtered_amplitude(moduli, 2) ** 2)[1]),
        "restored": row("Echo, Prop. D.3", "‖(γ A_w)²‖ / γ²", BOUND,
            quotient(koopman.norm(operator.power(2, gamma)), torch.tensor(gamma**2))),
        "linear in the query": row(
            "Echo, Prop. I.13", "error of linearity in the query", IDENTITY, _nonlinearity(keys, query)),
        "held": row("Echo, §3.2.3", "steps for which every token is held", NUMBER, list(HELD)),
        "held recall": row("Echo, §3.2.3", "share of pairs recalled by K = 0, 1, 2, by steps", NUMBER,
            {str(power): [recall_of_held(power, held) for held in HELD] for power in POWERS}),
    }  # fmt: skip


def _errors(operator: Operator, query: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Return the distances of the answers of K = 2 and K = 0 to the persistent target, and their bounds."""
    target, filtered, unfiltered = regime(operator, query)
    answers = [(koopman.filtered_readout(operator, power) @ query.unsqueeze(-1)).squeeze(-1) for power in (2, 0)]
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
