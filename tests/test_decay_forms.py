"""The Decay paper's rows as its authors ran them: whole layers against literal token loops, in float64."""

import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from helpers import add_noise, assert_close, assert_raises, assert_streams, outer, token_loop

from halflife import LanguageModel, decay, layers, preset
from halflife.lab.experiments import EXPERIMENTS, decay_design, decay_rows
from halflife.models.timescales import timescales
from halflife.position import half_lrpe

WIDTH, HEADS, LENGTH, CHANNELS = 16, 2, 9, 8
EXACT = 1e-10
SIZES = {"hidden_size": WIDTH, "num_layers": 2, "vocab_size": 31, "num_heads": HEADS, "train_length": 16}


def layer_of(**options):
    """A design-space block in float64 with noise in every parameter, and its input."""
    built = layers.build("linear", hidden_size=WIDTH, num_heads=HEADS, chunk_size=4, **options).double()
    return add_noise(built, 0.2), torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)


def per_head(x):
    return x.unflatten(-1, (HEADS, -1))


def read(layer, x, q, v, step):
    return layer.out_proj(layer.gate(token_loop(q / math.sqrt(CHANNELS), v, step), x))


@pytest.mark.parametrize("granularity", ["scalar", "vector"])
def test_released_dplr(granularity):
    """Scalar: the gated delta rule. Vector: (I − β k kᵀ) diag(λ) S + k vᵀ, without β on v. β lies in (0, 2).

    Keys have norm 1, and queries do not.
    """
    layer, x = layer_of(decay="simple", granularity=granularity, update="dplr_released")
    q, k, v = map(per_head, layer.qkv_proj(x).chunk(3, -1))
    q, k = (F.silu(part) for part in (q, k))
    k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    f = layer.decay_proj.up(layer.decay_proj.down(x))
    f = f if granularity == "scalar" else per_head(f)
    decays = (f + layer.decay.delta).sigmoid()
    beta = 2 * layer.beta_proj(x).sigmoid()

    def step(state, b, t):
        size, eye = beta[b, t].view(HEADS, 1, 1), torch.eye(CHANNELS, dtype=torch.float64)
        decayed = decays[b, t].view(HEADS, -1, 1) * state
        written = outer(k[b, t], v[b, t]) * (size if granularity == "scalar" else 1)
        return (eye - size * outer(k[b, t], k[b, t])) @ decayed + written

    assert_close(layer(x)[0], read(layer, x, q, v, step), EXACT)


def test_released_dplr_differs_from_dplr():
    one, x = layer_of(decay="simple", update="dplr_released")
    other = layers.build("linear", hidden_size=WIDTH, num_heads=HEADS, decay="simple", update="dplr").double()
    other.load_state_dict(one.state_dict())
    assert (one(x)[0] - other(x)[0]).abs().max() > 0.01


