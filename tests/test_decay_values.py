"""The decay values that a model uses: their capture and their statistics."""

import math

import pytest
import torch
from helpers import assert_raises, ids_of, tiny

from halflife.analysis import decays as recorder
from halflife.analysis import horizon as horizons
from halflife.analysis.capture import capture
from halflife.analysis.decays import half_life, measure_decays
from halflife.evaluation import evaluating
from halflife.models import PRESETS, LanguageModel, preset
from halflife.models.timescales import layer_decays
from halflife.ops.gate_rank import masks

WITHOUT = ("llama", "deltanet")
ROUNDING = 4 * 6e-8  # relative, of one number in float32
EXACT = 4 * 8.4e-16  # relative, of sums and horizons in float64; worst measured error


def medians(row):
    return [head.median for head in row.heads]


def lower(values, level):
    """Return a quantile that is one of the values, the lower of two equally near ones."""
    values = sorted(torch.as_tensor(values).flatten().tolist())
    return values[math.floor(level * (len(values) - 1))]


def test_fixed_decays_are_those_of_the_formula():
    for layer, row in enumerate(measure_decays(tiny("tnl"), ids_of(3, 5))):
        expected = [math.exp(-8 * head / 2 * (1 - layer / 2)) for head in (1, 2)]
        assert row.layer == layer
        assert medians(row) == pytest.approx(expected)
        assert row.median == row.q05 == pytest.approx(min(expected))
        assert row.mean == pytest.approx(sum(expected) / 2)
        assert row.half_life == pytest.approx(math.log(0.5) / math.log(min(expected)))
        assert row.slowest_half_life == pytest.approx(math.log(0.5) / math.log(max(expected)))
        for head, decay in zip(row.heads, expected, strict=True):
            assert head.q05 == head.q95 == pytest.approx(decay)
            assert head.erased == (decay < 0.5)
            assert head.horizon == pytest.approx(-1 / math.log(decay), rel=ROUNDING)
        assert row.erased == sum(decay < 0.5 for decay in expected) / 2
        assert row.rates == pytest.approx([-math.log(decay) for decay in expected])


def test_simple_decay_without_input_is_its_p():
    model = tiny("simple", mixer_options={"decay_options": {"p": 0.9}, "decay_rank": 0})
    for _, parameter in (p for p in model.named_parameters() if "decay_proj" in p[0]):
        torch.nn.init.zeros_(parameter)
    for row in measure_decays(model, ids_of(2, 7)):
        assert [getattr(row, key) for key in ("q05", "q25", "median", "q75", "q95", "mean")] == pytest.approx([0.9] * 6)


def test_position_dependent_decays_are_those_of_every_position():
    model, length = tiny("retnet+post"), 9
    with torch.no_grad():
        scales = torch.stack([layer_decays(model)[0][1].timescales(t) for t in range(1, length + 1)])
    expected = torch.exp(-1 / scales)
    row = measure_decays(model, ids_of(2, length))[0]
    for key, level in recorder.QUANTILES.items():
        assert getattr(row, key) == pytest.approx(lower(expected.expand(2, -1, -1), level), rel=1e-5)
    assert medians(row) == pytest.approx([lower(head, 0.5) for head in expected.T], rel=1e-5)
    assert medians(row)[0] > expected[0, 0]
    assert row.slowest_half_life == pytest.approx(math.log(2) / (1 / scales[1:]).mean(0).min().item(), rel=1e-5)


def test_the_decays_of_mamba3_echo_are_those_of_its_step_and_rate():
    """λ = e^{−softplus(f) softplus(a)}, and without an input λ = e^{−log² 2}."""
    model, ids, inputs = tiny("mamba3_echo", num_layers=1), ids_of(2, 9), []
    mixer = model.blocks[0].mixer
    mixer.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    row = measure_decays(model, ids)[0]
    f, a = mixer.in_proj(torch.cat(inputs)).split(mixer.splits, -1)[4:6]
    expected = torch.exp(-torch.log1p(f.double().exp()) * torch.log1p(a.double().exp())).detach()
    assert medians(row) == pytest.approx([lower(head, 0.5) for head in expected.flatten(0, 1).T], rel=1e-5)
    assert row.mean == pytest.approx(expected.mean().item(), rel=1e-5)
    ((_, decay),) = layer_decays(model)
    assert decay.timescales().tolist() == pytest.approx([1 / math.log(2) ** 2] * 2)


