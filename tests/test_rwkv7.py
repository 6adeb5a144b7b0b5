"""RWKV-7's time mix and channel mix against its paper's equations and fla's parts; initialisation; first values."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, assert_packs, assert_same, cases, fla, leaves, on_linux, with_grads
from test_parity import heads_first

from halflife import layers
from halflife.layers.rwkv7 import RWKV7ChannelMix

HIDDEN, HEADS, LENGTH = 32, 4, 11
SCALE = math.exp(-0.5)

# Four times the worst measured error, relative to the largest entry: float64 and float32.
EXACT, SINGLE = 4 * 7.5e-15, 4 * 9.0e-7


def rwkv7(hidden_size, num_heads=4, **options):
    return layers.build("rwkv7", hidden_size=hidden_size, num_heads=num_heads, **options)


def noisy(module, dtype=torch.float64):
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.uniform_(0.1, 0.9) if "mu" in name else parameter.normal_(std=0.3)
    return module.to(dtype)


def stack(depth=2, **options):
    options = {"chunk_size": 4, **options}
    return torch.nn.ModuleList(rwkv7(HIDDEN, HEADS, layer_idx=i, num_layers=depth, **options) for i in range(depth))


def run_stack(mixers, x, states=None, **options):
    """Return `(y, states)` of a residual stack that shares its first values."""
    shared, new = {}, []
    for mixer, state in zip(mixers, states or [None] * len(mixers), strict=True):
        y, state = mixer(x, state, shared=shared, **options)
        x = x + y
        new.append(state)
    return x, new


def inputs(batch=2, length=LENGTH, dtype=torch.float64):
    return torch.randn(batch, length, HIDDEN, dtype=dtype)


def low_rank(lora, x, inner=lambda x: x):
    return inner(x @ lora.down.T) @ lora.up.T


def activations(layer, x, first):
    """Compute r, w, k, v, κ̂, a as `[B, T, H, K]`, and the gate, by the paper's equations before its recurrence."""
    delta = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1) - x
    x_r, x_w, x_k, x_v, x_a, x_g = (x + delta * layer.mu[name] for name in "rwkvag")
    r, k, v = x_r @ layer.r_proj.weight.T, x_k @ layer.k_proj.weight.T, x_v @ layer.v_proj.weight.T
    if first is not None:
        v = v + (first.flatten(-2) - v) * (layer.v0 + low_rank(layer.value_lora, x_v)).sigmoid()
    logit = layer.decay.logit.flatten() + low_rank(layer.decay_lora, x_w, torch.tanh)
    w = torch.exp(-SCALE * logit.sigmoid())
    a = (layer.a0 + low_rank(layer.iclr_lora, x_a)).sigmoid()
    removed = F.normalize((k * layer.k_k).unflatten(-1, (HEADS, -1)), dim=-1, eps=1e-12)
    r, w, k, v, a = (z.unflatten(-1, (HEADS, -1)) for z in (r, w, k * (1 + (a - 1) * layer.k_a), v, a))
    return r, w, k, v, removed, a, low_rank(layer.gate_lora, x_g, torch.sigmoid)


def head_norm(layer, o):
    tokens, eps = o.flatten(0, 1).flatten(1), 1e-5 * o.shape[-1]
    return F.group_norm(tokens, HEADS, layer.norm.weight, layer.norm.bias, eps).unflatten(0, o.shape[:2])


def paper(layer, x, first):
    """Run the paper's recurrence for `wkv [V, K]`, token by token: `wkv (diag(w) − κ̂ᵀ(a ⊙ κ̂)) + vᵀk`."""
    r, w, k, v, removed, a, gate = activations(layer, x, first)
    wkv, read = x.new_zeros(len(x), HEADS, v.shape[-1], k.shape[-1]), []
    for t in range(x.shape[1]):
        correction = removed[:, t].unsqueeze(-1) * (a[:, t] * removed[:, t]).unsqueeze(-2)
        wkv = wkv @ (w[:, t].diag_embed() - correction) + v[:, t].unsqueeze(-1) * k[:, t].unsqueeze(-2)
        read.append((wkv @ r[:, t].unsqueeze(-1)).squeeze(-1))
    bonus = (r * k * layer.r_k.view(HEADS, -1)).sum(-1, keepdim=True) * v
    y = (head_norm(layer, torch.stack(read, 1)) + bonus.flatten(-2)) * gate
    return y @ layer.out_proj.weight.T, wkv.transpose(-1, -2), v


def test_two_layers_equal_the_papers_equations():
    """Outputs, last states, and the gradients of the input and of every parameter agree."""
    mixers, x = noisy(stack()), inputs().requires_grad_()
    arguments = {"x": x, **dict(mixers.named_parameters())}
    first_y, first_state, value = paper(mixers[0], x, None)
    second_y, second_state, _ = paper(mixers[1], x + first_y, value)
    expected = with_grads((x + first_y + second_y, torch.stack([first_state, second_state])), arguments)
    y, states = run_stack(mixers, x)
    got = with_grads((y, torch.stack([state["memory"] for state in states])), arguments)
    assert_close(got, expected, EXACT)