@pytest.mark.parametrize("granularity", ["scalar", "vector"])
def test_released_rope(granularity):
    """Scores are Σ cos((t − s) θ_i) q_i k_i over the first half of the channels, and plain products over the rest."""
    layer, x = layer_of(decay="mamba2", granularity=granularity, position="half_lrpe")
    q, k, v = map(per_head, layer.qkv_proj(x).chunk(3, -1))
    q, k = F.silu(q), F.silu(k)
    f = layer.decay_proj.up(layer.decay_proj.down(x))
    f = f if granularity == "scalar" else per_head(f)
    g = -layer.decay.A_log.exp() * F.softplus(f + layer.decay.dt_bias)
    theta = torch.tensor([10_000 ** (-2 * i / CHANNELS) for i in range(CHANNELS // 2)], dtype=torch.float64)
    outputs = torch.zeros_like(v)
    for b in range(2):
        for h in range(HEADS):
            for t in range(LENGTH):
                for s in range(t + 1):
                    weight = g[b, s + 1 : t + 1, h].sum(0).exp() * q[b, t, h] * k[b, s, h]
                    weight[: CHANNELS // 2] *= ((t - s) * theta).cos()
                    outputs[b, t, h] += weight.sum() * v[b, s, h] / math.sqrt(CHANNELS)
    assert_close(layer(x)[0], layer.out_proj(layer.gate(outputs, x)), EXACT)
    assert half_lrpe(k, torch.arange(LENGTH)).shape[-1] == CHANNELS + CHANNELS // 2


def test_released_tpe():
    """Σ aᵀb λ^{t−s} x_s with one λ per head, an RMS norm over all heads and a projection."""
    layer = layers.build("tpe_released", hidden_size=WIDTH, num_heads=HEADS, chunk_size=4).double()
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
    values, decays = per_head(x), layer.kernel.logit.sigmoid()
    mixed = torch.zeros_like(values)
    for t in range(LENGTH):
        for s in range(t + 1):
            weight = (layer.kernel.read * layer.kernel.write).sum(-1) * decays ** (t - s)
            mixed[:, t] += weight.view(1, HEADS, 1) * values[:, s]
    mixed = mixed.flatten(-2)
    normed = mixed / (mixed.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert_close(layer(x)[0], layer.out_proj(normed * layer.norm.weight), EXACT)


def test_paper_tpe():
    """Σ aᵀb λ^{t−s} x_s with one λ per head and nothing else, in the place of the embeddings."""
    model = LanguageModel(preset("simple+scalar+tpe_paper", **SIZES)).double()
    heads, kernel, given = model.tpe.num_heads, model.tpe.kernel, []
    model.blocks[0].register_forward_pre_hook(lambda _, inputs: given.append(inputs[0]))
    ids = torch.randint(31, (2, LENGTH))
    model(ids)
    x = model.embedding(ids).unflatten(-1, (heads, -1))
    expected = torch.zeros_like(x)
    for t in range(LENGTH):
        for s in range(t + 1):
            for h in range(heads):
                expected[:, t, h] += (
                    kernel.read[h] @ kernel.write[h] * kernel.logit[h].sigmoid() ** (t - s) * x[:, s, h]
                )
    assert_close(given[0], expected.flatten(-2), EXACT)
    assert sum(p.numel() for p in model.tpe.parameters()) == 2 * x.shape[-1] * heads + heads


def test_released_tpe_replaces_the_embeddings():
    model = LanguageModel(preset("simple+scalar+tpe_released", **SIZES)).double()
    torch.nn.init.zeros_(model.tpe.out_proj.weight)
    given = []
    model.blocks[0].register_forward_pre_hook(lambda _, inputs: given.append(inputs[0]))
    model(torch.randint(31, (1, 5)))
    assert given[0].count_nonzero() == 0


def test_released_lightnet_with_shared_keys():
    """λ_t = e^{z_{t−1} − z_t} and k_t = e^{f_{t−1} − z_t}, z the running log-sum-exp of f_0 = 0, f_1, …, f_t."""
    layer, x = layer_of(decay="lightnet_released", share_keys=True)
    q, v = map(per_head, layer.qkv_proj(x).chunk(2, -1))
    f = per_head(layer.decay_proj.up(x))
    f = torch.cat([torch.zeros_like(f[:, :1]), f], 1)
    z = torch.stack([f[:, : t + 1].logsumexp(1) for t in range(LENGTH + 1)], 1)
    k = (f[:, :-1] - z[:, 1:]).exp()
    decays = (z[:, :-1] - z[:, 1:]).exp()

    def step(state, b, t):
        return decays[b, t].unsqueeze(-1) * state + outer(k[b, t], v[b, t])

    assert_close(layer(x)[0], read(layer, x, F.silu(q), v, step), EXACT)


def test_released_lightnet_streams_and_packs():
    """At every cut, and in packed rows with an empty one."""
    layer, x = layer_of(decay="lightnet_released", share_keys=True)
    assert_streams(layer, x, EXACT)
    bounds = [0, 4, 4, 5, 9]
    _, state = layer(torch.randn(4, 3, WIDTH, dtype=torch.float64))
    packed, last = layer(x[:1], state, cu_seqlens=torch.tensor(bounds))
    for row, (start, stop) in enumerate(pairwise(bounds)):
        alone = {name: part[row : row + 1] for name, part in state.items()}
        y, final = layer(x[:1, start:stop], alone)
        assert_close(packed[:, start:stop], y, EXACT)
        assert_close(last["decay"][row], final["decay"][0], EXACT)


def test_released_mamba2_with_shared_keys():
    """λ_t = exp(−e^A k_t) and k_t = softplus(f_t + Δ), which may exceed 1."""
    layer, x = layer_of(decay="mamba2_released", share_keys=True)
    q, v = map(per_head, layer.qkv_proj(x).chunk(2, -1))
    k = F.softplus(per_head(layer.decay_proj.up(x)) + layer.decay.dt_bias)
    decays = (-layer.decay.A_log.exp() * k).exp()

    def step(state, b, t):
        return decays[b, t].unsqueeze(-1) * state + outer(k[b, t], v[b, t])

    assert_close(layer(x)[0], read(layer, x, F.silu(q), v, step), EXACT)


@pytest.mark.parametrize("row", ["share", "vector", "scalar"])
def test_released_hgrn2_has_one_table(row):
    """γ of layer l is cumsum(softmax(table))_l − softmax(table)_0, for logits `[L, channels]` of the whole model."""
    config = decay_rows.row_or_preset(f"{row}/hgrn2:released", **{**SIZES, "num_layers": 4})
    model = add_noise(LanguageModel(config)).double()
    tables = {key: x for key, x in model.named_parameters() if "bound_logits" in key}
    assert [*tables] == ["blocks.0.mixer.decay.bound_logits"]
    (table,) = tables.values()
    assert table.shape == (4, HEADS) if row == "scalar" else (4, HEADS, CHANNELS)
    shares = table.softmax(0)
    bounds, found = shares.cumsum(0) - shares[0], []
    hooks = [
        block.mixer.decay.register_forward_hook(lambda _, given, out: found.append((given[0], out.g)))
        for block in model.blocks
    ]
    logits, _ = model(torch.randint(31, (2, LENGTH)))
    for hook in hooks:
        hook.remove()
    for bound, (f, g) in zip(bounds, found, strict=True):
        assert_close(g.exp(), bound + (1 - bound) * f.sigmoid(), EXACT)
    logits.square().sum().backward()
    assert (table.grad.abs().amax(list(range(1, table.ndim))) > 0).all()
    scales = timescales(model, [1])
    for i in range(4):
        at_zero = bounds[i] + (1 - bounds[i]) / 2
        assert_close(torch.tensor(scales[i].timescales["1"]).double(), -1 / at_zero.log().flatten(), 1e-6)


def test_sizes_of_the_bounds_at_1_45b():
    """24 layers of 2,048 channels: one table as released, and one for each layer but the first as printed."""
    sizes = {"hidden_size": 2048, "num_layers": 24, "num_heads": 32, "vocab_size": 31, "train_length": 16}
    counts = []
    for form in ("", ":released"):
        with torch.device("meta"):
            model = LanguageModel(decay_rows.row_or_preset(f"vector/hgrn2{form}", **sizes))
        counts.append(sum(x.numel() for key, x in model.named_parameters() if "bound_logits" in key))
    assert counts == [1_130_496, 49_152]


def test_tnl_contradicts_its_text():
    """Table 1's λ has a median of 0.01 in layer 0, and the released one of 0.96."""
    median = {
        name: decay.build(name, num_heads=12, head_dim=2, num_layers=12)(torch.zeros(1, 1, 12)).exp().median().item()
        for name in ("tnl", "tnl_released")
    }
    assert median["tnl"] < 0.02
    assert median["tnl_released"] > 0.9


def test_retnet_forms_agree_for_four_heads_only():
    for heads in (2, 4, 8):
        one, other = (decay.build(name, num_heads=heads, head_dim=2) for name in ("retnet", "retnet_paper"))
        assert torch.allclose(one.log_rate, other.log_rate) == (heads == 4)


def test_rows_of_the_grid_as_they_were_run():
    """`name:released` is another model than the row, and the group has the rows for which it is one."""
    released = decay_design.DecayDesign.groups["released"]
    assert {name.split("/")[0] for name in released} == {"vector", "share", "scalar", "rope", "tpe", "dplr"}
    settings = decay_design.SMOKE
    for name in released:
        one, other = (decay_design.DecayDesign().model(row, settings) for row in (name, name.split(":")[0]))
        assert (one.mixer_options, one.position) != (other.mixer_options, other.position)
        LanguageModel(one)(torch.zeros(1, 3, dtype=torch.long))
    options = decay_design.DecayDesign().model("rope/tnl:released", settings).mixer_options
    assert (options["decay"], options["position"]) == ("tnl_released", "half_lrpe")
    assert decay_design.DecayDesign().model("tpe/gla:released", settings).position == "tpe_released"
    printed, ours = (decay_design.DecayDesign().model(f"tpe/gla{form}", settings) for form in ("", ":ours"))
    assert (printed.position, ours.position) == ("tpe_paper", "tpe")
    assert_raises(ValueError, "unknown variant", decay_rows.find_variant, "rope/gla:ours")
    assert_raises(ValueError, "row vector/mamba2", preset, "mamba2+vector")
    for row in ("simple/0.9", "vector/mamba2"):
        assert_raises(ValueError, "as the paper prints it", decay_rows.find_variant, f"{row}:released")
    assert_raises(ValueError, "unknown variant", decay_rows.find_variant, "simple/0.9:run")


def test_losses_of_the_paper_belong_to_the_forms_that_it_ran():
    """A printed form that was not run has none, and what would settle the claims trains no such form."""
    losses = {name: decay_rows.paper_loss(name) for name in ("tpe/gla", "tpe/gla:ours", "vector/gla", "vector/mamba2")}
    assert losses == {"tpe/gla": None, "tpe/gla:ours": None, "vector/gla": None, "vector/mamba2": 2.947}
    assert (decay_rows.paper_loss("vector/gla:released"), decay_rows.paper_loss("vector/gla@state(mamba2)")) == (
        2.975, None
    )  # fmt: skip
    ran = EXPERIMENTS["decay-lm"].models_of.get("paper", EXPERIMENTS["decay-lm"].models)
    assert ran == decay_design.DecayDesign.groups["as-run"]
    assert len(ran) == len(decay_rows.VARIANTS)
    assert [name for name in ran if decay_rows.paper_loss(name) is None] == ["tpe/tnl:released"]
    assert set(decay_design.DecayDesign.groups["released"]) == {name for name in ran if ":" in name}


def test_rows_of_the_grid_can_be_named_like_presets():
    """All 39 rows, as `halflife train vector/gla` has them; the sizes and options of the caller count."""
    sizes = {"hidden_size": 32, "num_layers": 2, "vocab_size": 31, "num_heads": 4, "train_length": 16}
    assert len(decay_rows.VARIANTS) == 39
    for name in decay_rows.VARIANTS:
        config = decay_rows.row_or_preset(name, **sizes)
        assert (config.name, config.hidden_size, config.vocab_size) == (name, 32, 31)
    assert decay_rows.row_or_preset("mamba2", **sizes) == preset("mamba2", **sizes)
    options = decay_rows.row_or_preset("vector/gla", **sizes, mixer_options={"chunk_size": 16}).mixer_options
    assert (options["decay"], options["chunk_size"]) == ("gla", 16)
