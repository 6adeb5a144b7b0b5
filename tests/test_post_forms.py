"""PoST as its paper prints it and as it was released: whole layers against literal token loops, in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import add_noise, assert_close, assert_raises, cases, outer, token_loop

from halflife import LanguageModel, decay, layers, param_groups, preset
from halflife.decay import PoST

T, WIDTH, HEADS, LENGTH = 64, 16, 4, 9
EXACT = 1e-10  # float64; parameters that start in float32 are exact numbers here
SIZES = {"hidden_size": WIDTH, "num_layers": 1, "vocab_size": 11, "num_heads": HEADS, "train_length": T}
each_reference = pytest.mark.parametrize("reference_length", [1, 8, T])


def layer_of(name, **changes):
    """The mixer of a preset in float64, with noise in every parameter, and its input."""
    config = preset(name, **SIZES, mixer_options={"chunk_size": 4, **changes})
    layer = layers.build(config.mixer, hidden_size=WIDTH, **config.mixer_options).double()
    return add_noise(layer, 0.2), torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)


def spectrum(post):
    """Lines 5 to 7 and 13 of Algorithm 1: p and α, number by number."""
    gaps = [math.log1p(math.exp(x)) for x in post.delta.tolist()]
    p = [post.theta.item() + sum(gaps[:k]) for k in range(len(gaps) + 1)]
    n, mean = len(p), (p[-1] - p[0]) / (len(p) - 1)
    alpha = [(n - k) / (n - 1) + ((p[k - 1] - p[0]) - (k - 1) * mean) / math.log(T) for k in range(1, n + 1)]
    return torch.tensor(p, dtype=torch.float64), torch.tensor(alpha, dtype=torch.float64).clamp(0, 1)


def short_conv(conv, x):
    """The causal convolution of width W, then SiLU."""
    padded = F.pad(x, (0, 0, conv.size - 1, 0))
    bias = 0 if conv.bias is None else conv.bias
    return F.silu(sum(padded[:, i : i + x.shape[1]] * conv.weight[:, i] for i in range(conv.size)) + bias)


@pytest.mark.parametrize("form", ["paper", "released"])
def test_mamba2_is_algorithm_2(form):
    """Δ is fixed at 0.05 and not trained; the taper multiplies A in the decay, and not the input Δ x."""
    layer, u = layer_of(f"mamba2+post_{form}", state_size=6)
    assert "decay.decay.dt_bias" not in dict(layer.named_parameters())
    assert_close(F.softplus(layer.decay.decay.dt_bias), torch.full((HEADS,), 0.05).double(), 1e-6)
    z, xbc, dt = layer.in_proj(u).split(layer.splits, -1)
    x, b, c = short_conv(layer.conv, xbc).split(layer.conv_splits, -1)
    delta = F.softplus(dt + layer.decay.decay.dt_bias)
    p, alpha = spectrum(layer.decay)
    b, c = (part.unsqueeze(2).expand(-1, -1, HEADS, -1) for part in (b, c))
    values = x.unflatten(-1, (HEADS, -1))

    def step(state, row, t):
        decayed = torch.exp(-p.exp() * (t + 1) ** -alpha * delta[row, t])
        return decayed.view(-1, 1, 1) * state + outer(b[row, t], delta[row, t].unsqueeze(-1) * values[row, t])

    y = token_loop(c, values, step) + layer.skip.D.unsqueeze(-1) * values
    assert_close(layer(u)[0], layer.out_proj(layer.norm(y.flatten(2), z)), EXACT)


@pytest.mark.parametrize("form", ["paper", "released"])
def test_gated_deltanet(form):
    """S = e^g S, then S += β k (v − Sᵀ k)ᵀ, with g = −e^p softplus(a + Δ) t^{−α}."""
    layer, x = layer_of(f"gated_deltanet+post_{form}")
    q, k, v = (part.view(2, LENGTH, HEADS, -1) for part in short_conv(layer.conv, layer.qkv_proj(x)).chunk(3, -1))
    q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
    p, alpha = spectrum(layer.decay)
    position = torch.arange(1, LENGTH + 1).view(1, -1, 1)
    g = -p.exp() * F.softplus(layer.decay_proj(x) + layer.decay.decay.dt_bias) * position**-alpha
    beta = layer.beta_proj(x).sigmoid()

    def step(state, row, t):
        state = g[row, t].exp().view(-1, 1, 1) * state
        error = v[row, t] - torch.einsum("hkv,hk->hv", state, k[row, t])
        return state + outer(k[row, t], beta[row, t].unsqueeze(-1) * error)

    outputs = token_loop(q / math.sqrt(4), v, step)
    assert_close(layer(x)[0], layer.out_proj(layer.gate(outputs, x)), EXACT)


def test_gated_deltanet_ranges():
    """In the text e^p · 0.05 goes from 1/T to 1; as released, e^p goes from 1 to T, and Δ is trained."""
    paper, released = (
        LanguageModel(preset(f"gated_deltanet+post_{form}", **SIZES)).blocks[0].mixer.decay
        for form in ("paper", "released")
    )
    assert_close(paper.log_rates()[[0, -1]].exp() * 0.05, torch.tensor([1 / T, 1.0]), 1e-5)
    assert_close(released.log_rates()[[0, -1]].exp(), torch.tensor([1.0, T]), 1e-5)
    assert paper.decay.dt_bias.unique().numel() == 1
    step = F.softplus(released.decay.dt_bias)
    assert released.decay.dt_bias.requires_grad
    assert step.unique().numel() == HEADS
    assert ((step > 0.99e-3) & (step < 0.101)).all()


@pytest.mark.parametrize("form", ["paper", "released"])
@pytest.mark.parametrize("base", ["gla", "retnet"])
def test_retention(base, form):
    """Algorithm 4, whose decay is γ^{t^{−α}}, and Table 2 as released, with a vector decay that the input sets."""
    layer, x = layer_of(f"{base}+post_{form}")
    q, k, v = (part.view(2, LENGTH, HEADS, -1) for part in layer.qkv_proj(x).chunk(3, -1))
    p, alpha = spectrum(layer.decay)

    def step(state, row, t):
        stretch = float(t + 1) ** -alpha
        if form == "paper":
            decayed = (torch.exp(-p.exp()) ** stretch).view(-1, 1, 1)
        else:
            a = layer.decay_proj.up(x[row, t]).view(HEADS, 4)
            g = -p.exp().view(-1, 1) * F.softplus(a + layer.decay.decay.dt_bias)
            decayed = (g * stretch.view(-1, 1)).exp().unsqueeze(-1)
        return decayed * state + outer(k[row, t], v[row, t])

    outputs = token_loop(q / math.sqrt(4), v, step)
    assert_close(layer(x)[0], layer.out_proj(layer.gate(outputs, x)), EXACT)


@pytest.mark.parametrize("form", ["paper", "released"])
def test_gla_and_retnet_are_one_model(form):
    """As PoST says; under plain `post` they are two, because keys, values and positions differ."""
    one, other = (layer_of(f"{base}+post_{form}")[0] for base in ("gla", "retnet"))
    other.load_state_dict(one.state_dict())
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
    assert_close(one(x)[0], other(x)[0], 0.0)
    gla, retnet = (preset(f"{base}+post", **SIZES).mixer_options for base in ("gla", "retnet"))
    assert gla != retnet


def test_released_gla_starts_from_1_to_16():
    released = layers.build("gla", hidden_size=WIDTH, **preset("gla+post_released", **SIZES).mixer_options).decay
    assert_close(released.log_rates().exp(), torch.logspace(0, math.log10(16), HEADS), 1e-5)
    assert released.decay.dt_bias.shape == (HEADS, 4)


@each_reference
@pytest.mark.parametrize("name", ["mamba2", "retnet", "simple", "rwkv7", "mamba2_headwise"])
def test_proposition_4_16(name, reference_length):
    """Perturbed log-rates are evenly spaced again at position T, and at no other, for every reference length.

    In RWKV-7, whose stretch is inside the sigmoid, only the sum of p and the stretch is, and not the rates.
    """
    granularity = decay.DECAYS[name].granularities[-1]
    built = decay.build(name, num_heads=HEADS, head_dim=3, granularity=granularity)
    post = PoST(built, train_length=T, reference_length=reference_length).double()
    with torch.no_grad():
        post.delta.mul_(torch.linspace(0.97, 1.03, len(post.delta)))  # so little that no α is clamped
    ideal = torch.linspace(1, 0, post.channels, dtype=torch.float64)
    inside = (post.taper() > 0) & (post.taper() < 1) | (ideal == 0) | (ideal == 1)
    assert inside.all()

    def unevenness(log_rates):
        return (log_rates.diff() - log_rates.diff().mean()).abs().max().item()

    def stretched(position):
        return post.log_rates() + post.log_stretch(torch.tensor([float(position)]).double()).flatten()

    assert unevenness(stretched(T)) < 1e-12 < 1e-4 < min(unevenness(stretched(t)) for t in (1, T / 4, T * T))
    rates = -post.timescales(T).detach().flatten().log()
    if name == "rwkv7":
        assert unevenness(rates) > 0.1 * rates.diff().mean()
    elif name != "mamba2_headwise":  # whose steps differ
        assert unevenness(rates) < 1e-6


def test_theorem_form_starts_where_it_did():
    """At t_ref = T and a geometric spectrum the multiplier is (t / T)^{−α}."""
    post = PoST(decay.build("mamba2", num_heads=5, head_dim=2), train_length=T, reference_length=T).double()
    position = torch.arange(1, 300).double()
    assert_close(post.log_stretch(position), -torch.outer((position / T).log(), torch.linspace(1, 0, 5).double()), 1e-7)


@pytest.mark.parametrize("name", ["mamba2", "mamba2_no_dt", "retnet", "simple", "rwkv7"])
def test_from_rates_has_the_given_rates(name):
    """Proposition 4.18: every ordered spectrum can be reached; here the shuffled rates of a trained layer."""
    granularity = decay.DECAYS[name].granularities[-1]
    built = decay.build(name, num_heads=HEADS, head_dim=3, granularity=granularity)
    rates = 0.5 * torch.rand(built.base_shape).double() ** 4
    post = PoST.from_rates(built, rates, train_length=T)
    assert_close(post.base_log_rate().exp().flatten(), rates.flatten().sort().values, 1e-4)


def test_from_rates_separates_equal_rates_and_says_what_is_wrong():
    built, rates = decay.build("retnet", num_heads=3, head_dim=2), torch.tensor([0.1, 0.1, 0.5])
    post = PoST.from_rates(built, rates, train_length=T)
    assert post.delta.isfinite().all()
    assert_close(post.log_rates().exp(), rates, 1e-5)
    for wrong in (torch.ones(2), torch.tensor([0.1, 0.0, 0.5])):
        assert_raises(ValueError, "need 3 positive rates", post.set_rates, wrong)


def test_released_rwkv7_trains_its_base_twice_as_fast():
    model = LanguageModel(preset("rwkv7+post_released", **SIZES))
    post = model.blocks[0].mixer.decay
    *plain, fast = param_groups(model, 0.1, 3e-4)
    assert fast["lr"] == pytest.approx(6e-4)
    assert {id(x) for x in fast["params"]} == {id(post.theta), id(post.delta)}
    assert not any("lr" in group for group in plain)
    assert sum(len(group["params"]) for group in (*plain, fast)) == len([*model.parameters()])
    assert_raises(ValueError, "needs the learning rate", param_groups, model, 0.1)


@pytest.mark.parametrize("form", ["paper", "released"])
@pytest.mark.parametrize("base", ["simple", "tnl_l", "mamba3"])
def test_forms_exist_for_the_papers_models_alone(base, form):
    assert_raises(ValueError, f"has mamba2, rwkv7, .* but not {base}", preset, f"{base}+post_{form}", **SIZES)


@cases(
    "name, options, post, message",
    ("mamba2", {"step_bias": "fixed"}, None, "unknown step_bias"),
    ("mamba2", {"rate_start": "s4d"}, None, "unknown rate_start .*s4d_real"),
    ("mamba2_no_dt", {"step_bias": "frozen"}, None, "has none"),
    ("mamba2_no_a", {"rate_start": "s4d_real"}, None, "has none"),
    ("mamba2", {"rate_start": "s4d_real"}, {}, "has no meaning under it"),
    ("mamba2_no_a", {"step_bias": "frozen"}, {}, "orders and trains Δ"),
    ("mamba2", {}, {"rate_range": (1, 4), "endpoints": (0.5, 4)}, "not both"),
    ("mamba2", {}, {"rate_range": (0, 4)}, "0 < slowest"),
    ("mamba2", {}, {"learning_rate_factor": 0}, "must be positive"),
    ("rwkv7", {}, {"rate_range": (1, 4)}, "unlike RWKV7Decay"),
)
def test_errors_say_what_is_wrong(name, options, post, message):
    granularity = decay.DECAYS[name].granularities[0]

    def build():
        built = decay.build(name, num_heads=4, head_dim=2, granularity=granularity, **options)
        return built if post is None else PoST(built, train_length=T, **post)

    assert_raises(ValueError, message, build)


@pytest.mark.parametrize("start", ["uniform_1_16", "uniform_0_16", "s4d_real"])
def test_rate_starts(start):
    rates = decay.build("mamba2", num_heads=4000, head_dim=2, rate_start=start).A_log.exp()
    low, high = {"uniform_1_16": (1, 16), "uniform_0_16": (0, 16), "s4d_real": (1, 4000)}[start]
    assert low <= rates.min() < low + 0.1
    assert high * 0.99 < rates.max() <= high * (1 + 1e-5)
    if start == "s4d_real":
        assert_close(rates, torch.arange(1, 4001).float(), 1e-5)