def test_quantiles_are_of_what_was_recorded():
    model, ids, found = tiny("mamba2"), ids_of(3, 40), []
    with capture(model, decay=lambda layer, g: found.append((layer, g))), torch.no_grad():
        model(ids)
    assert [layer for layer, _ in found] == [0, 1]
    for row, (_, g) in zip(measure_decays(model, ids), found, strict=True):
        for key, level in recorder.QUANTILES.items():
            assert getattr(row, key) == pytest.approx(lower(g.exp(), level), rel=1e-4)
        by_head = g.exp().transpose(0, 2).flatten(1)
        assert medians(row) == pytest.approx(by_head.median(1).values.tolist(), rel=1e-4)
        for head, values in zip(row.heads, by_head, strict=True):
            for key, level in recorder.QUANTILES.items():
                assert getattr(head, key) == pytest.approx(lower(values, level), rel=1e-4)


def test_lightnet_is_recorded_where_it_scans():
    model, ids, found, inputs = tiny("lightnet"), ids_of(1, 6), [], []
    mixer = model.blocks[0].mixer
    mixer.decay_proj.register_forward_hook(lambda module, given, f: inputs.append(f))
    with capture(model, decay=lambda layer, g: found.append(g)), torch.no_grad():
        model(ids)
    f, g = inputs[0], found[0]
    assert len(found) == 2
    assert g[:, 0].exp().eq(0).all()
    past = torch.stack([f[:, : t + 1].logsumexp(1) for t in range(6)], 1)
    torch.testing.assert_close(g[:, 1:], past[:, :-1] - past[:, 1:])
    row = measure_decays(model, ids[:, :2])[0]
    assert (row.q05, row.median, row.half_life) == (0, 0, 0)  # half of the tokens are at the start of a sequence
    assert 0 < row.q75 < 1
    assert row.slowest_half_life > 0


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_read(name):
    model = tiny(name)
    rows, others = measure_decays(model, ids_of(2, 5)), model.config.hybrid.get("layers", ())
    assert [row.layer for row in rows] == ([] if name in WITHOUT else [i for i in (0, 1) if i not in others])
    for row in rows:
        levels = [getattr(row, key) for key in recorder.QUANTILES]
        assert 0 <= levels[0] <= levels[-1] <= 1
        assert levels == sorted(levels)
        assert len(row.heads) == (32 if name == "longhorn_paper" else 2)
        assert 0 <= row.erased <= 1
        assert row.horizon == max(head.horizon for head in row.heads) >= 0
        assert (row.slow is not None) == ("gate_rank" in name)