@on_linux
def test_time_mix_equals_flas_parts():
    """fla's reference token shift, key update, DPLR recurrence and output correction give the same in float32."""
    layer = noisy(rwkv7(HIDDEN, HEADS), torch.float32)
    arguments = leaves({"x": inputs(dtype=torch.float32)})
    x = arguments["x"]
    delta = F.pad(x, (0, 0, 1, -1)) - x
    mix = fla("rwkv7.fused_addcmul", "torch_addcmul_rwkv7")
    x_r, x_w, x_k, x_v, x_a, x_g = mix(x, delta, *(layer.mu[name] for name in "rwkvag"))
    raw, a = layer.k_proj(x_k), (layer.a0 + low_rank(layer.iclr_lora, x_a)).sigmoid()
    k = fla("rwkv7.fused_k_update", "k_update_ref")(raw, a, layer.k_a)
    g = -SCALE * (layer.decay.logit.flatten() + low_rank(layer.decay_lora, x_w, torch.tanh)).sigmoid()
    flat = (layer.r_proj(x_r), k, layer.v_proj(x_v), a, g, raw * layer.k_k)
    r, k, v, a, g, removed = (z.unflatten(-1, (HEADS, -1)) for z in flat)
    removed = F.normalize(removed, dim=-1)
    recurrence = heads_first(fla("generalized_delta_rule.dplr.naive", "dplr_recurrence"))
    o, state = recurrence(None, True, q=r * r.shape[-1] ** 0.5, k=k, v=v, alpha=-removed, beta=removed * a, gk=g)
    correct = fla("rwkv7.gate_output_correction", "gate_output_correction_ref")
    gate = low_rank(layer.gate_lora, x_g, torch.sigmoid)
    y = layer.out_proj(correct(head_norm(layer, o), r, k, layer.r_k.view(HEADS, -1), v, gate))
    got, last = layer(x)
    assert_close(with_grads((got, last["memory"]), arguments), with_grads((y, state), arguments), SINGLE)


def test_a_token_is_copied_into_the_state():
    """A decoder may write the next token into the memory of this one."""
    x = inputs(1, 1, torch.float32)
    for mixer in (rwkv7(HIDDEN, HEADS), RWKV7ChannelMix(HIDDEN)):
        assert mixer(x)[1]["shift"].data_ptr() != x.data_ptr()


@on_linux
def test_channel_mix_equals_fla():
    layer = noisy(RWKV7ChannelMix(HIDDEN), torch.float32)
    arguments = leaves({"x": inputs(dtype=torch.float32), "last": inputs(length=1, dtype=torch.float32)[:, 0]})
    x, last = arguments.values()
    y, _ = fla("rwkv7.channel_mixing", "channel_mixing_rwkv7_torch")(
        x, last, layer.mu, layer.k_proj.weight.T, layer.v_proj.weight.T
    )
    got, _ = layer(x, {"position": torch.zeros(2), "shift": last})
    assert_close(with_grads((got, None), arguments), with_grads((y, None), arguments), SINGLE)


def test_packed_channel_mixes_equal_separate_ones():
    """With gradients. `test_registry.py` streams, packs and pads the whole model."""
    channel_mix = noisy(RWKV7ChannelMix(HIDDEN, layer_idx=1, num_layers=3))
    state, alone = assert_packs(channel_mix, lambda *size: inputs(*size).requires_grad_(), EXACT)
    for row, own in enumerate(alone):
        assert_close({name: part[row : row + 1] for name, part in state.items()}, own, EXACT)


def test_deeper_layers_mix_in_the_first_values():
    """Layer 1 reads layer 0's values, and the gradient flows back to them. Alone, it uses its values only."""
    first, second = noisy(stack())
    x, shared = inputs(), {}
    first(x, shared=shared)
    assert_close(shared["value"], torch.lerp(x, F.pad(x, (0, 0, 1, -1)), first.mu["v"]) @ first.v_proj.weight.T, EXACT)
    y, _ = second(x, shared=shared)
    (grad,) = torch.autograd.grad(y.square().sum(), first.v_proj.weight)
    assert grad.any()
    alone, _ = second(x)
    assert_same(second(x, shared={})[0], alone)
    assert (y - alone).abs().max() > 0.01
    with torch.no_grad():
        second.v0.fill_(-1e3)  # a closed gate
    assert_close(second(x, shared=shared)[0], alone, EXACT)


def test_one_layer_is_enough():
    layer, narrow = rwkv7(HIDDEN, HEADS), rwkv7(1, 1)  # a single channel, over which nothing can be spread
    assert layer.v0 is layer.value_lora is None
    assert all(x.isfinite().all() for x in (*layer.parameters(), *narrow.parameters()))
    assert noisy(narrow, torch.float32)(torch.randn(1, 3, 1))[0].isfinite().all()


