"""Diagnostics of spectral Koopman attention against the statements of its paper (Echo, Appendices A, C, D, I)."""

import math

import pytest
import torch
from helpers import assert_close, assert_raises, generator
from hypothesis import given, settings
from hypothesis import strategies as st

from halflife.analysis import koopman
from halflife.analysis.koopman import Operator, norm
from halflife.lab.theory import koopman_bounds
from halflife.ops.koopman.op import koopman_attention

RANK, WIDTH = 5, 4

# In float64, four times the worst measured error, relative to the largest entry.
EXACT = 4 * 1.7e-15
SLACK = 1 + 1e-12  # of inequalities, which rounding may violate where they are equalities

anything = settings(max_examples=60, deadline=None, database=None, derandomize=True)
seeds = st.integers(0, 10**6)


def tokens(*key, length=12, rank=RANK, width=WIDTH):
    draw = generator("koopman analysis", *key)
    return torch.randn(length, rank, generator=draw, dtype=torch.float64), torch.randn(
        length, width, generator=draw, dtype=torch.float64
    )


@st.composite
def any_tokens(draw):
    """Keys of any rank and size, of very different sizes, with repetitions and runs, and without keys."""
    rank, length = draw(st.integers(1, 6)), draw(st.integers(0, 25))
    keys, values = tokens(draw(seeds), length=length, rank=rank)
    if draw(st.booleans()):
        true_rank = draw(st.integers(0, rank))
        keys = keys[:, :true_rank] @ tokens(draw(seeds), length=true_rank, rank=rank)[0]
    if length and draw(st.booleans()):
        keys = keys[torch.randint(draw(st.integers(1, length)), (length,), generator=generator(draw(seeds)))]
    if draw(st.booleans()):
        keys = keys * 10 ** (3 * tokens(draw(seeds), length=length, rank=1)[0])
    return keys * 10.0 ** draw(st.integers(-9, 9)), values


def normal(levels, seed=0, width=WIDTH):
    """An operator whose A_w is normal and has these eigenvalues. A complex one stands for its conjugate pair."""
    blocks = [
        torch.tensor([[z.real, -z.imag], [z.imag, z.real]] if isinstance(z, complex) else [[z]], dtype=torch.float64)
        for z in levels
    ]
    middle = torch.block_diag(*blocks)
    rank = len(middle)
    basis = torch.linalg.qr(tokens("basis", seed, length=rank, rank=rank)[0]).Q
    keys, values = tokens("gram", seed, length=3 * rank, rank=rank, width=width)
    blank = Operator.of_tokens(keys, values)
    transition = blank.factor @ basis @ middle @ basis.T @ blank.factor.mT
    return Operator(blank.gram, transition, blank.values, blank.ridge)


def with_gram(gram, values=None):
    """An operator with G̃ = `gram`, which includes a ridge of 0.1, and by default C = I."""
    eye = torch.eye(len(gram), dtype=gram.dtype)
    return Operator(gram - 0.1 * eye, 0 * eye, eye if values is None else values, torch.tensor(0.1, dtype=gram.dtype))


def test_sums_are_those_of_the_op_at_every_head():
    draw = generator("op")
    k, v = torch.randn(2, 2, 9, 3, RANK, generator=draw, dtype=torch.float64)
    v = v[..., :WIDTH]
    _, state = koopman_attention(k, k, v, chunk_size=4, output_final_state=True)
    ours = Operator.of_state(state, 1e-2)
    assert (ours.eigenvalues.shape, koopman.sigma_max(ours).shape) == ((2, 3, RANK), (2, 3))
    for b in range(2):
        for h in range(3):
            alone = Operator.of_tokens(k[b, :8, h], v[b, :8, h], 1e-2)
            for name in ("regularised", "whitened", "readout", "levels", "power"):
                one, many = getattr(alone, name), getattr(ours, name)
                one, many = (one(2, 1.2), many(2, 1.2)) if name == "power" else (one, many)
                assert_close(many[b, h], one, EXACT)


def test_reading_by_it_is_the_op():
    """`filtered_readout` on a query is `koopman_attention` (Prop. I.8, Corollary I.9 at K = 0)."""
    keys, values = tokens("op")
    query = tokens("query", length=3)[0]
    for power, gamma, mix in ((0, 1.0, 1.0), (2, 1.3, 1.0), (3, 1.1, 0.4)):
        y, _ = koopman_attention(
            *(x[None, :, None] for x in (query, keys, values)), mode="prefix", power=power, gamma=gamma, mix=mix
        )
        ours = koopman.filtered_readout(Operator.of_tokens(keys, values), power, gamma, mix)
        assert_close(query @ ours.mT, y[0, :, 0], EXACT)


