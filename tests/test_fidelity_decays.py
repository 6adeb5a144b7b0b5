"""Every row of the table of decays in docs/fidelity.md: its decay is built, and its formula and numbers are checked."""

import pytest
import torch
import torch.nn.functional as F
from fidelity_rows import check_row, names, rows

from halflife import LanguageModel, decay, preset
from halflife.decay import DECAYS
from halflife.lab.experiments.decay_rows import row_or_preset

LAWS = rows("Decays")
f = torch.linspace(-4, 4, 24).view(1, 6, 4)


def built(name, heads=4, **sizes):
    return decay.build(name, num_heads=heads, head_dim=2, **sizes)


def shown(name, heads=4, layer=0, depth=1):
    """λ of the heads of a decay without inputs."""
    law = built(name, heads, layer_idx=layer, num_layers=depth)
    return law(torch.zeros(1, 1, heads)).detach().exp().flatten()


def gla(name):
    torch.testing.assert_close(built(name)(f).exp(), f.sigmoid() ** (1 / 16))
    return "σ(f)^{1/16}", f"λ is {shown(name)[0].item():.3f} at f = 0"


def released_gla(name):
    torch.testing.assert_close(built(name)(f).exp(), (f / 16).sigmoid())
    return "σ(f/16)", f"{shown(name)[0].item():g}"


def tnl(name):
    j = torch.arange(1, 13) / 12
    for layer in (0, 5, 11):
        torch.testing.assert_close(shown(name, 12, layer, 12), (-8 * j * (1 - layer / 12)).exp())
    median = shown(name, 12, 0, 12).quantile(0.5).item()
    assert median < 0.1  # which is not close to 1
    return (
        "exp(−8 (j/h) (1 − l/L))",
        'the text says "close to 1"',
        f"with 12 heads and layers the median λ of layer 0 is {median:.2g}",
    )


def released_tnl(name):
    slopes = torch.logspace(-1, -8, 12, base=2)
    for layer in (0, 5, 11):
        torch.testing.assert_close(shown(name, 12, layer, 12), (-slopes * (1 - layer / 11 + 1e-5)).exp())
    assert slopes[[0, -1]].tolist() == [1 / 2, 1 / 256]
    assert all((shown(name, 12, layer, 12) < 1).all() for layer in range(12))
    median = f"{shown(name, 12, 0, 12).quantile(0.5).item():.2f}"
    return "exp(−s_j (1 − l/(L−1) + 10⁻⁵))", "from 1/2 to 1/256", f": {median}.", "layers count from 1", "λ > 1; ours"


def learned_tnl(name):
    """The log-rates are learned, and no layer starts at λ = 1."""
    for layer in range(12):
        law = built(name, 12, layer_idx=layer, num_layers=12)
        assert [key for key, _ in law.named_parameters()] == ["log_rate"]
        torch.testing.assert_close(shown(name, 12, layer, 12), shown("tnl", 12, layer, 12))
        assert (shown(name, 12, layer, 12) < 1).all()
    return "a learned log-rate, from `tnl`", "Layers count from 0", "does not start at λ = 1"


def released_learned_tnl(name):
    law = built(name, 12, layer_idx=11, num_layers=12)
    torch.testing.assert_close(shown(name, 12, 3, 12), shown("tnl_released", 12, 3, 12))
    away = 1 - law(torch.zeros(1, 1, 12, dtype=torch.float64)).exp().min().item()
    with torch.no_grad():
        law.rate.neg_()
    assert (law(torch.zeros(1, 1, 12)) <= 0).all()
    size = f"{away * 1e6:.0f}·10⁻⁶"
    return f"starts at λ = 1 − {size}", "Where the authors' λ exceeds 1", "exp(−|r|)"


def hgrn2(name):
    counts, parameters = {"": 0, ":released": 0}, {}
    for form in counts:
        with torch.device("meta"):
            sizes = {"hidden_size": 2048, "num_layers": 24, "num_heads": 32, "vocab_size": 31, "train_length": 16}
            parameters[form] = LanguageModel(row_or_preset(f"vector/hgrn2{form}", **sizes)).named_parameters()
        counts[form] = sum(part.numel() for key, part in parameters[form] if "bound_logits" in key)
    assert all(text in LAWS["`hgrn2`"][1] for text in ("24 layers", "2,048"))
    if name == "hgrn2_released":
        return ("one table", f"for all layers: {counts[':released']:,}")
    law = built(name, layer_idx=1, num_layers=4)
    torch.testing.assert_close(law(f).exp(), 0.25 + 0.75 * f.sigmoid())
    return "γ + (1 − γ) σ(f)", f"{counts['']:,} numbers with 24 layers of width 2,048"


