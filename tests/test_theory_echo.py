"""Appendix J, Prop. C.5, Prop. E.1 and Table 1 of Echo against autograd, literal loops and counted multiplications."""

import math
from itertools import pairwise

import pytest
import torch
from helpers import generator

from halflife.analysis.koopman import Operator
from halflife.lab.theory import costs
from halflife.lab.theory.covariances import gram_bounds, gram_sizes, operators_of_phases, phase_attenuation
from halflife.lab.theory.gradients import (
    attention_bound,
    attention_jacobian,
    gradient_flow,
    numerical_rank,
    ska_jacobian,
    ska_lower,
    ska_upper,
)

EXACT = 1e-12


def draw(*shape, key="draw"):
    return torch.randn(*shape, generator=generator("echo", key, *shape), dtype=torch.float64)


def norm(matrix):
    return torch.linalg.matrix_norm(matrix, 2)


@pytest.mark.parametrize(("rank", "width", "length"), [(4, 3, 7), (5, 6, 3), (1, 1, 1), (3, 3, 2)])
def test_the_jacobian_of_attention(rank, width, length):
    """Prop. J.2: autograd of softmax(K q/√r)ᵀ V, its rank and its bounds; J.3 under large queries."""
    keys, values = draw(length, rank, key="k"), draw(length, width, key="v")
    for scale in (1, 10, 100):
        query = scale * draw(rank, key="q")
        expected = torch.autograd.functional.jacobian(
            lambda q: torch.exp(keys @ q / rank**0.5 - torch.logsumexp(keys @ q / rank**0.5, 0)) @ values, query
        )
        found = attention_jacobian(query, keys, values)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
        if scale == 1:  # beyond, the weights are so close to 0 and 1 that rounding errors have full rank
            assert numerical_rank(found) == min(width, rank, length - 1)
        bound = attention_bound(query, keys, values)
        assert norm(found) <= bound.sharp * (1 + EXACT) + 1e-15
        assert bound.sharp <= bound.paper * (1 + EXACT) + 1e-15


def test_the_sharp_bound_of_attention_is_reached():
    """Two opposite keys and values with weights m and 1 − m; the bound of the paper is larger for m ≠ ½."""
    keys, values = torch.tensor([[1.0], [-1.0]]).double(), torch.tensor([[1.0], [-1.0]]).double()
    for logit in (0.0, 0.3, 1.0, 3.0):
        query = torch.tensor([logit / 2]).double()
        bound = attention_bound(query, keys, values)
        assert norm(attention_jacobian(query, keys, values)).item() == pytest.approx(bound.sharp.item())
        assert (bound.paper > bound.sharp * (1 + 1e-9)) == (logit > 0)


@pytest.mark.parametrize(("rank", "width", "length", "power"), [(4, 6, 9, 2), (3, 3, 30, 1), (5, 2, 20, 2)])
def test_the_jacobian_of_ska(rank, width, length, power):
    """Prop. J.4 to J.6: autograd of η C G̃⁻¹ L Â^K L⁻¹ q, built literally, between its bounds."""
    keys, values, query = draw(length, rank, key="k"), draw(length, width, key="v"), draw(rank, key="q")
    operator, gamma, eta = Operator.of_tokens(keys, values), 1.3, 1.5
    gram = sum(torch.outer(z, z) for z in keys) + 1e-3 * max(z @ z for z in keys) * torch.eye(rank).double()
    step = sum(torch.outer(keys[t], keys[t - 1]) for t in range(1, length))
    read = sum(torch.outer(v, z) for v, z in zip(values, keys, strict=True))
    factor = torch.linalg.cholesky(gram)
    whitened = gamma * torch.linalg.inv(factor) @ step @ torch.linalg.inv(factor).T

    def output(q):
        x = torch.linalg.inv(factor) @ q
        for _ in range(power):
            x = whitened @ x
        return eta * read @ torch.linalg.inv(gram) @ factor @ x

    expected = torch.autograd.functional.jacobian(output, query)
    found = ska_jacobian(operator, power, gamma, eta)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)
    upper = ska_upper(operator, power, gamma, eta)
    assert norm(found) <= upper.sharp * (1 + EXACT)
    assert upper.sharp <= upper.paper * (1 + EXACT)
    least = torch.linalg.svdvals(found)[-1] if width >= rank else torch.zeros(())
    assert ska_lower(operator, power, gamma, eta) <= least * (1 + 1e-9)
    assert numerical_rank(found) == min(rank, width)
    assert (ska_lower(operator, power, gamma, eta) > 0) == (width >= rank)


