"""Every point of the design space builds and runs, or is an error that says why."""

import pytest
import torch

from halflife import decay, layers
from halflife.layers import LAYERS


@pytest.mark.parametrize("name", [*decay.DECAYS, None])
@pytest.mark.parametrize("granularity", ["scalar", "vector"])
@pytest.mark.parametrize("update", ["linear", "delta"])
@pytest.mark.parametrize("share_keys", [False, True])
@pytest.mark.parametrize("position", ["none", "rope"])
@pytest.mark.parametrize("post", [None, {"train_length": 16}], ids=["", "post"])
def test_every_combination_runs_or_says_why_not(name, granularity, update, share_keys, position, post):
    def build():
        return layers.build(
            "linear", hidden_size=16, num_heads=2, decay=name, granularity=granularity, update=update,
            share_keys=share_keys, position=position, post=post,
        )  # fmt: skip

    strategy = decay.DECAYS[name] if name else None
    impossible = None
    if share_keys and (strategy is None or granularity == "scalar"):
        impossible = "share_keys writes k = 1 − λ.*needs a vector decay"
    elif strategy and granularity not in strategy.granularities:
        impossible = "is defined for granularity scalar; got 'vector'"
    elif post and not (strategy and strategy.spectral):
        impossible = "no base rates" if strategy else "a layer without a decay has none"
    if impossible:
        with pytest.raises(ValueError, match=impossible):
            build()
        return
    layer = build()
    x = torch.randn(2, 5, 16, requires_grad=True)
    y, _ = layer(x)
    y.sum().backward()
    assert y.isfinite().all()
    assert all(part.grad.isfinite().all() for part in (x, *layer.parameters()))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("liner", {}, "Did you mean 'linear'"),
        ("linear", {"num_heads": 5}, "num_heads must divide hidden_size"),
        ("attention", {"num_heads": 5}, "num_heads must divide hidden_size"),
        ("attention", {"num_kv_heads": 3}, "must divide"),
        ("mamba2", {"num_groups": 3}, "num_groups must divide num_heads"),
        ("mamba2", {"decay": "simple"}, "design-space block"),
        ("linear", {"granularity": "scalar", "share_keys": True}, "needs a vector decay"),
        ("linear", {"gate": "tanh"}, "unknown gate 'tanh'.*low_rank, swish, none"),
        ("linear", {"update": "dplr"}, "unknown update 'dplr'.*linear, delta"),
        ("linear", {"position": "alibi"}, "unknown position 'alibi'.*none, rope"),
        ("linear", {"activation": "relu"}, "unknown activation"),
        ("linear", {"decay": "simpel"}, "Did you mean 'simple'"),
        ("linear", {"decay": None, "post": {"train_length": 16}}, "without a decay"),
        ("linear", {"decay": "gla", "post": {"train_length": 16}}, "no base rates"),
        ("linear", {"position": "rope", "head_dim": 5}, "even"),
        ("retnet", {"head_dim": 5}, "even"),
        ("attention", {"num_heads": 32}, "even"),
    ],
)
def test_options_without_meaning_are_errors(name, options, message):
    with pytest.raises(ValueError, match=message):
        layers.build(name, hidden_size=32, **options)


@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_says_what_it_is(name):
    assert len(LAYERS.summary(name)) > 20