def keys(name):
    """The shared key of a decay of one layer, and its λ and the inputs."""
    law = built(name, granularity="vector")
    x = 8 + torch.randn(1, 5, *law.shape)  # above every Δ
    parts = law(x, parts=True)
    return law.shared_key(x, parts, None, None), parts.g.exp(), x, law


def shared_mamba2(_):
    key, decays, _, _ = keys("mamba2")
    torch.testing.assert_close(key, 1 - decays)
    return ("1 − λ",)


def released_mamba2(name):
    key, _, x, law = keys(name)
    torch.testing.assert_close(key, F.softplus(x + law.dt_bias))
    assert key.max() > 1
    return "softplus(f + Δ)", "can exceed 1"


def lightnet(name):
    """λ against sums of exponentials; that which is printed has f_{<t−1} over f_{<t}, without f_t."""
    sums = f.exp().cumsum(1)
    expected = torch.cat([torch.zeros_like(sums[:, :1]), sums[:, :-1] / sums[:, 1:]], 1)
    torch.testing.assert_close(built(name)(f).exp(), expected)
    return "λ_t = exp(lse f_{<t} − lse f_{≤t})", "0 at the first token", "f_{<t−1} and f_{<t}"


def released_lightnet(name):
    key, decays, x, _ = keys(name)
    sums = 1 + x.exp().cumsum(1)
    torch.testing.assert_close(decays[:, 0], (-x[:, 0]).sigmoid())
    torch.testing.assert_close(decays[:, 1:], sums[:, :-1] / sums[:, 1:])
    torch.testing.assert_close(key[:, 1:], x[:, :-1].exp() / sums[:, 1:])
    return "lse = 0 before", "λ is σ(−f)", "exp(f_{t−1} − lse f_{≤t})", "weighs f_{t−1}"


def slowest(name):
    return round(1 / (1 - shown(name, 8).double().max().item()))


def paper_retnet(name):
    torch.testing.assert_close(shown(name, 8), 1 - 2.0 ** (-5 - torch.arange(8.0)))
    return "1 − 2^{−5−j}", f"with 8 heads the slowest time-scale is {slowest(name):,} tokens"


def retnet(name):
    torch.testing.assert_close(shown(name, 8), 1 - 2.0 ** (-5 - 3 * torch.arange(8.0) / 7))
    assert [heads for heads in range(2, 9) if torch.allclose(shown(name, heads), shown("retnet_paper", heads))] == [4]
    return "1 − 2^{−5−3j/(h−1)}", f": {slowest(name)}, and equal for 4 heads alone"


def start(name, rate_start, heads=64):
    rates = built("mamba2", heads, **({"rate_start": rate_start} if rate_start else {})).A_log.exp()
    if name == "gated_deltanet":
        assert preset(name, hidden_size=32, num_layers=2, vocab_size=9).mixer == name
    return rates


def our_start(name):
    rates = start(name, "")
    assert 1 <= rates.min() < 3 < 14 < rates.max() <= 16
    return ('`rate_start="uniform_1_16"`',)


def post_start(name):
    torch.testing.assert_close(start(name, "s4d_real", 4), torch.tensor([1.0, 2, 3, 4]))
    return '`rate_start="s4d_real"`', "k + 1 in channel k"


def fla_start(name):
    rates = start(name, "uniform_0_16")
    assert 0 <= rates.min() < 1
    assert 14 < rates.max() <= 16
    return ('`rate_start="uniform_0_16"`',)


CHECKS = {
    "`gla`": gla, "`gla_released`": released_gla, "`tnl`": tnl, "`tnl_released`": released_tnl, "`tnl_l`": learned_tnl,
    "`tnl_l_released`": released_learned_tnl, "`hgrn2`": hgrn2, "`hgrn2_released`": hgrn2,
    "`mamba2`, shared keys": shared_mamba2, "`mamba2_released`": released_mamba2, "`lightnet`": lightnet,
    "`lightnet_released`": released_lightnet, "`retnet_paper`": paper_retnet, "`retnet`": retnet,
    "`mamba2`, A": our_start, "`mamba2`, A of PoST": post_start, "`gated_deltanet`, A": fla_start,
}  # fmt: skip


@pytest.mark.parametrize("first", dict.fromkeys((*LAWS, *CHECKS)))
def test_a_decay_is_what_its_row_says(first):
    (name,) = names(first)
    assert name in DECAYS or name == "gated_deltanet"
    torch.manual_seed(0)
    check_row(*LAWS[first], CHECKS[first](name))
