"""Mamba-3's layer against its equations, token by token, and the effects of its rotation and trapezoidal steps."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, assert_raises, cases, generator, slices, with_grads

from halflife import LanguageModel, layers, preset
from halflife.lab.experiments.echo import PAPER, EchoTransfer
from halflife.lab.experiments.recall import recall_model
from halflife.ops import linear_attention
from halflife.ops.chunked.layout import running_angle
from halflife.packing import Packing

HIDDEN, HEADS, SIZE, VALUE = 12, 4, 8, 6

# Four times the worst measured error, relative to the largest entry.
OUTPUTS = 4 * 2.9e-15
GRADIENTS = 4 * 1.2e-14
RATE_GRADIENTS = 4 * 7.3e-14  # where the input sets the rates: that of Δ₀ is a small sum of large terms
TURNS = 4 * 2.8e-6  # of a float32 angle after 20,000 tokens

each_variant = pytest.mark.parametrize(
    "options",
    [{"rope_fraction": fraction, "num_groups": groups} for fraction in (0.5, 1) for groups in (1, 2)]
    + [{"rate_floor": None}, {"rank": 3, "num_groups": 2}]
    + [{"rate_floor": None, "post": {"train_length": 16}, "rank": rank} for rank in (1, 2)]
    + [{"rate_floor": 0.6, "output_norm": True, "rank": 2}]
    + [pytest.param({"rate_floor": 0.6, "output_norm": True}, marks=pytest.mark.slow)],
    ids=str,
)


def build(**options):
    """Build a float64 layer with several chunks in a short sequence. No weight is 0 or 1, which could hide a term."""
    layer = layers.build(
        "mamba3", hidden_size=HIDDEN, num_heads=HEADS, state_size=SIZE, head_dim=VALUE, chunk_size=4, **options
    ).double()
    draw = generator("weights")
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if not name.startswith("decay."):
                parameter.add_(0.5 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64))
    return layer


def inputs(length, batch=1):
    return torch.randn(batch, length, HIDDEN, dtype=torch.float64)


def rotation(angle):
    """Return the matrices `[…, K, K]` that rotate the pair (i, i + P) by `angle [..., P]`."""
    pairs = angle.shape[-1]
    rotated = torch.eye(SIZE, dtype=angle.dtype).repeat(*angle.shape[:-1], 1, 1)
    for i in range(pairs):
        cos, sin = angle[..., i].cos(), angle[..., i].sin()
        rotated[..., i, i], rotated[..., i, i + pairs] = cos, -sin
        rotated[..., i + pairs, i], rotated[..., i + pairs, i + pairs] = sin, cos
    return rotated


def per_head(x, part):
    """Normalise each group, multiply by a weight per channel and add a bias per head: `[B, R·G·K]` → `[B, R, H, K]`."""
    x = x.unflatten(-1, (len(part.bias) // HEADS, -1, SIZE))
    x = x / (x.square().mean(-1, keepdim=True) + part.eps).sqrt() * part.weight
    return x.repeat_interleave(HEADS // x.shape[2], 2) + part.bias.unflatten(0, (-1, HEADS))


def token_loop(layer, x):
    """The definition: return `y [B, T, D]` and the last state for `x [B, T, D]`, from an empty state."""
    batch, length, _ = x.shape
    rank = len(layer.key.bias) // HEADS
    ones = x.new_ones(rank, HEADS, VALUE)
    of_v, of_z, of_y = (ones,) * 3 if rank == 1 else (layer.mimo.values, layer.mimo.gates, layer.mimo.outputs)
    memory = x.new_zeros(batch, HEADS, SIZE, VALUE)
    angle = x.new_zeros(batch, HEADS, layer.splits[-1])
    key, value = x.new_zeros(batch, rank, HEADS, SIZE), x.new_zeros(batch, rank, HEADS, VALUE)
    outputs = []
    for t in range(length):
        z, v, b, c, f, *a, trapezoid, rate = F.linear(x[:, t], layer.in_proj.weight).split(layer.splits, -1)
        z, read = (part.unflatten(-1, (1, HEADS, VALUE)) for part in (z, v))
        step = layer.decay.step_size(f)
        if a:  # the rate is that of the authors, max(softplus(a), floor)
            step = (f + layer.decay.dt_bias).exp().log1p()
            alpha = (-step * a[0].exp().log1p().clip(layer.rate_floor)).exp()
        else:
            alpha = layer.decay(f.unsqueeze(1), position=torch.tensor([t + 1]))[:, 0].exp()
        end = 1 / (1 + (-trapezoid).exp())
        angle = angle + step[..., None] * math.pi * rate.tanh()[:, None]
        turn = rotation(angle)
        k, v = torch.einsum("bhij,brhj->brhi", turn, per_head(b, layer.key)), read * of_v
        q = torch.einsum("bhij,brhj->brhi", turn, per_head(c, layer.query))
        began = torch.einsum("bh,brhk,brhv->bhkv", alpha * (1 - end) * step, key, value)
        ended = torch.einsum("bh,brhk,brhv->bhkv", end * step, k, v)
        memory = alpha[..., None, None] * memory + began + ended
        key, value = k, v
        y = torch.einsum("bhkv,brhk->brhv", memory, q) + layer.skip.D[:, None] * v
        if layer.norm is not None:
            y = y / (y.square().mean(-1, keepdim=True) + layer.norm.eps).sqrt() * layer.norm.weight.view(HEADS, VALUE)
        outputs.append(layer.out_proj((y * F.silu(z * of_z) * of_y).sum(1).flatten(1)))
    turns = angle / (2 * math.pi)
    state = {"memory": memory, "key": key.flatten(1, 2), "value": read.squeeze(1), "angle": turns - turns.round()}
    return torch.stack(outputs, 1), {"position": torch.full((batch,), length), **state}


@each_variant
def test_is_its_equations(options):
    layer, x = build(**options), inputs(11, batch=2).requires_grad_()
    arguments = {"x": x, **dict(layer.named_parameters())}
    y, state = layer(x)
    expected, last = token_loop(layer, x)
    assert_close({"y": y, **state}, {"y": expected, **last}, OUTPUTS)
    found = with_grads((y, state["memory"]), arguments)
    tolerance = GRADIENTS if layer.rate_floor is None else RATE_GRADIENTS
    assert_close(found, with_grads((expected, last["memory"]), arguments), tolerance)


@each_variant
def test_packed_pieces_are_its_equations(options):
    """Four sequences go over four calls: some are empty, begin late, pause or end early. One call has no tokens."""
    layer, pieces = build(**options), ([5, 0, 1, 7], [0, 0, 0, 0], [2, 3, 0, 1], [0, 6, 1, 0])
    state, seen, outputs = None, [[] for _ in range(4)], [[] for _ in range(4)]
    for lengths in pieces:
        x, bounds = inputs(sum(lengths)), torch.tensor([0, *lengths]).cumsum(0)
        y, state = layer(x, state, cu_seqlens=bounds)
        for row, tokens in enumerate(slices(bounds.tolist())):
            seen[row].append(x[:, tokens])
            outputs[row].append(y[:, tokens])
    for row in range(4):
        expected, last = token_loop(layer, torch.cat(seen[row], 1))
        found = {"y": torch.cat(outputs[row], 1), **{name: part[row : row + 1] for name, part in state.items()}}
        assert_close(found, {"y": expected, **last}, OUTPUTS)


def steered(layer, x, *, trapezoid):
    """Return the layer and inputs with every trapezoid logit at the given value and all angles at 0."""
    x[..., 0] = 1
    *_, trap, rate = layer.in_proj.weight.split(layer.splits)
    with torch.no_grad():
        trap.zero_()
        trap[:, 0] = trapezoid
        rate.zero_()
    return layer, x


def test_ending_every_step_without_rotation_is_mamba2():
    """λ = 1 is Euler's rule, with key B, query C and value Δ x."""
    layer, x = steered(build(rate_floor=None), inputs(11), trapezoid=1e4)
    y, state = layer(x)
    z, v, b, c, f, _, _ = layer.in_proj(x).split(layer.splits, -1)
    v = v.unflatten(-1, (HEADS, VALUE))
    scaled = v * layer.decay.step_size(f).unsqueeze(-1)
    o, memory = linear_attention(layer.query(c), layer.key(b), scaled, layer.decay(f), scale=1, output_final_state=True)
    expected = layer.out_proj(layer.skip(o, v).flatten(-2) * F.silu(z))
    assert_close({"y": y, "memory": state["memory"]}, {"y": expected, "memory": memory}, OUTPUTS)
    assert state["angle"].count_nonzero() == 0