def test_above_the_limit_every_nth_token_counts(monkeypatch):
    model, ids, found = tiny("retnet+post", num_layers=1), ids_of(3, 8), []
    with capture(model, decay=lambda layer, g: found.append(g)), torch.no_grad():
        model(ids)
    whole = measure_decays(model, ids)[0]
    monkeypatch.setattr(recorder, "MAX_VALUES", 3 * 8 * 2 // 4)
    row = measure_decays(model, ids)[0]
    chosen = found[0].flatten(0, 1)[::5].exp()  # 4 would select the same positions in each sequence
    assert row.median == pytest.approx(lower(chosen, 0.5))
    assert row.mean == pytest.approx(chosen.mean().item())
    assert row.slowest_half_life == whole.slowest_half_life  # sums include all tokens


@pytest.mark.parametrize("name", ["lightnet", "mamba2", "mamba2+post"])
def test_the_recorder_leaves_the_model_as_it_was(name):
    model, ids = tiny(name), ids_of(1, 4)
    with torch.no_grad():
        before, _ = model(ids)

    def fail(layer, g):
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"), capture(model, decay=fail):
        model(ids)
    measure_decays(model, ids)
    for _, decay in layer_decays(model):
        assert "scan" not in vars(decay)
        assert not decay._forward_hooks
    with torch.no_grad():
        assert torch.equal(model(ids)[0], before)


def loop_energy(g, lag, starts):
    """Compute E[e^{2 Σ g}] over tokens by products, for `g [T]` of floats."""
    return sum(math.exp(2 * sum(g[j + 1 : j + lag + 1])) for j in starts) / len(starts)


def retained_energy(sums, lags):
    energy = horizons.RetainedEnergy(len(sums), lags)
    energy.add(sums, 0)
    return energy.total


def test_a_constant_decay_has_its_timescale_as_horizon():
    """This also holds if the time-scale is not a lag or not a whole number. Beyond half of the text it is infinite."""
    scales = torch.tensor([0.3, 1.0, 3.7, 17.0, 31.9, 32.1], dtype=torch.float64)
    sums = (-1 / scales).expand(64, -1).unsqueeze(-1).cumsum(0)
    lags = horizons.horizon_lags(64)
    energy = retained_energy(sums, lags)
    got = [horizons.horizon(lags, energy[:, h]) for h in range(6)]
    assert got[:5] == pytest.approx(scales[:5].tolist(), rel=EXACT)
    assert got[5] == math.inf


def test_lags_go_from_one_to_half_of_the_text():
    for length in (2, 3, 4, 7, 64, 1000, 1024):
        lags = horizons.horizon_lags(length).tolist()
        assert (lags[0], lags[-1]) == (1, length // 2)
        assert lags == sorted(set(lags))
    assert horizons.horizon_lags(2048).tolist()[:9] == list(range(1, 10))


def test_the_horizon_comes_from_sums_along_the_text():
    """With a reset every 20 tokens and no decay in between, the mean decay e^{−3/20} would give 6.7 tokens."""
    model, ids = tiny("simple+scalar", num_layers=1, num_heads=1), ids_of(1, 80)
    g = [-3.0 if t % 20 == 0 else 0.0 for t in range(80)]

    def fixed(f, **options):
        return torch.tensor(g, dtype=torch.float64).view(1, -1, 1), None

    model.blocks[0].mixer.decay.scan, model.blocks[0].mixer.decay.stateful = fixed, True
    (row,) = measure_decays(model, ids)
    starts = list(range(40))
    # The share 1 − lag/20 of the tokens has no reset ahead. It falls below e^{−2} between 17 and 18 tokens.
    energies = [loop_energy(g, lag, starts) for lag in (17, 18)]
    assert energies[0] > math.exp(-2) > energies[1]
    assert 17 < row.horizon < 18
    assert row.slowest_half_life == pytest.approx(half_life(math.exp(sum(g[1:]) / 79)))


def test_many_tokens_are_thinned_evenly(monkeypatch):
    sums = torch.randn(50, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).abs().neg().cumsum(0)
    lags = torch.tensor([1, 4])
    monkeypatch.setattr(horizons, "MAX_STARTS", 10)
    got = retained_energy(sums, lags)
    for i, lag in enumerate(lags.tolist()):
        expected = torch.stack([(2 * (sums[j + lag] - sums[j])).exp() for j in range(0, 46, 5)]).mean((0, 2))
        torch.testing.assert_close(got[i], expected)


@pytest.mark.parametrize("name", ["gated_deltanet+gate_rank", "mamba2+gate_rank"])
def test_slow_and_fast_states_are_told_apart(name):
    """The mask of `ops.gate_rank` gives the same numbers. The op is tested against this mask too."""
    model, ids = tiny(name, num_layers=1), ids_of(2, 33)
    gate = model.blocks[0].mixer.gate_rank.slow_gate
    with torch.no_grad():
        gate.bias.fill_(0.2)
    fast, slow = [], []
    with (
        capture(model, decay=lambda layer, g: fast.append(g), slow_decay=lambda layer, g: slow.append(g)),
        evaluating(model),
    ):
        for sequence in ids.split(1):
            model(sequence)
    assert (len(fast), len(slow)) == (2, 2)
    fast, slow = (torch.cat(found).double() for found in (fast, slow))
    (row,) = measure_decays(model, ids)
    assert row.slow.resets == pytest.approx((slow[:, 1:] != 0).double().mean().item())
    assert row.slow.rates == pytest.approx(-slow[:, 1:].mean((0, 1)).detach().numpy(), rel=EXACT)
    assert row.rates == pytest.approx(-fast[:, 1:].mean((0, 1)).detach().numpy(), rel=EXACT)
    gamma, lam = masks(slow, fast)
    lags = horizons.horizon_lags(33)
    for h, head in enumerate(row.heads):
        energy = torch.stack([
            ((gamma * lam)[:, h].diagonal(-int(lag), -2, -1)[:, :17] ** 2).mean() for lag in lags
        ])  # fmt: skip
        assert head.horizon == pytest.approx(horizons.horizon(lags, energy), rel=EXACT)
    (alone,) = measure_decays(LanguageModel(preset("tnl", hidden_size=16, num_layers=1)), ids)
    assert alone.slow is None


def test_half_life():
    assert half_life(0.5) == 1
    assert half_life(0.5 ** (1 / 8)) == pytest.approx(8)
    assert (half_life(0), half_life(1)) == (0, math.inf)
    assert math.isnan(half_life(math.nan))


@pytest.mark.parametrize("ids", [torch.zeros(4, dtype=torch.long), torch.zeros(2, 1, dtype=torch.long)])
def test_ids_must_be_sequences(ids):
    assert_raises(ValueError, "T ≥ 2", measure_decays, tiny("tnl"), ids)


def test_a_model_that_diverged_has_no_numbers():
    model = tiny("mamba2")
    torch.nn.init.constant_(model.embedding.weight, math.nan)
    row = measure_decays(model, ids_of(1, 4))[0]
    assert all(
        math.isnan(getattr(row, key)) for key in ("median", "mean", "q95", "half_life", "slowest_half_life", "horizon")
    )