def test_single_precision_goes_in_and_double_comes_out():
    keys, values = tokens("single")
    operator = Operator.of_tokens(keys.float(), values.float())
    assert operator.whitened.dtype == operator.gram.dtype == torch.float64


def test_rounding_below_zero_is_zero():
    k = torch.ones(1, 400, 1, 3) + 1e-4 * torch.randn(1, 400, 1, 3, generator=generator("rounding"))
    _, state = koopman_attention(k, k, k, chunk_size=1, output_final_state=True)
    state["gram"][..., 0, 0] -= 1e-4
    assert torch.linalg.eigvalsh(state["gram"].double()).min() < 0
    operator = Operator.of_state(state, 1e-9)
    assert koopman.lambda_min(operator).item() == pytest.approx(operator.ridge.item(), rel=1e-3)
    assert operator.factor.isfinite().all()


def test_nothing_seen():
    keys, values = tokens("nothing", length=0)
    operator = Operator.of_tokens(keys, values)
    assert (koopman.sigma_max(operator), koopman.condition(operator), koopman.linear_bound(operator)) == (0, 1, 0)
    assert koopman.lambda_min(operator) == 1e-3
    assert operator.readout.eq(0).all()


@anything
@given(any_tokens())
def test_sigma_max_is_at_most_one(found):
    """It is at most λ_max(G) / (λ_max(G) + ridge), and so is every eigenvalue."""
    operator = Operator.of_tokens(*found)
    largest = operator.levels[-1]
    assert koopman.sigma_max(operator) <= (largest - operator.ridge) / largest * SLACK + 1e-12
    assert operator.eigenvalues.abs().max() <= koopman.sigma_max(operator) * SLACK + 1e-12


def test_sigma_max_comes_as_near_to_one_as_the_keys_persist():
    for length in (1, 2, 10, 10_000):
        operator = Operator.of_tokens(*(x.expand(length, -1) for x in tokens("one", length=1)), ridge=1e-6)
        assert koopman.sigma_max(operator).item() == pytest.approx((length - 1) / (length + 1e-6), abs=1e-12)


def test_the_normalisation_would_act_on_the_unwhitened_operator_alone():
    """σ_max(M G̃⁻¹) can exceed 1, up to √κ(G̃) σ_max(A_w)."""
    largest = 0.0
    for seed in range(50):
        keys, values = tokens("unwhitened", seed, length=6)
        operator = Operator.of_tokens(keys * torch.logspace(0, -2, RANK, dtype=keys.dtype), values)
        unwhitened = norm(operator.transition @ torch.linalg.inv(operator.regularised))
        assert unwhitened <= koopman.condition(operator).sqrt() * koopman.sigma_max(operator) * SLACK
        largest = max(largest, unwhitened.item())
    assert largest > 2


def test_modes():
    found = koopman.modes(torch.tensor([1.0, 0.71, 1.3 + 0j, 0.69, 0.0, -0.7, -1.0, 1j, 0.7 * (1 + 1j), 1.31]))
    assert found.persistent.tolist() == [True, True, True] + 7 * [False]
    assert found.transient.tolist() == 3 * [False] + 3 * [True] + 4 * [False]
    assert found.neither.tolist() == 6 * [False] + 4 * [True]
    both = koopman.modes(torch.tensor([0.6]), delta=0.5, rho=0.7)
    assert (both.persistent.item(), both.transient.item()) == (True, False)


def test_what_a_key_that_turns_is_called():
    """A key with alternating signs has |λ| = 1 but no persistent mode of Theorem I.11. K = 2 hides its sign."""
    keys = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64).repeat(500, 1)
    operator = Operator.of_tokens(keys, keys)
    turning = operator.eigenvalues[operator.eigenvalues.abs().argmax()]
    assert turning.real.item() == pytest.approx(-1, abs=2e-3)
    assert koopman.modes(operator.eigenvalues).neither.sum() == 1
    assert operator.power(2)[0, 0].item() == pytest.approx(1, abs=4e-3)


def test_the_filter_reaches_gamma():
    operator = Operator.of_tokens(*(x.expand(10**6, -1) for x in tokens("one", length=1)))
    assert norm(operator.power(2, 1.5)).item() == pytest.approx(2.25, rel=1e-5)


