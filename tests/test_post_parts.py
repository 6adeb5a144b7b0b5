"""The parts of PoST one by one: a sorted spectrum that does not stretch, positions that are held, a stretched gain."""

import pytest
import torch
import torch.nn.functional as F

from halflife import LanguageModel, decay, layers, preset
from halflife.decay import PoST

T, HEADS = 32, 4


def post(**options):
    return PoST(decay.build("mamba2", num_heads=HEADS, head_dim=6), train_length=T, **options).double()


def test_a_static_spectrum_is_the_decay_with_the_sorted_rates():
    static, f = post(stretch=False), torch.randn(1, 9, HEADS, dtype=torch.float64)
    step = F.softplus(f + static.decay.dt_bias)
    torch.testing.assert_close(static(f), -static.base().exp() * step)
    assert not static.taper().any()
    assert (static.base().diff() > 0).all()
    torch.testing.assert_close(static.timescales(1), static.timescales(5))


def test_positions_are_held():
    held, free, f = post(last_position=T), post(), torch.randn(1, 3, HEADS, dtype=torch.float64)
    beyond = torch.tensor([T, T + 1, 9 * T])
    torch.testing.assert_close(held(f, position=beyond), free(f, position=torch.full((3,), T)))
    torch.testing.assert_close(held(f, position=beyond - T + 1)[:, :2], free(f, position=beyond - T + 1)[:, :2])


def mamba2(**options):
    torch.manual_seed(0)
    options = {"num_heads": HEADS, "state_size": 6, "chunk_size": 4, "post": {"train_length": T}, **options}
    return layers.build("mamba2", hidden_size=16, **options).double()


def test_the_gain_is_stretched_like_the_decay():
    """By the token loop, with Δ t^−α in the input and in the decay."""
    layer, u = mamba2(stretch_gain=True), torch.randn(1, 7, 16, dtype=torch.float64)
    z, xbc, f = layer.in_proj(u).split(layer.splits, -1)
    x, b, c = layer.conv(xbc, None, None)[0].split(layer.conv_splits, -1)
    state = torch.zeros(HEADS, 6, layer.head_dim, dtype=torch.float64)
    rows = []
    for t in range(7):
        step = F.softplus(f[0, t] + layer.decay.decay.dt_bias) * (t + 1) ** -layer.decay.taper()
        value = x[0, t].view(HEADS, -1)
        kept = torch.exp(-layer.decay.base().exp() * step)
        state = kept[:, None, None] * state + b[0, t][None, :, None] * (step[:, None] * value)[:, None, :]
        rows.append((c[0, t] @ state + layer.skip.D[:, None] * value).flatten())
    expected = layer.out_proj(layer.norm(torch.stack(rows)[None], z))
    torch.testing.assert_close(layer(u)[0], expected, atol=1e-9, rtol=1e-6)
    assert not torch.allclose(layer(u)[0], mamba2()(u)[0])


def test_the_gain_streams():
    sizes = {"hidden_size": 16, "num_layers": 1, "vocab_size": 11, "num_heads": HEADS, "train_length": T}
    model = LanguageModel(
        preset("mamba2+post", **sizes, mixer_options={"state_size": 6, "stretch_gain": True})
    ).double()
    ids = torch.randint(0, 11, (2, 9))
    whole, _ = model(ids)
    first, state = model(ids[:, :4])
    second, _ = model(ids[:, 4:], state)
    torch.testing.assert_close(torch.cat([first, second], 1), whole)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"last_position": 0.5}, "last_position must be at least 1"),
        ({"stretch": False, "reference_length": T}, "no meaning without stretch"),
        ({"stretch": False, "last_position": T}, "no meaning without stretch"),
    ],
)
def test_errors_of_post(options, message):
    with pytest.raises(ValueError, match=message):
        post(**options)


def test_a_gain_without_post():
    with pytest.raises(ValueError, match="give post too"):
        mamba2(stretch_gain=True, post=None)
