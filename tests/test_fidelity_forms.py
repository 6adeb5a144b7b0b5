"""Every row of the table of presets and modifiers in docs/fidelity.md: its names are built, its statements are checked.

A check takes the names of its row, and returns parts of the row that it has computed or tested. Every number of a row
is in such a part. A row without a check fails, and so does a check without a row. Whole layers are compared with loops
from the papers elsewhere (test_post_forms, test_decay_forms, test_ska_forms).
"""

import pytest
import torch
import torch.nn.functional as F
from fidelity_post import HEADS, POST, SIZES, WIDTH, mixer, model, number
from fidelity_rows import check_row, names, rows

from halflife import LanguageModel, layers, preset
from halflife.lab.experiments import EXPERIMENTS
from halflife.layers.mlp import KoopmanMLP
from halflife.runs.sweep import Cell

FORMS = rows("Presets and modifiers")


def writes(update, granularity="vector"):
    """The states of a layer with fixed β and decay after two tokens `k, v`, from the op that it calls."""
    torch.manual_seed(0)
    layer = layers.build(
        "linear", hidden_size=WIDTH, num_heads=HEADS, decay="simple", granularity=granularity, update=update
    ).double()
    x = torch.randn(1, 2, WIDTH, dtype=torch.float64)
    _, k, v = (part.unflatten(-1, (HEADS, -1)) for part in layer.qkv_proj(x).chunk(3, -1))
    k = F.silu(k)
    k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    f = layer.decay_proj.up(layer.decay_proj.down(x))
    f = f if granularity == "scalar" else f.unflatten(-1, (HEADS, -1))
    decays = (f + layer.decay.delta).sigmoid()
    return layer(x)[1]["memory"][0], k[0], v[0], decays[0], layer.beta_proj(x).sigmoid()[0]


def dplr(*_):
    """S ← diag(λ) S − β k (kᵀ S) + β k vᵀ: k reads the state before it decays."""
    state, k, v, decays, beta = writes("dplr")
    own = torch.zeros_like(state)
    for t in range(2):
        read = torch.einsum("hk,hkv->hv", k[t], own)
        own = decays[t].unsqueeze(-1) * own + beta[t].view(-1, 1, 1) * torch.einsum("hk,hv->hkv", k[t], v[t] - read)
    torch.testing.assert_close(state.double(), own, rtol=1e-5, atol=1e-7)
    return "before it decays", "β in (0, 1) on v too"


def released_dplr(*_):
    """Vector: (I − β k kᵀ) diag(λ) S + k vᵀ. Scalar: the delta rule, with β on v."""
    for granularity in ("vector", "scalar"):
        state, k, v, decays, beta = writes("dplr_released", granularity)
        own, size = torch.zeros_like(state), 2 * beta
        for t in range(2):
            own = decays[t].view(HEADS, -1, 1) * own
            read = torch.einsum("hk,hkv->hv", k[t], own)
            on_value = size[t].view(-1, 1) if granularity == "scalar" else 1
            own = own + torch.einsum("hk,hv->hkv", k[t], on_value * v[t] - size[t].view(-1, 1) * read)
        torch.testing.assert_close(state.double(), own, rtol=1e-5, atol=1e-7)
    layer = mixer("simple+dplr_released")
    assert layer.unit_keys
    assert not layer.unit_queries
    return "β in (0, 2)", "`(I − β k kᵀ) diag(λ) S + k vᵀ`", "queries of any norm"


def state_rows(name):
    return model(name)(torch.zeros(1, 2).long())[1][-1]["memory"].numel()


def rope(name):
    assert state_rows(name) == state_rows("simple")
    return ("pairs of channels",)


def released_rope(name):
    return "half of the channels", f"{state_rows(name) / state_rows('simple'):g} times as many rows"


def toeplitz(name):
    return layers.build(name.partition("+")[2], hidden_size=WIDTH, num_heads=HEADS)


def paper_tpe(name):
    layer = toeplitz(name)
    assert layer.kernel.logit.shape == (HEADS,)
    assert not layer.adds
    x, (weight, g) = torch.randn(1, 5, WIDTH), layer.kernel()
    lags = torch.arange(5).view(-1, 1) - torch.arange(5)
    kernel = weight * (g.unsqueeze(-1).unsqueeze(-1) * lags).exp().flatten(1) if name.endswith("paper") else None
    if kernel is not None:
        kernel = kernel.unflatten(-1, (5, 5)) * (lags >= 0)
        expected = torch.einsum("hts,bshd->bthd", kernel, x.unflatten(-1, (HEADS, -1))).flatten(2)
        torch.testing.assert_close(layer(x)[0], expected, rtol=1e-4, atol=1e-5)
    return "one λ per head", "in place of the embeddings"


def released_tpe(name):
    paper_tpe(name)
    layer = toeplitz(name)
    assert {key for key, _ in layer.named_children()} == {"kernel", "norm", "out_proj"}
    weight, g = layer.kernel()
    assert (weight == layer.head_dim).all()
    assert g.exp().tolist() == [0.5] * HEADS
    return "a norm over all heads and a projection", "a, b = 1 and λ = ½ at the start"


def our_tpe(name):
    layer = toeplitz(name)
    assert layer.adds
    assert not layer(torch.randn(1, 3, WIDTH))[0].any()
    return f"{layer.kernel.log_rate.shape[1]} exponentials a head", "added to the embeddings", "embeddings alone"


# -------------------------------------------------------------------------------------------- layers and architectures