@pytest.mark.parametrize("length", [2, 4, 5, 6])
def test_the_jacobian_of_ska_has_full_rank_from_more_tokens_than_channels_on(length):
    """Condition (3) of Prop. J.5: M is a sum of T − 1 outer products."""
    operator = Operator.of_tokens(draw(length, 5, key="k"), draw(length, 5, key="v"))
    assert int(numerical_rank(ska_jacobian(operator))) == min(5, length - 1)
    assert (ska_lower(operator) > 1e-20) == (length > 5)


def test_gradient_flow():
    found = gradient_flow(4, 4, (3, 12), (1, 30), (1, 3), trials=5)
    assert [(row["attention rank"], row["ska rank"]) for row in found["by tokens"]] == [(2, 2), (4, 4)]
    for row in (*found["by tokens"], *found["by depth"]):
        for name in ("attention", "ska"):  # the largest quotient of a draw is at least that of the means
            assert row[name] / row[f"{name} bound"] <= row[f"{name} over bound"] <= 1
    assert 0 < found["by tokens"][1]["lower over ska"] <= 1
    one, large = found["by scale"]
    assert large["attention bound"] < 0.5 * one["attention bound"]  # saturation, Corollary J.3
    assert one["ska"] == large["ska"]
    assert found["by depth"][1]["ska bound"] > 100 * found["by depth"][1]["ska"]


def test_operators_of_phases_are_literal_sums():
    content, phases = draw(9, key="content"), draw(9, key="phase")
    keys = [complex(c * math.cos(p), c * math.sin(p)) for c, p in zip(content.tolist(), phases.tolist(), strict=True)]
    found = operators_of_phases(content, phases)
    raw = sum(b * a.conjugate() for a, b in pairwise(keys)) / sum(abs(a) ** 2 for a in keys)
    assert complex(found.raw) == pytest.approx(raw)
    squares = [abs(a) ** 2 for a in keys]
    mean = sum(squares) / 9
    for name, x in (("invariant", squares), ("centred", [a - mean for a in squares])):
        expected = sum(a * b for a, b in pairwise(x)) / sum(a * a for a in x)
        assert getattr(found, name).item() == pytest.approx(expected)


def test_a_steady_rotation_attenuates_nothing():
    content = draw(500, key="rotation")
    still, turning = (operators_of_phases(content, w * torch.arange(500).double()) for w in (0.0, 1.7))
    assert abs(complex(turning.raw)) == pytest.approx(abs(complex(still.raw)))