@anything
@given(any_tokens())
def test_no_eigenvalue_lies_below_the_ridge(found):
    """Lemma A.4 holds, with equality if the keys do not span the space, and agrees with `condition`."""
    operator = Operator.of_tokens(*found)
    assert koopman.lambda_min(operator) >= operator.ridge
    if len(found[0]) < found[0].shape[1]:
        assert koopman.lambda_min(operator) <= operator.ridge + 1e-14 * operator.levels[-1]
    expected = torch.linalg.cond(operator.regularised, 2)
    assert koopman.condition(operator).item() == pytest.approx(expected.item(), rel=1e-6)


@anything
@given(any_tokens(), seeds, st.sampled_from([1e-3, 0.1, 10.0]))
def test_excess_risk_identity(found, seed, ridge):
    """L(B) − L(B*) = ‖(B − B*) L‖² (Prop. I.3), and `loss` and `residual` are right for any B."""
    keys, values = found
    keys = keys / keys.norm(dim=-1).max().clamp(min=1e-300) if len(keys) else keys
    operator = Operator.of_tokens(keys, values, ridge)
    readout = tokens("B", seed, length=WIDTH, rank=keys.shape[1])[0]
    energy = values.square().sum()
    left = (values - keys @ readout.mT).square().sum()
    loss = koopman.loss(operator, readout, energy)
    assert_close(koopman.residual(operator, readout, energy), left, EXACT)
    assert_close(loss, left + operator.ridge * readout.square().sum(), EXACT)
    assert_close(koopman.loss(operator, operator.readout, energy) + koopman.excess_risk(operator, readout), loss, EXACT)


@anything
@given(any_tokens(), seeds)
def test_linear_attention_is_near_ridge_when_the_gram_is_isotropic(found, seed):
    """Theorem I.6 holds for its a, and in the mean over queries."""
    operator = Operator.of_tokens(*found)
    query = tokens("q", seed, length=1, rank=found[0].shape[1])[0][0]
    scale, bound = koopman.linear_scale(operator), koopman.linear_bound(operator)
    error = (operator.values @ query - scale * operator.readout @ query).norm()
    assert error <= norm(operator.values) * query.norm() * (bound * SLACK + 1e-12)
    if operator.values.any():
        assert koopman.linear_distance(operator) <= bound * SLACK + 1e-12


def test_the_distance_to_linear_attention_is_reached():
    """With C = I, no scale beats (κ − 1)/(κ + 1) for the query that G̃⁻¹ turns most, but some do for others."""
    basis = torch.linalg.qr(tokens("basis", length=3, rank=3)[0]).Q
    low, high = 0.2, 5.0
    operator = with_gram(basis @ torch.diag(torch.tensor([low, 1.0, high], dtype=torch.float64)) @ basis.mT)
    bound = koopman.linear_bound(operator).item()
    assert bound == pytest.approx((high - low) / (high + low))
    worst = basis @ torch.tensor([low, 0.0, high], dtype=torch.float64).sqrt() / math.sqrt(low + high)
    ridge = operator.readout @ worst
    best = (ridge @ worst) / (ridge @ ridge)
    assert best.item() == pytest.approx(koopman.linear_scale(operator).item())
    assert (worst - best * ridge).norm().item() == pytest.approx(bound)
    easy = basis[:, 0]  # an eigenvector: the error that I.10 calls unavoidable is 0
    assert (easy - low * operator.readout @ easy).norm() < 1e-12
    isotropic = with_gram(3 * torch.eye(3, dtype=torch.float64))
    assert koopman.linear_bound(isotropic).item() == pytest.approx(0, abs=1e-12)
    assert_close(3 * isotropic.readout, isotropic.values, EXACT)


def test_the_distance_over_all_queries_is_the_smallest():
    operator = Operator.of_tokens(*tokens("distance"), ridge=0.1)
    scales = torch.linspace(0, 2 * operator.levels[-1].item(), 20_001, dtype=torch.float64)
    errors = (operator.values - scales[:, None, None] * operator.readout).square().sum((-2, -1)).sqrt()
    expected = errors.min() / operator.values.square().sum().sqrt()
    assert koopman.linear_distance(operator).item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize("mix", [1.0, 0.3])