def test_beginning_every_step_writes_a_token_later():
    """With λ = 0 no token reads its own write. The last token is not in memory, and the first one reads zeros."""
    layer, x = steered(build(rate_floor=None), inputs(2), trapezoid=-1e4)
    _, first = layer(x[:, :1])
    assert first["memory"].count_nonzero() == 0
    _, state = layer(x[:, 1:], first)
    f = layer.in_proj(x[:, 1:]).split(layer.splits, -1)[4]
    weight = layer.decay.step_size(f) * layer.decay(f).exp()
    expected = weight[:, 0, :, None, None] * first["key"].unsqueeze(-1) * first["value"].unsqueeze(-2)
    assert_close(state["memory"], expected, OUTPUTS)


@each_variant
def test_only_differences_of_angles_count(options):
    """Another initial angle rotates the whole memory, and the outputs are the same."""
    layer, x = build(**options), inputs(11)
    _, nothing = layer(x[:, :0])
    offset = torch.randn_like(nothing["angle"])
    y, state = layer(x, {**nothing, "angle": nothing["angle"] + offset})
    expected, last = layer(x, nothing)
    turn = rotation(2 * math.pi * offset)
    assert_close(y, expected, OUTPUTS)
    assert_close(state["memory"], turn @ last["memory"], OUTPUTS)
    keys = torch.einsum("bhij,brhj->brhi", turn, last["key"].unflatten(1, (-1, HEADS))).flatten(1, 2)
    assert_close(state["key"], keys, OUTPUTS)