def test_phases_attenuate_the_operator_as_expected():
    """The lift is free of the phase, but for content without dynamics its operator is 1/3 and not 0."""
    found = phase_attenuation(512, (0.0, 0.8), (0.0, 1.0, math.inf), trials=32)
    for row in found["rows"]:
        assert row["raw"] == pytest.approx(row["expected"], abs=0.06)
        assert row["invariant"] == pytest.approx(row["expected invariant"], abs=0.04)
        assert row["centred"] == pytest.approx(row["expected centred"], abs=0.05)
    assert [row["jitter"] for row in found["rows"]] == [0.0, 1.0, None] * 2
    assert found["rows"][0]["expected invariant"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(("length", "rank"), [(1, 3), (5, 8), (40, 4)])
def test_the_gram_matrix_is_bounded_by_the_tokens(length, rank):
    keys = draw(length, rank, key="gram")
    longest = max(float(z @ z) for z in keys)
    gram = sum(torch.outer(z, z) for z in keys) / longest
    found = gram_sizes(keys)
    assert found.trace.item() == pytest.approx(sum(float(z @ z) for z in keys) / longest)
    assert found.frobenius.item() == pytest.approx(math.sqrt((gram**2).sum()))
    assert found.largest <= found.frobenius * (1 + EXACT) <= found.trace * (1 + 2 * EXACT) <= length * (1 + 3 * EXACT)
    resolvent = torch.linalg.inv(gram + 1e-3 * torch.eye(rank).double())
    assert found.directions.item() == pytest.approx((gram @ resolvent).trace().item())


def test_equal_keys_reach_the_bound_and_an_outlier_leaves_it():
    same = draw(3, key="same").expand(7, 3)
    assert [value.item() for value in gram_sizes(same)[:3]] == pytest.approx([7, 7, 7])
    rows = gram_bounds(6, (50,), (1, 100))["rows"]
    assert rows[0]["directions"] > 5.9
    assert rows[1]["directions"] < 4  # the ridge is relative to the one large key
    assert rows[1]["trace"] < 1.1


class Counted(float):
    """A number that counts its multiplications and divisions."""

    count = 0

    def __mul__(self, other):
        Counted.count += 1
        return Counted(float(self) * float(other))

    def __truediv__(self, other):
        Counted.count += 1
        return Counted(float(self) / float(other))

    def __add__(self, other):
        return Counted(float(self) + float(other))

    def __sub__(self, other):
        return Counted(float(self) - float(other))


def counted(shape, key):
    return [[Counted(x) for x in row] for row in draw(*shape, key=key).tolist()]


def factorise(a):
    """Return L of `L Lᵀ = a`, column by column; the square root of the diagonal is no multiplication."""
    size = len(a)
    low = [[Counted(0)] * size for _ in range(size)]
    for j in range(size):
        for i in range(j, size):
            rest = a[i][j]
            for k in range(j):
                rest = rest - low[i][k] * low[j][k]
            low[i][j] = Counted(math.sqrt(rest)) if i == j else rest / low[j][j]
    return low


def solve(low, b):
    size, x = len(b), list(b)
    for i in range(size):
        for k in range(i):
            x[i] = x[i] - low[i][k] * x[k]
        x[i] = x[i] / low[i][i]
    for i in reversed(range(size)):
        for k in range(i + 1, size):
            x[i] = x[i] - low[k][i] * x[k]
        x[i] = x[i] / low[i][i]
    return x


def apply(matrix, x):
    out = []
    for row in matrix:
        total = Counted(0)
        for a, b in zip(row, x, strict=True):
            total = total + a * b
        out.append(total)
    return out


def test_counts_are_those_of_a_literal_loop():
    """SKA in chunks, attention and Mamba-2's state, token by token, with numbers that count."""
    rank, width, chunk, power, length = 3, 2, 2, 2, 6
    sizes = costs.LayerSizes(
        hidden_size=2, num_heads=1, rank=rank, width=width, chunk=chunk, power=power, state_size=3, expand=2
    )
    wanted = costs.layer_costs(sizes, length)
    keys, values, queries = counted((length, rank), "k"), counted((length, width), "v"), counted((length, rank), "q")
    gram = [[Counted(float(i == j)) for j in range(rank)] for i in range(rank)]
    step = [[Counted(0)] * rank for _ in range(rank)]
    read = [[Counted(0)] * rank for _ in range(width)]
    before = [Counted(0)] * rank

    def add(into, left, right):
        for i, a in enumerate(left):
            for j, b in enumerate(right):
                into[i][j] = into[i][j] + a * b

    Counted.count = 0
    for t in range(length):
        if t % chunk == 0:
            low = factorise(gram)
            used = [list(row) for row in step], [list(row) for row in read]
        x = solve(low, queries[t])
        for _ in range(power):
            x = solve(low, apply(used[0], x))
        apply(used[1], x)
        add(gram, keys[t], keys[t])
        add(step, keys[t], before)
        add(read, values[t], keys[t])
        before = keys[t]
    assert Counted.count == wanted["SKA"]["train"]
    assert wanted["SKA"]["step"] == (wanted["SKA"]["train"] - 3 * costs.cholesky(rank)) // length + costs.cholesky(rank)

    hidden = counted((length, 2), "x")
    Counted.count = 0
    for t in range(length):
        scores = [apply([hidden[s]], hidden[t])[0] for s in range(t + 1)]
        apply([[hidden[s][i] for s in range(t + 1)] for i in range(2)], scores)
    assert Counted.count == wanted["Causal Attention"]["train"]
    assert wanted["Causal Attention"]["step"] == 2 * 2 * length

    state = [[Counted(0)] * 4 for _ in range(3)]
    Counted.count = 0
    for t in range(length):
        b, c, v, decay = keys[t], queries[t], values[t] + hidden[t], Counted(0.5)
        state = [[decay * entry for entry in row] for row in state]
        add(state, b, v)
        apply([[state[i][j] for i in range(3)] for j in range(4)], c)
    assert Counted.count == wanted["Mamba-2"]["train"] == length * wanted["Mamba-2"]["step"]


def test_costs_against_the_table():
    """SKA's training is linear in T, and the Koopman MLP saves a third of the products, as of the parameters."""
    found = costs.cost_table(lengths=(1024, 2048))["counts"]
    assert found["SKA"]["train"][1] == 2 * found["SKA"]["train"][0]
    assert found["SKA"]["train"][1] / found["SKA"]["printed train"][1] > 100
    assert found["Koopman MLP"]["step"][0] / found["SwiGLU MLP"]["step"][0] == pytest.approx(2 / 3, rel=1e-2)
    assert found["Causal Attention"]["step"][1] == 2 * found["Causal Attention"]["step"][0]
    assert found["Mamba-2"]["step"][0] == found["Mamba-2"]["step"][1]