def gate_rank(name):
    torch.manual_seed(0)
    layer = mixer(name, hidden_size=512, num_heads=8)
    (own,) = (part for part in layer.modules() if type(part).__name__ == "GateRank")
    gate = own.slow_gate
    rates = gate.A_log.exp()
    assert (gate.num_gates, gate.bias_place) == (8, "after")
    assert 0.01 <= rates.min() < rates.max() <= 1
    f = own.proj(torch.randn(4, 2000, 512))
    kept = sum(gate.taps[:, i] * f[:, i : i + 1997] for i in range(4)) + gate.bias
    share = (kept > 0).float().mean().item()
    assert share == pytest.approx(0.1, abs=0.01)
    return (
        f"{gate.taps.shape[1]} taps", "a gate per head", f"{100 * share:.0f} % resets",
        f"from {gate.SLOWEST:g} to {gate.FASTEST:g}",
    )  # fmt: skip


def ska_options(name):
    return preset(name, **SIZES).hybrid["options"]


def paper_ska(name):
    own = ska_options(name)
    assert (own["mix"], own["query_init"], own["normalization"]) == ("koopman", "own", "paper")
    assert (own["decode_refresh"], own.get("mode", "chunk")) == ("token", "chunk")
    layer = model(name).blocks[1].mixer
    assert isinstance(layer.q_proj, torch.nn.Linear)
    return f"K = {own['power']}", "μ = 1", "decoding by token"


def our_ska(name):
    layer = model(name).blocks[1].mixer
    assert (layer.query_init, layer.options["normalization"]) == ("key", "causal")
    assert not layer.q_proj.weight.any()  # queries are the keys plus x W_q
    assert layer.readout.mix == "learned"
    return f"K = {layer.options['power']}", "learned μ", "queries that start as keys", "a causal norm"


def longhorn(name):
    sizes = {"hidden_size": 128, "num_heads": None} if name == "longhorn" else {}
    layer = mixer(name, **sizes)
    if name == "longhorn":
        return (f"each head of {layer.head_dim} channels",)
    assert mixer(name, hidden_size=WIDTH)(torch.randn(1, 2, WIDTH))[1]["memory"].shape[-1] == 1
    return ("a step ε for each channel",)


def modulus(name):
    mlp = model(name).blocks[0].mlp
    assert isinstance(mlp, KoopmanMLP)
    return mlp


def paper_echo(name):
    assert ska_options(name) == ska_options("mamba2+ska_paper")
    assert "Clamped" in type(modulus(name).eigenvalues).__name__
    return ("moduli clamped at 1",)


def our_echo(name):
    assert ska_options(name) == ska_options("mamba2+ska")
    assert "Clamped" not in type(modulus(name).eigenvalues).__name__
    assert preset(name, **SIZES).hybrid["layers"] == preset("echo_paper", **SIZES).hybrid["layers"]
    return ("sigmoid as modulus",)


def echo_mamba3(name):
    layer = layers.build(name, hidden_size=128, num_heads=4)
    experiment = EXPERIMENTS["echo-transfer"]()
    counts = []
    for each in experiment.models_at("paper"):
        config = experiment.configure(experiment.settings_at("paper", {}), Cell(each, 3e-4, 0)).model
        with torch.device("meta"):
            own = LanguageModel(config)
        uncounted = [part for key, part in own.named_parameters() if ".readout." in key]
        counts.append(number(own.num_parameters() - sum(part.numel() for part in uncounted)))
    per_layer = sum(part.numel() for part in layer.parameters())
    return f"{number(per_layer)} parameters per layer at d = 128", "The three models of §4.1", *counts


def mamba3(name):
    parts = {key.rpartition(".")[0] or key for key, _ in mixer(name).named_parameters()}
    assert not any("conv" in key for key in parts)
    assert any("conv" in key for key, _ in mixer("mamba3_echo").named_parameters())

    def log_decay(rate_floor):
        found = []
        torch.manual_seed(0)
        for _ in range(50):
            layer = layers.build("mamba3", hidden_size=64, num_heads=8, rate_floor=rate_floor)
            layer.decay.register_forward_hook(lambda _, args, out: found.append(out[0].detach()))
            layer(torch.randn(1, 64, 64))
        return torch.cat(found).median().item()

    assert 9 < log_decay(None) / log_decay(1e-4) < 15
    assert mixer("mamba3").rate_floor == mixer("mamba3_mimo").rate_floor == 1e-4
    assert mixer("mamba3+post").rate_floor is mixer("mamba3_mimo+post_norm").rate_floor is None
    return "depends on the input, at least 1e-4", "no convolution", "`mixer.rate_floor=null`", "start at a tenth"


CHECKS = POST | {
    "`simple+dplr`": dplr, "`simple+dplr_released`": released_dplr, "`simple+rope`": rope,
    "`simple+rope_released`": released_rope, "`simple+tpe_paper`": paper_tpe, "`simple+tpe_released`": released_tpe,
    "`simple+tpe`": our_tpe, "`mamba2+gate_rank`": gate_rank, "`mamba2+ska_paper`": paper_ska, "`mamba2+ska`": our_ska,
    "`longhorn_paper`": longhorn, "`longhorn`": longhorn, "`echo_paper`": paper_echo, "`echo`": our_echo,
    "`mamba3_echo`": echo_mamba3, "`mamba3`": mamba3,
}  # fmt: skip


@pytest.mark.parametrize("first", dict.fromkeys((*FORMS, *CHECKS)))
def test_a_form_is_what_its_row_says(first):
    for name in names(first):
        LanguageModel(preset(name, **SIZES))(torch.zeros(1, 3, dtype=torch.long))
    check_row(*FORMS[first], CHECKS[first](*names(first)))