@pytest.mark.parametrize("power", [0, 1, 2, 4])
def test_bias_of_the_filter(power, mix):
    """Both identities of Prop. I.10 hold with the long form of the paper."""
    keys, values = tokens("bias")
    operator, gamma = Operator.of_tokens(keys, values), 1.2
    factor = torch.linalg.cholesky(operator.regularised)
    whitened = gamma * torch.linalg.inv(factor) @ operator.transition @ torch.linalg.inv(factor).mT
    change = factor @ torch.linalg.matrix_power(whitened, power) @ torch.linalg.inv(factor) - torch.eye(RANK)
    readout = koopman.filtered_readout(operator, power, gamma, mix)
    query = tokens("query", length=1)[0][0]
    assert_close(readout @ query, operator.readout @ (query + mix * change @ query), EXACT)
    bias = koopman.filter_bias(operator, power, gamma, mix)
    energy = values.square().sum()
    expected = koopman.loss(operator, readout, energy) - koopman.loss(operator, operator.readout, energy)
    assert (bias - expected).abs() <= EXACT * energy
    assert (bias - koopman.excess_risk(operator, readout)).abs() <= EXACT * energy


def error(operator, query, target, power, gamma):
    return (koopman.filtered_readout(operator, power, gamma) @ query - target).norm()


@anything
@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 2 * math.pi), st.booleans()), min_size=1, max_size=4),
    st.integers(0, 4), st.sampled_from([1.0, 1.25, 1.5]), seeds,
)  # fmt: skip
def test_regime_bound(modes, power, gamma, seed):
    """Theorem I.11 and its sharper form hold for normal operators whose modes are of the two kinds."""
    delta, rho = 0.2, 0.5
    discs = [(radius * complex(math.cos(angle), math.sin(angle)), lasting) for radius, angle, lasting in modes]
    operator = normal([(1 + delta * z if lasting else rho * z) / gamma for z, lasting in discs], seed)
    query = tokens("query", seed, length=1, rank=operator.gram.shape[0])[0][0]
    found = koopman_bounds.regime(operator, query, power, gamma, delta + 1e-9, rho + 1e-9)
    distance = error(operator, query, found.target, power, gamma)
    assert distance <= found.filtered.sharp * SLACK + 1e-12
    assert found.filtered.sharp <= found.filtered.paper * SLACK
    assert error(operator, query, found.target, 0, gamma) <= found.unfiltered * SLACK + 1e-12


def isometric(levels, width=None):
    """An operator for which C L⁻ᵀ is the identity."""
    operator = normal(levels, width=width or len(levels))
    return Operator(operator.gram, operator.transition, operator.factor.mT, operator.ridge)


@pytest.mark.parametrize(("levels", "part"), [([1.2, 1.2, 1.2], "persistent"), ([0.5, 0.5], "transient")])
def test_regime_bound_is_reached(levels, part):
    """Modes at the edge 1 + δ alone, which needs γ > 1, or at ρ alone reach it."""
    operator = isometric([x / 1.5 for x in levels])
    query = tokens("query", length=1, rank=len(levels))[0][0]
    found = koopman_bounds.regime(operator, query, 2, 1.5, 0.2 + 1e-9, 0.5 + 1e-9)
    distance = error(operator, query, found.target, 2, 1.5).item()
    assert found.filtered.paper.item() == pytest.approx(distance, rel=1e-7)
    assert (found.target.norm() > 0) == (part == "persistent")


def test_sharper_regime_bound_is_reached_by_both_parts_at_once():
    """The sharp bound is reached where the paper's bound is up to √2 too large."""
    operator = isometric([1.2 / 1.5, 0.5 / 1.5])
    query = tokens("query", length=1, rank=2)[0][0]
    found = koopman_bounds.regime(operator, query, 2, 1.5, 0.2 + 1e-9, 0.5 + 1e-9)
    distance = error(operator, query, found.target, 2, 1.5).item()
    assert found.filtered.sharp.item() == pytest.approx(distance, rel=1e-7)
    assert found.filtered.paper > 1.05 * distance


def test_when_the_filter_helps():
    """Corollary I.12 compares bounds. The errors follow it if C L⁻ᵀ is an isometry, but not for another C."""
    levels = [0.99, 0.1]
    operator = isometric(levels)
    persistent, transient = torch.linalg.eigh(operator.whitened).eigenvectors.flip(-1).unbind(-1)
    query = operator.factor @ (persistent + transient)
    found = koopman_bounds.regime(operator, query, 2, 1.0, 0.02, 0.1 + 1e-9)
    moved, left = 1.02**2 - 1, 0.1**2
    assert moved < 1 - left  # the corollary's condition, both parts of norm 1
    assert found.filtered.paper.item() == pytest.approx(moved + left, rel=1e-6)
    assert found.filtered.paper < found.unfiltered
    assert error(operator, query, found.target, 2, 1.0) < error(operator, query, found.target, 0, 1.0)
    blind = Operator(operator.gram, operator.transition, persistent[None] @ operator.factor.mT, operator.ridge)
    found = koopman_bounds.regime(blind, query, 2, 1.0, 0.02, 0.1 + 1e-9)
    assert found.filtered.paper < found.unfiltered
    assert error(blind, query, found.target, 0, 1.0) < 1e-9
    assert error(blind, query, found.target, 2, 1.0) > 0.01


