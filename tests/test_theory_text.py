"""Condition 3.2, Corollary 3.7 and Proposition B.2 of PoST against literal sums; the papers' statements."""

import cmath
import math
from itertools import pairwise

import pytest
import torch
from helpers import generator
from test_spectra import noise

from halflife import decay
from halflife.analysis.koopman import Operator
from halflife.decay import minimax
from halflife.decay.minimax import geometric_rates, taper
from halflife.lab.theory import correlations, spectra
from halflife.lab.theory.normalization import FORMS, relative_energies
from halflife.lab.theory.statements import BOUND, IDENTITY, NUMBER, gate_rank, post, ska, statements
from halflife.lab.theory.statements.decay import median_decay
from halflife.lab.theory.statements.row import error, quotient
from halflife.lab.theory.stationarity import block_averages, block_exponents, spectral_density
from halflife.ops.gate_rank import masks

EXACT = 4 * 4.5e-16


def test_block_exponents_are_those_of_literal_sums():
    """R_b(s) is a mean of products of block means, taken segment by segment."""
    sequence = noise(400, 0.3, "blocks")
    found = block_exponents(sequence, mean=0.0, factors=(2, 3), lags=(1, 2), blocks=4)
    for i, factor in enumerate((2, 3)):
        for j, lag in enumerate((1, 2)):
            means = []
            for size in (1, factor):
                total = 0.0
                for segment in range(4):
                    x = sequence[100 * segment : 100 * segment + 100].tolist()
                    averages = [sum(x[size * n : size * n + size]) / size for n in range(100 // size)]
                    pairs = [averages[t] * averages[t + lag] for t in range(len(averages) - lag)]
                    total += sum(pairs) / len(pairs) / 4
                means.append(total)
            assert found["exponents"][i][j] == pytest.approx(math.log(means[0] / means[1]) / math.log(factor))
    assert found["beta"] == correlations.power_law(sequence, mean=0.0, blocks=4)["exponent"]


def test_block_averages():
    assert block_averages(torch.arange(7.0).unsqueeze(-1), 3).flatten().tolist() == [1, 4]


@pytest.mark.parametrize("beta", [0.3, 0.6])
def test_fractional_noise_meets_the_condition(beta):
    found = block_exponents(noise(1 << 15, beta, "condition"), factors=(2, 8), lags=(1, 2))
    for key, sign in (("low", 1), ("high", -1)):
        assert all(sign * (beta - end) > -0.03 for row in found[key] for end in row)
    assert all(abs(value - beta) < 0.1 for row in found["exponents"] for value in row)


def test_white_noise_keeps_the_condition_and_short_correlations_break_it():
    """White noise adds to R(0) alone. An autoregression over a few tokens makes the exponents too large."""
    base, draws = noise(1 << 14, 0.3, "period"), torch.randn(1 << 14, generator=generator("white"), dtype=torch.float64)
    white = block_exponents(base + draws, factors=(2, 4), lags=(2,), mean=0.0)
    assert all(abs(row[0] - 0.3) < 0.15 for row in white["exponents"])
    short = [draws[0]]
    for x in draws[1:]:
        short.append(0.8 * short[-1] + x)
    found = block_exponents(base + torch.stack(short), factors=(8,), lags=(2,), mean=0.0)
    assert found["exponents"][0][0] > 0.5


def test_an_exponent_that_does_not_exist_is_none():
    """A wave of 64 tokens makes the covariance of blocks of 16 negative at lag 2."""
    sequence = noise(1 << 13, 0.3, "none") + 2 * torch.cos(torch.arange(1 << 13).double() * math.pi / 32)
    found = block_exponents(sequence, factors=(16,), lags=(1, 2), mean=0.0)
    assert [value is None for value in found["exponents"][0]] == [False, True]
    assert [end is None for end in found["low"][0]] == [False, True]


def test_short_texts_are_errors():
    with pytest.raises(ValueError, match="a segment of 280 tokens is too short for 9 blocks of 32"):
        block_exponents(noise(16 * 280, 0.2, "short"))
    with pytest.raises(ValueError, match="a segment of 125 tokens is too short for 9 blocks of 32"):
        block_exponents(noise(2000, 0.2, "short"))
    with pytest.raises(ValueError, match=r"three octaves of frequencies up to 0\.0625 in 62 tokens; got 0"):
        spectral_density(noise(1000, 0.2, "short"))


def test_the_density_is_a_literal_sum():
    sequence, size = noise(256, 0.3, "density"), 64
    found = spectral_density(sequence, blocks=4, mean=0.0, high=0.5)
    window = [(1 - math.cos(2 * math.pi * t / size)) / 2 for t in range(size)]
    scale = math.sqrt(sum(w * w for w in window) / size)
    power = [0.0] * (size // 2 + 1)
    for segment in range(4):
        for k in range(1, size // 2 + 1):
            x = sequence[size * segment : size * segment + size].tolist()
            total = sum(x[t] * window[t] / scale * cmath.exp(-2j * math.pi * k * t / size) for t in range(size))
            power[k] += abs(total) ** 2 / size / 4
    octaves = [range(2**i, min(2 ** (i + 1), size // 2 + 1)) for i in range(6)]
    expected = [sum(power[k] for k in octave) / len(octave) for octave in octaves]
    assert found["density"] == pytest.approx(expected)
    logs = [sum(math.log(k / size) for k in octave) / len(octave) for octave in octaves]
    assert found["frequencies"] == pytest.approx([math.exp(x) for x in logs])
    x, y = torch.tensor(logs[2:]), torch.tensor(expected[2:]).log()
    slope = ((x - x.mean()) * y).sum() / ((x - x.mean()) ** 2).sum()
    assert found["slope"] == pytest.approx(slope.item(), rel=1e-5)
    assert found["used"] == [False, False, True, True, True, True]


@pytest.mark.parametrize("beta", [0.3, 0.6])
def test_fractional_noise_has_the_slope_of_the_corollary(beta):
    sequence = noise(1 << 16, beta, "slope")
    found = spectral_density(sequence)
    assert found["slope"] == pytest.approx(beta - 1, abs=0.06)
    assert found["low"] < found["slope"] < found["high"]
    flat = spectral_density(sequence + 4 * torch.randn(1 << 16, generator=generator("flat"), dtype=torch.float64))
    assert flat["slope"] > found["slope"] + 0.15  # the white part of R(0)


@pytest.mark.parametrize("reference", [1, 40])
def test_energies_are_those_of_a_literal_recurrence(reference):
    rates, tapers = geometric_rates(3, 40), taper(3)
    scaled = rates * float(reference) ** tapers
    found = spectra.energy_as_run(scaled, tapers, [1, 40, 90])
    for k in range(3):
        energy, wanted = 0.0, []
        for t in range(1, 91):
            gate = math.exp(-rates[k].item() * (t / reference) ** -tapers[k].item())
            energy = gate**2 * energy + 1
            wanted += [energy] if t in (1, 40, 90) else []
        assert found[k].tolist() == pytest.approx(wanted, rel=1e-12)


def test_relative_energies():
    """The extreme pair grows as claimed under both forms, the middle one under the theorem's alone."""
    found = relative_energies(9, 2000, (2, 8))
    for form in FORMS[1:]:
        assert found[form]["as run"] == pytest.approx([2, 8], rel=2e-3)
        assert found[form]["frozen"] == pytest.approx([2, 8], rel=2e-3)
        assert found[form]["shrunk"] == pytest.approx([2**-0.5, 8**-0.5], rel=0.2)
        assert found[form]["claimed middle"] == pytest.approx([2**0.5, 8**0.5])
    assert found["theorem"]["middle"] == pytest.approx([2**0.5, 8**0.5], rel=0.02)
    assert found["algorithm"]["middle"][1] > 1.2 * 8**0.5
    assert all(1 < growth < 1.2 for growth in found["static"]["as run"])
    rates = geometric_rates(9, 2000)
    energies = spectra.energy_as_run(rates, torch.zeros(9, dtype=torch.float64), [2000, 4000])
    total = energies.sum(0)
    assert found["static"]["share"][0] == pytest.approx((energies[0] / total)[1].item(), rel=EXACT)
    assert found["static"]["shrunk"][0] == pytest.approx((total[0] / total[1]).sqrt().item(), rel=1e-9)


# Identities that do not hold, and bounds that are broken.
BROKEN = {
    "printed coherence", "rope vector", "printed recurrence", "future key", "equations printed", "equations corrected",
}  # fmt: skip


@pytest.fixture(scope="module")
def found():
    return statements()


def test_identities_hold_to_rounding_and_bounds_hold(found):
    for name, one in found.items():
        if one["kind"] == NUMBER:
            continue
        limit = {IDENTITY: 1e-12, BOUND: 1.0}[one["kind"]]
        assert one["value"] > 1.5 * limit if name in BROKEN else 0 <= one["value"] <= limit, name
    assert set(found) > BROKEN


def test_another_seed_draws_other_numbers(found):
    other = ska.statements(seed=1)
    assert other["linear distance"]["value"] != found["linear distance"]["value"]
    assert other["held"] == found["held"]


def test_errors_and_quotients():
    value = torch.tensor([1.0, -4.0]).double()
    assert error(value, torch.tensor([1.0, -2.0]).double()) == 1
    assert error(torch.zeros(2), torch.zeros(2)) == 0
    assert quotient(value.abs(), torch.tensor([2.0, 5.0])) == pytest.approx(0.8)


def test_the_map_is_a_sum_of_softplus():
    theta, delta = 0.3, [-2.0, 0.5, 1.0]
    expected = [theta]
    for x in delta:
        expected.append(expected[-1] + math.log(1 + math.exp(x)))
    reached = post.reparameterise(torch.tensor([theta]).double(), torch.tensor([delta]).double())
    assert reached[0].tolist() == pytest.approx(expected)


def test_the_adapted_taper_is_equation_9():
    logs, reference = [-5.0, -4.5, -1.0, 0.2], 100
    gap = (logs[-1] - logs[0]) / 3
    expected = [(4 - k) / 3 + (logs[k - 1] - logs[0] - (k - 1) * gap) / math.log(reference) for k in (1, 2, 3, 4)]
    assert post.adapted_taper(torch.tensor(logs).double(), reference).tolist() == pytest.approx(expected)


def test_timescales_of_rwkv7():
    """The slowest channel starts at T and has T² at T, where §5.3 writes T²/T = T."""
    logits = post.rwkv7_logits(4, 1000)
    assert torch.sigmoid(logits[0]).item() == pytest.approx(math.exp(0.5) / 1000)
    start, late = (post.rwkv7_timescales(logits, torch.tensor([1, 0.5, 0.2, 0]).double(), t) for t in (1, 1000))
    assert (start[0].item(), late[0].item()) == pytest.approx((1000, 1000**2), rel=2e-3)
    assert start[-1].item() == late[-1].item() == pytest.approx(1 / (math.exp(-0.5) / (1 + math.exp(-0.5))))


def test_the_gaps_of_rwkv7_are_those_of_the_layer():
    """Even logits are no even log-rates near the fast end, and the taper inside of the sigmoid does not space them."""
    layer = decay.PoST(decay.build("rwkv7", num_heads=2, head_dim=8, granularity="vector"), train_length=1000).double()
    gaps = [-layer.timescales(t).detach().log().flatten().diff() for t in (1, 1000)]
    ends = [end.item() for gap in gaps for end in (gap.min() / gap.mean(), gap.max() / gap.mean())]
    assert post.rwkv7_gaps(16, 1000) == pytest.approx(ends, rel=1e-5)
    assert max(ends[0], ends[2]) < 0.75


def test_free_rates_beat_the_best_geometric_ones():
    """The weights of the fit have the error at every position, and no end points of geometric rates do better."""
    rates = torch.tensor(post.FREE_RATES[6], dtype=torch.float64)
    t = torch.arange(1, post.LENGTH + 1, dtype=torch.float64)
    error = (t**-0.5 - torch.exp(-rates * t.unsqueeze(-1)) @ minimax.fit(rates, post.LENGTH).weights).abs().max().item()
    ends = [(low / post.LENGTH, high) for low in (0.5, 1, 2, 4) for high in (0.5, 1, 2)]
    geometric = min(minimax.minimax_error(geometric_rates(6, post.LENGTH, *pair), post.LENGTH) for pair in ends)
    assert error == pytest.approx(8.17e-4, rel=0.01)
    assert geometric > 3.5 * error


def test_the_remainder_of_remark_4_6_is_cubic():
    bound = 1 / math.cosh(math.log(1 + 1 / 50) / 2)
    assert post.remainder(torch.tensor([50.0]).double()).item() == pytest.approx(bound - 1 + 1 / 20_000)
    assert post.remainder(torch.tensor([1e3]).double()).item() * 1e9 == pytest.approx(1 / 8, rel=2e-3)


def test_octaves_of_fractional_noise_are_those_of_determinants():
    """I(x; n numbers) of a normal process is half of log₂ of R(0) |R_n| / |R_{n+1}|. J halves: it falls as d²/4σ."""
    h, n = 1.5, 9
    lags = torch.arange(n, dtype=torch.float64)
    apart = (lags - lags[:, None]).abs()
    covariance = ((apart + 1) ** h - 2 * apart**h + (apart - 1).abs() ** h) / 2
    sizes = [torch.linalg.det(covariance[:m, :m]).item() for m in range(1, n + 1)]
    known = [math.log2(sizes[0] * sizes[m - 1] / sizes[m]) / 2 for m in (1, 2, 4, 8)]
    found = post.octaves_of_fractional_noise(8)
    assert found[:3] == pytest.approx([b - a for a, b in pairwise(known)])
    assert found[-1] == pytest.approx(0.25**2 / 4 / 2**7 / math.log(2), rel=0.02)


def test_a_weak_direction_that_moves_alone_falls_as_the_paper_says():
    """M v = σ A v if only the key of this direction follows it; for independent keys ‖M v‖ is of order √σ."""
    keys = torch.zeros(1, 12, 4, dtype=torch.float64)
    keys[0, :3, :3] = torch.eye(3)
    keys[0, 4:, 3] = 0.3 ** torch.arange(8)
    assert ska.weak_direction(keys) == pytest.approx(1, abs=0.01)
    noise = torch.randn(30, 12, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert ska.weak_direction(noise) == pytest.approx(0.5, abs=0.01)


def test_the_printed_bound_of_coherence_fails_for_the_fastest_pair():
    largest, bound = post.printed_coherence(torch.tensor([0.5]).double(), torch.tensor([1.0]).double(), 3)
    rates = (0.5, 1.5, 2.5)
    pairs = [2 * math.sqrt(a * b) / (a + b) for a, b in ((rates[0], rates[1]), (rates[1], rates[2]))]
    assert largest.item() == pytest.approx(pairs[1])
    assert bound.item() == pytest.approx(pairs[0])


def test_median_decays_are_those_of_the_formulas(found):
    rates = sorted(math.exp(-8 * j / 12 * (1 - 3 / 12)) for j in range(1, 13))
    assert median_decay("tnl", 3) == pytest.approx(rates[5])  # torch's median is the lower one
    assert found["tnl median"]["value"][3] == pytest.approx(rates[5])
    assert found["lightnet median"]["value"] == pytest.approx(1 - 1 / 2048)
    assert median_decay("simple", p=0.9) == pytest.approx(0.9)


def test_ranks_of_masks(found):
    """Two outer products stand below the diagonal, however many resets there are; a literal mask agrees."""
    assert found["mask rank"]["value"] == [1, *[2] * 5]
    slow, fast = gate_rank.draw_gates(4, generator("ranks"))
    assert (slow != 0).sum(1).flatten().tolist() == [4] * gate_rank.DRAWS
    mask = torch.mul(*masks(slow, fast))[0, 0]
    ranks = [int(torch.linalg.matrix_rank(mask[m:, :m], rtol=1e-10)) for m in range(1, gate_rank.LENGTH)]
    assert max(ranks) == gate_rank.greatest_rank(mask) == 2


def test_the_printed_mask_of_six_tokens():
    """Eqs. 14 to 16 token by token, with resets at 1, 3 and 5 as in Figure 2a; its entries exceed 1."""
    gates, resets = [0.9, 0.8, 0.75, 0.7, 0.95, 0.85], {1, 3, 5}

    def product(i):  # λ_i of Eq. 15
        begin = 1 + max((t for t in resets if t <= i), default=0)
        return math.prod(gates[j - 1] for j in range(begin, i + 1))

    def following(j, i):  # r_next(j, i) of Eq. 14
        return min((t for t in resets if j <= t <= i), default=i)

    slow = torch.tensor([-0.5 * (t in resets) for t in range(1, 7)]).double()
    printed = gate_rank.printed_mask(slow, torch.tensor(gates).double().log())
    for i in range(1, 7):
        expected = [product(following(j, i)) / product(j) for j in range(1, i + 1)]
        assert printed[i - 1, :i].tolist() == pytest.approx(expected)
        assert not printed[i - 1, i:].any()
    assert printed[2, 1].item() == pytest.approx(1 / 0.8)  # 1/β₂, where the figure has β₃


def test_a_read_out_without_transient_modes_gains_nothing_from_the_filter(found):
    """It has no error at K = 0, so the smaller bound of Corollary I.12 improves nothing."""
    assert found["regime lost"]["value"][1] == 0
    assert found["regime lost"]["value"][0] == found["regime helped"]["value"][0] > 0


def test_recall_of_held_tokens_by_a_literal_operator():
    """Write the sums of one sequence token by token, invert them, and read with K = 2."""
    pairs, rank, held, draw = 4, 8, 3, torch.Generator().manual_seed(0)
    tokens = torch.randn(1, 2 * pairs, 1, rank, generator=draw, dtype=torch.float64)[0, :, 0]
    tokens = torch.nn.functional.normalize(tokens, dim=-1)
    gram, before = 1e-3 * torch.eye(rank, dtype=torch.float64), None
    transition, values = torch.zeros(2, rank, rank, dtype=torch.float64)
    for token in tokens:
        for _ in range(held):
            gram += torch.outer(token, token)
            values += torch.outer(token, token)
            if before is not None:
                transition += torch.outer(token, before)
            before = token
    inverse = torch.linalg.inv(gram)
    step = transition @ inverse
    hits = 0
    for i in range(pairs):
        answer = values @ inverse @ step @ step @ tokens[2 * i]
        hits += int((tokens[1::2] @ answer).argmax()) == i
    assert ska.recall_of_held(2, held, pairs=pairs, rank=rank, draws=1) == hits / pairs


def test_ridge_recalls_no_more_pairs_than_its_rank_holds(found):
    recalled = dict(zip(found["pairs"]["value"], found["pairs recalled"]["value"], strict=True))
    assert all(recalled[pairs] == 1 for pairs in (8, 16, 24))
    assert recalled[48] > 0.9 > 0.5 > recalled[96] > recalled[192]
    assert found["pairs least"]["value"] == sorted(found["pairs least"]["value"])


def test_a_normal_operator_has_the_eigenvalues(found):
    levels = torch.tensor([[0.9, 0.2, -0.4]]).double()
    operator = ska.normal_operator(levels, generator("normal"))
    assert isinstance(operator, Operator)
    torch.testing.assert_close(operator.whitened, torch.diag_embed(levels))
    torch.testing.assert_close(operator.regularised, torch.eye(3).double()[None])


def test_traces_of_powers():
    matrix = torch.diag(torch.tensor([2.0, 3.0]))[None]
    assert ska.power_traces(matrix).tolist() == [[5, 13]]


def test_sizes_of_the_state(found):
    assert found["crossover"]["value"][0] == math.floor(found["crossover"]["value"][1]) + 1
    assert found["state kB"]["value"] == pytest.approx(28 * 4 * (2 * 56**2 + 64 * 56 + 56 + 1) / 1000)
    assert found["energy left"]["value"] == pytest.approx(0.9**4)