@pytest.mark.parametrize("name", ["mamba2", "mamba2+post", "mamba3", "mamba3+post_norm", "mamba3_echo"])
def test_the_step_size_is_computed_once(name, monkeypatch):
    """The values and the decay of a token have one step size softplus(f + Δ)."""
    sizes = {"hidden_size": 32, "num_layers": 1, "vocab_size": 8, "num_heads": 2}
    model, counted = LanguageModel(preset(name, **sizes)), []

    def softplus(x, softplus=F.softplus):
        counted.append(tuple(x.shape))
        return softplus(x)

    monkeypatch.setattr(F, "softplus", softplus)
    model(torch.zeros(1, 5, dtype=torch.long))
    rates = name in ("mamba3", "mamba3_echo")  # whose rates softplus(a) are as many
    assert counted.count((1, 5, 2)) == 1 + rates


def test_whole_turns_do_not_count():
    layer, x = build(), inputs(16)
    _, state = layer(x[:, :11])
    assert state["angle"].abs().max() <= 0.5
    assert_close(layer(x[:, 11:], {**state, "angle": state["angle"] + 3})[0], layer(x[:, 11:], state)[0], OUTPUTS)


def test_long_sums_of_angles_lose_nothing():
    """A thousand turns in float32, packed and continued, stay exact. A plain sum would be wrong by 3e-5."""
    lengths = [1, 20_000, 0, 130]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    turns, start = 0.1 * torch.rand(1, sum(lengths), 2, 3), torch.rand(4, 2, 3) - 0.5
    angle, last = running_angle(turns, start, Packing.of(bounds, 1, sum(lengths)))
    assert angle.dtype == torch.float32
    for row, tokens in enumerate(slices(bounds.tolist())):
        exact = torch.cat([start[row : row + 1], turns[0, tokens]]).double().cumsum(0)
        found = torch.cat([angle[0, tokens], last[row : row + 1]])
        difference = found - torch.cat([exact[1:], exact[-1:]])
        assert (difference - difference.round()).abs().max() <= TURNS


