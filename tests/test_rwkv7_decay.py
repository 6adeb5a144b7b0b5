"""RWKV-7's decay by value, and under PoST: ordered logits, and a stretch inside the sigmoid (PoST, §5.3)."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, assert_raises, assert_same, walk

from halflife import decay as decays
from halflife.decay import PoST
from halflife.decay.rwkv7 import zigzag

TRAIN_LENGTH = 512
SCALE = math.exp(-0.5)

# In float32; four times the worst measured error, relative to the largest entry.
TOLERANCE = 4 * 1.2e-7


def build_decay(heads=2, channels=3, **options):
    return decays.build("rwkv7", num_heads=heads, head_dim=channels, granularity="vector", **options)


def test_decay_by_value():
    """−e^{−1/2} σ(f + w₀) is a half, a quarter, three quarters, none and all of −0.6065."""
    decay = build_decay(1, 5)
    with torch.no_grad():
        decay.logit.copy_(torch.tensor([[0.0, 1, 1, 1, 1]]))
    f = torch.tensor([0.0, -1 - math.log(3), -1 + math.log(3), -1e4, 1e4]).view(1, 1, 1, 5)
    expected = torch.tensor([-0.30326533, -0.15163266, -0.45489799, 0, -0.60653066])
    assert_close(decay(f).flatten(), expected, TOLERANCE)


def test_decay_starts_as_its_authors_do():
    """Logits of two heads are linear in the first layer and quadratic in the last, with a zigzag of ±2.5."""
    first = [-8, -4.3, -0.6, -4.4, -0.7, 3]
    assert_close(build_decay().logit.flatten(), torch.tensor(first), TOLERANCE)  # the only layer
    assert_close(build_decay(layer_idx=0, num_layers=2).logit.flatten(), torch.tensor(first), TOLERANCE)
    last = [-8, -5.26, -2.04, -5.84, -1.66, 3]
    assert_close(build_decay(layer_idx=1, num_layers=2).logit.flatten(), torch.tensor(last), TOLERANCE)
    middle = build_decay(layer_idx=1, num_layers=3).logit[0, 1].item()
    assert middle == pytest.approx(6 * 0.2 ** (1 + 0.5**0.3) - 5.5, rel=1e-6)
    full = build_decay(12, 64).timescales()
    assert full.min().item() == pytest.approx(1 / (SCALE * torch.tensor(3.0).sigmoid().item()), rel=1e-5)
    assert full.max().item() == pytest.approx((1 + math.exp(8)) / SCALE, rel=1e-5)


def test_zigzag():
    assert_close(zigzag(2, 5), torch.tensor([-1, -0.25, 0, 0.25, 1]).expand(2, 5), TOLERANCE)
    assert_same(zigzag(3, 1), torch.zeros(3, 1))


def build_post(heads=4, channels=8, **options):
    return PoST(build_decay(heads, channels), train_length=TRAIN_LENGTH, **options)


def trained():
    decay = build_post()
    return walk(decay, list(decay.parameters()))


def test_post_starts_as_equation_12():
    """Logits are linear from σ(w_1) = 1/(λT) to w_C = 0.5. The zigzag is in the bias, and the LoRA has no logit."""
    decay = build_post()
    w = decay.base()
    assert w[0].sigmoid().item() == pytest.approx(1 / (SCALE * TRAIN_LENGTH), rel=1e-5)
    assert w[-1].item() == pytest.approx(0.5, abs=1e-5)
    assert_close(w, torch.linspace(w[0].item(), 0.5, 32), TOLERANCE)
    assert_close(decay.log_rates(), w.sigmoid().log(), TOLERANCE)
    assert_close(decay.decay.zigzag, 2.5 * zigzag(4, 8), TOLERANCE)
    assert {name for name, _ in decay.named_parameters()} == {"theta", "delta", "decay.zigzag"}


@pytest.mark.parametrize("position", [1, 16, TRAIN_LENGTH, 4 * TRAIN_LENGTH])
def test_post_timescales(position):
    """τ_1(t) = T (p + (1 − p) t) with p = 1/(λT), which is near T·t. τ_C is always 2.65."""
    scales = build_post().timescales(position).flatten()
    p = 1 / (SCALE * TRAIN_LENGTH)
    assert scales[0].item() == pytest.approx(TRAIN_LENGTH * (p + (1 - p) * position), rel=1e-4)
    assert scales[0].item() == pytest.approx(TRAIN_LENGTH * position, rel=4e-3)
    assert scales[-1].item() == pytest.approx(2.65, abs=5e-3)
    assert (scales.diff() < 0).all()


@pytest.mark.parametrize("position", [1, 16, TRAIN_LENGTH, 4 * TRAIN_LENGTH])
def test_post_theorem(position):
    """With t_ref = T the slowest time-scale is t, plus 1/λ of the sigmoid. At t = T p plus the stretch is even."""
    decay = build_post(reference_length=TRAIN_LENGTH)
    scales, p = decay.timescales(position), 1 / (SCALE * TRAIN_LENGTH)
    assert scales[0, 0].item() == pytest.approx(1 / SCALE + (1 - p) * position, rel=1e-4)
    ideal = torch.linspace(1, 0, decay.channels)
    even = decay.log_rates() - decay.taper() * math.log(TRAIN_LENGTH) + ideal * math.log(TRAIN_LENGTH)
    assert_close(even.diff(), even.diff().mean().expand(31), 1e-4)
    stretch = ideal * math.log(TRAIN_LENGTH) - decay.taper() * math.log(position)
    expected = 1 / (SCALE * (decay.base() + stretch).view(decay.shape).sigmoid())
    assert_close(scales, expected, TOLERANCE)


def test_post_taper():
    """Corollary 5.1: the general taper on p = logsigmoid(w) falls from 1 to 0, by the formula in between."""
    for decay in (build_post(), trained()):
        p = F.logsigmoid(decay.base().double()).tolist()
        gap = (p[-1] - p[0]) / 31
        expected = [(31 - k) / 31 + (p[k] - p[0] - k * gap) / math.log(TRAIN_LENGTH) for k in range(32)]
        assert_close(decay.taper(), torch.tensor(expected).clamp(0, 1), TOLERANCE)
        assert_close(decay.taper()[[0, -1]], torch.tensor([1.0, 0.0]), TOLERANCE)
        assert (decay.base().diff() > 0).all()
        assert (decay.base_log_rate().flatten().diff() > 0).all()


@pytest.mark.parametrize("reference_length", [1, TRAIN_LENGTH])
def test_post_stretches_inside_the_logit(reference_length):
    """Equation 11, with the zigzag as the bias of f, by numbers and by the formula at any position."""
    decay = build_post(1, 2, reference_length=reference_length)
    with torch.no_grad():
        decay.theta.fill_(-1.0)
        decay.delta.fill_(math.log(math.expm1(2.0)))  # w = −1, 1, whose taper is 1, 0
        decay.decay.zigzag.copy_(torch.tensor([[0.5, -0.5]]))
    f = torch.tensor([0.5, -0.5]).view(1, 1, 1, 2)  # the logit is 0 at the reference length
    got = decay(f, position=torch.tensor([3 * reference_length])).flatten()
    assert_close(got, torch.tensor([-SCALE / 4, -SCALE / 2]), TOLERANCE)  # σ(−log 3) = 1/4
    decay, f = build_post(reference_length=reference_length), torch.randn(2, 9, 4, 8)
    position = torch.arange(1, 10) + torch.tensor([[0], [1000]])
    stretch = torch.linspace(1, 0, 32) * math.log(reference_length) - decay.taper() * position.log().unsqueeze(-1)
    logit = f + 2.5 * zigzag(4, 8) + (decay.base() + stretch).view(f.shape)
    assert_close(decay(f, position=position), -SCALE * logit.sigmoid(), TOLERANCE)


def test_post_end_points():
    decay = build_post(endpoints=(0.1, 1.5))
    rates = decay.base_log_rate().exp().flatten()
    assert rates[0].item() == pytest.approx(0.1 / TRAIN_LENGTH, rel=1e-5)
    assert rates[-1].item() == pytest.approx(1.5 * SCALE * torch.tensor(0.5).sigmoid().item(), rel=1e-5)
    with pytest.raises(ValueError, match=r"below e\^\(−1/2\) = 0\.6065; got the end point 0\.7551"):
        build_post(endpoints=(1.0, 2.0))
    optimal = build_post(endpoints="optimal").base_log_rate().exp().flatten()
    assert optimal[-1].item() <= (1 + 1e-6) * SCALE * torch.tensor(0.5).sigmoid().item()
    assert_raises(ValueError, "endpoints and rate_range must give", PoST, build_decay(), train_length=2)