def test_zero_keys_have_finite_gradients():
    """κ̂ = 0 where k = 0, as for a token of zeros."""
    layer, x = noisy(rwkv7(HIDDEN, HEADS), torch.float32), inputs(dtype=torch.float32)
    x[:, 3:6] = 0
    x.requires_grad_()
    y, state = layer(x)
    (y.square().sum() + state["memory"].sum()).backward()
    assert all(part.grad.isfinite().all() for part in (x, *layer.parameters()))


def test_post_layer_is_the_layer_with_a_stretched_decay():
    """In a layer that is built by name, rates adapt to the position in the state."""
    layer, x = noisy(layers.build("rwkv7", hidden_size=HIDDEN, post={"train_length": 16})), inputs()
    _, nothing = layer(x[:, :0])
    later = {**nothing, "position": nothing["position"] + 1000}
    assert (layer(x, later)[0] - layer(x, nothing)[0]).abs().max() > 1e-3


def test_time_mix_starts_as_its_authors_do():
    """Numbers by hand from the authors' formulas, for layer 1 of 4 with D = 8 in 2 heads of 4."""
    layer = rwkv7(8, 2, layer_idx=1, num_layers=4)
    for name, exponent in {"r": 0.2, "w": 0.9, "k": 0.7, "v": 0.7, "a": 0.9, "g": 0.2}.items():
        expected = [1 - (i / 8) ** (exponent * 0.75) for i in range(8)]
        assert_close(layer.mu[name], torch.tensor(expected), SINGLE)
    # zigzag: −1, −1/9, 1/9, 1; the ramp from −1/2 to 1/2
    assert_close(layer.a0[[0, 1, 7]], torch.tensor([-0.69, -0.3661905, 0.31]), SINGLE)
    assert_close(layer.v0[[0, 7]], torch.tensor([0.93, 0.53]), SINGLE)
    assert_close(layer.k_k[[0, 7]], torch.tensor([0.76, 0.66]), SINGLE)
    assert_close(torch.stack([layer.k_a, layer.r_k], 1), torch.tensor([1.02, -0.04]).expand(8, 2), SINGLE)
    assert_close(layer.norm.weight, torch.full((8,), 0.5**0.7), SINGLE)
    assert not layer.norm.bias.any()
    assert not layer.out_proj.weight.any()
    for lora in (layer.decay_lora, layer.iclr_lora, layer.value_lora, layer.gate_lora):
        assert not lora.down.any()
        assert_close(lora.up @ lora.up.T, 0.01 * torch.eye(8), SINGLE)
    assert layer(torch.randn(1, 5, 8))[0].count_nonzero() == 0  # the block starts as the identity


@pytest.mark.parametrize(("name", "bound"), [("r_proj", 0.5), ("k_proj", 0.05), ("v_proj", 0.5)])
def test_projections_start_uniform(name, bound):
    weight = getattr(rwkv7(256), name).weight
    assert 0.99 * bound / 16 < weight.abs().max() <= bound / 16
    assert weight.std().item() == pytest.approx(bound / 16 / math.sqrt(3), rel=0.02)


def test_channel_mix_starts_as_its_authors_do():
    layer = RWKV7ChannelMix(64, layer_idx=1, num_layers=4)
    assert_close(layer.mu, torch.tensor([1 - (i / 64) ** 0.75**4 for i in range(64)]), SINGLE)
    assert layer.k_proj.weight.shape == (256, 64)
    assert 0.99 / 16 < layer.k_proj.weight.abs().max() <= 1 / 16
    assert not layer.v_proj.weight.any()


@cases("hidden, head_dim, ranks", (768, 64, [64, 64, 32, 128]), (2048, 128, [224, 224, 160, 224]), (64, 16, [32] * 4))
def test_ranks(hidden, head_dim, ranks):
    """Ranks of the decay, a, v and the gate are multiples of 32."""
    with torch.device("meta"):
        layer = rwkv7(hidden, hidden // head_dim, layer_idx=1, num_layers=2)
    loras = (layer.decay_lora, layer.iclr_lora, layer.value_lora, layer.gate_lora)
    assert [len(lora.down) for lora in loras] == ranks


@pytest.mark.parametrize("make", [lambda: stack(1)[0], lambda: stack()[1], lambda: RWKV7ChannelMix(HIDDEN)])
def test_reset_again_and_from_the_meta_device(make):
    """A layer's reset draws all of it. In bfloat16 the draws are those of float32, rounded."""

    def reset(module):
        torch.manual_seed(1)
        module.reset_parameters()
        return module.state_dict()

    with torch.device("meta"):
        from_meta = make()
    expected = reset(make())
    assert_same(reset(from_meta.to_empty(device="cpu")), expected)
    narrow = reset(make().bfloat16())
    assert_same(narrow, {name: x.to(narrow[name].dtype) for name, x in expected.items()})