@cases(
    "options, message",
    ({"rope_fraction": 0.3}, "rope_fraction must be 0.5 or 1; got 0.3"),
    ({"state_size": 6}, "must be even; got 6 · 0.5"),
    ({"state_size": 7, "rope_fraction": 1}, "must be even; got 7 · 1"),
    ({"num_groups": 3}, "num_groups must divide num_heads; got 3 and 4"),
    ({"num_groups": 0}, "num_groups of layer mamba3 must be a whole number, 1 or more"),
    ({"num_heads": 5}, "num_heads must divide"),
    ({"rank": 0}, "rank of layer mamba3 must be a whole number, 1 or more"),
    ({"rank": 2, "gate_rank": {}}, "1 with GateRank"),
    ({"decay": "simple"}, "step size of its decay, but 'simple' has no step size"),
    ({"rate_floor": None, "decay": "mamba2_no_a_dt", "post": {"train_length": 16}}, "no base rates"),
)
def test_options_without_meaning_are_errors(options, message):
    assert_raises(ValueError, message, layers.build, "mamba3", hidden_size=HIDDEN, **options)


LENGTH = 11


def turned(x, angle):
    """The pairs (i, i + P) of a vector, rotated."""
    a, b = x.chunk(2)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()])


def test_the_echo_block_token_by_token():
    layer = layers.build("mamba3_echo", hidden_size=12, num_heads=2, state_size=6, chunk_size=4).double()
    u = torch.randn(2, LENGTH, 12, dtype=torch.float64)
    z, x, b, c, f, a, l, w = layer.in_proj(u).split([24, 24, 12, 12, 2, 2, 2, 6], -1)
    padded = F.pad(x, (0, 0, 3, 0))
    x = F.silu(sum(padded[:, i : i + LENGTH] * layer.conv.weight[:, i] for i in range(4)) + layer.conv.bias)
    outputs = torch.zeros(2, LENGTH, 2, 12, dtype=torch.float64)
    for row in range(2):
        for h in range(2):
            state, angle, key, value = (torch.zeros(size, dtype=torch.float64) for size in ((6, 12), 3, 6, 12))
            for t in range(LENGTH):
                step = F.softplus(f[row, t, h])
                alpha, end = torch.exp(-step * F.softplus(a[row, t, h])), l[row, t, h].sigmoid()
                angle = angle + step * w[row, t].view(2, -1)[h]
                new = turned(b[row, t].view(2, -1)[h], angle)
                state = alpha * (state + (1 - end) * step * torch.outer(key, value))
                key, value = new, x[row, t].view(2, -1)[h]
                state = state + end * step * torch.outer(key, value)
                outputs[row, t, h] = state.T @ turned(c[row, t].view(2, -1)[h], angle)
    assert_close(layer(u)[0], layer.out_proj(outputs.flatten(-2) * F.silu(z)), 1e-12)


def test_the_counts_of_the_echo_paper():
    """121,600 per layer; 1.11 M, 998 K and 982 K in all, the last without γ and η of two SKA layers."""
    layer = layers.build("mamba3_echo", hidden_size=128, num_heads=4)
    assert sum(x.numel() for x in layer.parameters()) == 121_600
    models = [LanguageModel(recall_model(name, PAPER)) for name in EchoTransfer().models_at("paper")]
    learned = sum(x.numel() for block in models[2].blocks[2:] for x in block.mixer.readout.parameters())
    assert learned == 2 * (4 + 4)
    counts = [model.num_parameters() for model in models]
    assert [counts[0], counts[1], counts[2] - learned] == [1_110_144, 998_016, 981_632]


def test_a_write_of_mimo_is_not_rounded_under_autocast():
    """The state after one token is γ Σ_r k_r (w_r ⊙ v)ᵀ of the key and the value that the state keeps."""
    layer = layers.build("mamba3", hidden_size=12, num_heads=2, state_size=8, chunk_size=4, rank=2)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        _, state = layer(torch.randn(3, 1, 12))
        key, value = state["key"].float().unflatten(1, (2, -1)), layer.mimo.values * state["value"].float().unsqueeze(1)
    written = (key.unsqueeze(-1) * value.unsqueeze(-2)).sum(1)
    gain = (written * state["memory"]).sum((2, 3), keepdim=True) / written.square().sum((2, 3), keepdim=True)
    assert_close(state["memory"], gain * written, 4e-7)
