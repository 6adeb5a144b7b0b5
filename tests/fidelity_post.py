"""What the tests of docs/fidelity.md's forms share, and the checks of its rows about PoST."""

import math
import sys

import pytest
import torch
import torch.nn.functional as F
from fidelity_rows import DOCS

from halflife import LanguageModel, preset

sys.path.insert(0, str(DOCS))
import claims
import differences

T, WIDTH, HEADS = 64, 32, 4
SIZES = {"hidden_size": WIDTH, "num_layers": 2, "vocab_size": 31, "num_heads": HEADS, "train_length": T}


def model(name, **changes):
    torch.manual_seed(0)
    return LanguageModel(preset(name, **SIZES | changes))


def mixer(name, **changes):
    return model(name, **changes).blocks[0].mixer


def options(name):
    return {key: value for key, value in preset(name, **SIZES).to_dict().items() if key != "name"}


def same(one, other):
    """Whether two models of one seed compute the same."""
    ids = torch.arange(9).view(1, 9)
    return torch.equal(model(one)(ids)[0], model(other)(ids)[0])


def number(x, digits=0):
    return f"{x:,.{digits}f}"


def step(post):
    """Δ of a decay under PoST, and whether it is trained."""
    bias = post.decay.dt_bias
    return F.softplus(bias.detach()), isinstance(bias, torch.nn.Parameter)


def fixed_step(name):
    """Δ is fixed at 0.05 in every channel, and rates at rest go from 1/T to 1."""
    post = mixer(name).decay
    size, trained = step(post)
    assert not trained
    assert size.unique().numel() == 1
    ends = (post.base().exp() * size)[[0, -1]].tolist()
    assert ends == pytest.approx([1 / T, 1], rel=1e-4)
    return f"softplus⁻¹({size[0].item():.2f})", "from 1/T to 1"


def trained_step(name):
    """Δ is trained, and starts with the rates as in the paper's form."""
    post, paper = (mixer(f"{name}+{form}").decay for form in ("post", "post_paper"))
    assert step(post)[1]
    assert torch.equal(post.base(), paper.base())
    assert torch.equal(step(post)[0], step(paper)[0])
    return ("Δ is trained",)


def assert_level_on_text(file, base):
    """On text of no length a fixed Δ is significantly better or worse."""
    for length in (512, 1024, 2048, 4096, 8192):
        over = claims.Files().perplexity_over(file, f"{base}:frozen", f"{base}:post", length)
        assert len(over) == 5
        assert not differences.significant(over - 1)


def on_recall(file, base, length, pairs):
    """Points of accuracy that a fixed Δ gains, and whether the gain is significant."""
    forms = (f"{base}:{form}" for form in ("frozen", "post"))
    fixed, free = (claims.Files().accuracy(file, form, "capacity", length, pairs) for form in forms)
    return 100 * (fixed - free).mean(), differences.significant(fixed - free)


def mamba2_post(*_):
    points, significant = on_recall("post_parts_mqar.csv", "mamba2", 64, 16)
    assert not significant
    assert_level_on_text("post_parts_text.csv", "mamba2")
    return *trained_step("mamba2"), "is level on [text]", f"the {number(points)} points", "not significant"


def delta_post(*_):
    for length, pairs in ((64, 16), (128, 32)):
        assert not on_recall("post_parts_gated_deltanet.csv", "gated_deltanet", length, pairs)[1]
    assert_level_on_text("post_parts_text_gated_deltanet.csv", "gated_deltanet")
    return *trained_step("gated_deltanet"), "level on recall and text"


def delta_released(name):
    post = mixer(name, num_heads=16).decay
    size, trained = step(post)
    assert trained
    assert 1e-3 <= size.min() < 5e-3 < 2e-2 < size.max() <= 0.1
    ends = post.base().exp()[[0, -1]].tolist()
    assert ends == pytest.approx([1, T], rel=1e-4)
    middle = math.sqrt(1e-3 * 0.1)
    return "e^p goes from 1 to T", "in [0.001, 0.1]", f"about {middle:g} to {middle:g} T"


def retention(gla, retnet):
    """One model, whose decay no input changes."""
    assert same(gla, retnet)
    post = mixer(gla).decay
    position = torch.arange(1, 4)
    for f in (torch.zeros(1, 3, HEADS), torch.randn(1, 3, HEADS)):
        torch.testing.assert_close(post(f, position=torch.ones_like(position))[0, 0], -post.base().exp())
    assert not hasattr(post.decay, "dt_bias")
    return ("one model",)


def released_retention(gla, retnet):
    assert same(gla, retnet)
    post = mixer(gla).decay
    assert step(post)[1]
    assert post.shape == (HEADS, WIDTH // HEADS)
    return "one model", "e^p from {:.0f} to {:.0f}".format(*post.base().exp()[[0, -1]].tolist())


def our_retention(gla, retnet):
    one, other = mixer(gla), mixer(retnet)
    assert one.head_dim * HEADS * 2 == WIDTH
    assert other.value_dim == 2 * other.head_dim
    assert model(retnet).blocks[0].mixer.position == "rope"
    paper = mixer("retnet+post_paper").decay
    for own in (one.decay, other.decay):
        torch.testing.assert_close(own.base(), paper.base())
    return "Algorithm 4", "keys of half size", "values of twice the size"


def rwkv7_paper(name):
    scales = mixer(name).decay.timescales(1).flatten()
    slow, fast = scales.max().item(), scales.min().item()
    assert slow == pytest.approx(T, rel=1e-4)
    assert fast == pytest.approx(1 / (math.exp(-0.5) * torch.tensor(0.5).sigmoid().item()), rel=1e-4)
    assert not hasattr(mixer(name).decay.decay, "dt_bias")
    return ("from 1/(e^{−1/2} σ(0.5)) to T",)


def rwkv7_released(name):
    assert same(name, "rwkv7+post_paper")
    return (f"{mixer(name).decay.learning_rate_factor:.0f} times the learning rate",)


def theorem(name):
    """t^α at every t, and equal gaps at T for every reference length and spectrum."""
    post = mixer(name).decay
    for t in (2, 9, T):
        torch.testing.assert_close(post.timescales(t).flatten(), t ** post.taper(), rtol=1e-4, atol=0)
    for reference in (1, 8, T):
        own = mixer("mamba2+post", mixer_options={"post": {"reference_length": reference}}).decay
        with torch.no_grad():
            own.delta += 0.1 * torch.randn_like(own.delta)
        gaps = own.timescales(T).flatten().log().diff()
        assert gaps.max() - gaps.min() < 1e-3
    return ("τ_k(t) = t^{α_k}",)


def released_mamba2(name):
    assert options(name) == options("mamba2+post_paper")
    return ("the options of `post_paper`",)


def delta_paper(name):
    fixed_step(name)
    return ("as Mamba-2",)


def our_rwkv7(name):
    assert same(name, "rwkv7+post_paper")
    return ("as printed",)


POST = {
    "`mamba2+post_paper`": fixed_step, "`mamba2+post_released`": released_mamba2, "`mamba2+post`": mamba2_post,
    "`gated_deltanet+post_paper`": delta_paper, "`gated_deltanet+post_released`": delta_released,
    "`gated_deltanet+post`": delta_post, "`gla+post_paper`, `retnet+post_paper`": retention,
    "`gla+post_released`, `retnet+post_released`": released_retention, "`gla+post`, `retnet+post`": our_retention,
    "`rwkv7+post_paper`": rwkv7_paper, "`rwkv7+post_released`": rwkv7_released, "`rwkv7+post`": our_rwkv7,
    "`mamba2+post_norm`": theorem,
}  # fmt: skip