def test_regime_needs_a_normal_operator_of_two_kinds():
    query = tokens("query", length=1)[0][0]
    assert_raises(ValueError, "normal", koopman_bounds.regime, Operator.of_tokens(*tokens("random")), query)
    assert_raises(ValueError, "every mode", koopman_bounds.regime, normal([-1.0]), query[:1])


def perturbed(seed, rank, size):
    """An operator, and another one from the same keys with noise."""
    keys, values = tokens("pair", seed, length=3 * rank, rank=rank)
    noise = tokens("noise", seed, length=3 * rank, rank=rank)[0]
    keys = keys * torch.logspace(0, -(seed % 3), rank, dtype=keys.dtype)
    return Operator.of_tokens(keys, values), Operator.of_tokens(keys + size * noise, values)


def unwhitened(operator):
    return operator.transition @ torch.linalg.inv(operator.regularised)


def farthest(ours, theirs):
    """The largest distance of an eigenvalue of `theirs` from the nearest one of `ours`."""
    return (theirs.unsqueeze(-1) - ours).abs().amin(-1).max()


@anything
@given(seeds, st.integers(1, 5), st.sampled_from([1e-6, 1e-3, 0.1, 1.0, 10.0]))
def test_perturbation_bounds(seed, rank, size):
    """Theorem C.1, Bauer–Fike (C.3), Corollary C.4 and the sharper bounds hold."""
    ours, theirs = perturbed(seed, rank, size)
    moved = unwhitened(theirs) - unwhitened(ours)
    bound = koopman_bounds.perturbation_bound(ours, theirs)
    assert norm(moved) <= bound.sharp * SLACK + 1e-12
    assert bound.sharp <= bound.paper * SLACK
    far = farthest(ours.eigenvalues, theirs.eigenvalues)
    # Rounding moves eigenvalues too, by κ(V) times the error in A_w.
    rounding = 1e-12 * koopman.eigenvector_condition(ours.whitened)
    assert all(far <= x * SLACK + rounding for x in koopman_bounds.eigenvalue_bound(ours, theirs))
    assert far <= koopman_bounds.bauer_fike(unwhitened(ours), moved) * SLACK + rounding
    assert far <= koopman_bounds.bauer_fike(ours.whitened, theirs.whitened - ours.whitened) * SLACK + rounding


def scalar(gram, transition):
    one = torch.ones(1, 1, dtype=torch.float64)
    return Operator(gram * one, transition * one, one, torch.tensor(0.0))


def test_perturbation_bounds_are_reached():
    ours, theirs = scalar(2.0, 1.0), scalar(1.5, 1.2)
    far = 1.2 / 1.5 - 1.0 / 2.0
    for bound in (koopman_bounds.perturbation_bound, koopman_bounds.eigenvalue_bound):
        assert bound(ours, theirs).sharp.item() == pytest.approx(far)
    eye = torch.eye(3, dtype=torch.float64)
    assert koopman_bounds.bauer_fike(0.4 * eye, -0.3 * eye).item() == pytest.approx(0.3)
    assert farthest(torch.linalg.eigvals(0.4 * eye), torch.linalg.eigvals(0.1 * eye)).item() == pytest.approx(0.3)


def test_theorem_c1_is_too_large_by_the_condition():
    """With E_M = 0, the second term of the paper's bound has a factor κ(G̃) too much."""
    ours, _ = perturbed(2, 4, 0.0)
    theirs = Operator(ours.gram + torch.eye(4, dtype=torch.float64), ours.transition, ours.values, ours.ridge)
    bound = koopman_bounds.perturbation_bound(ours, theirs)
    assert (bound.paper / bound.sharp).item() == pytest.approx(koopman.condition(ours).item())


def test_eigenvectors():
    assert koopman.eigenvector_condition(normal([0.5 + 0.5j, -0.2, 0.9]).whitened).item() == pytest.approx(1)
    sheared = torch.tensor([[1.0, 1.0], [0.0, 1.0 - 1e-6]], dtype=torch.float64)
    assert koopman.eigenvector_condition(sheared) > 1e6
