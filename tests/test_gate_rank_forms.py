"""GateRank as its paper prints it: Eqs. 8 and 10 to 12 against literal token loops, in float64."""

from pathlib import Path

import pytest
import torch
from helpers import assert_close, assert_raises, assert_streams, cases

import halflife
from halflife.lab.experiments import EXPERIMENTS
from halflife.layers import GateRank
from halflife.layers.memory.gate_rank import SlowGate
from halflife.ops import gate_rank
from halflife.packing import Packing

DOCS = Path(__file__).parent.parent / "docs"
SIZES = {"hidden_size": 32, "num_layers": 2, "vocab_size": 31, "num_heads": 4, "train_length": 16}


def inputs(length=11):
    q, k = torch.randn(2, 2, length, 3, 4, dtype=torch.float64)
    v = torch.randn(2, length, 3, 5, dtype=torch.float64)
    g_slow, g_fast = -torch.rand(2, 2, length, 3, dtype=torch.float64)
    return {"q": q, "k": k, "v": v, "g_slow": torch.where(torch.rand(2, length, 3) < 0.3, g_slow, 0), "g_fast": g_fast}


def printed(q, k, v, g_slow, g_fast, states=None):
    """Eqs. 10 to 12, token by token and head by head."""
    outputs = torch.zeros_like(v)
    fast, slow = (torch.zeros(2, 3, 4, 5, dtype=torch.float64) for _ in range(2)) if states is None else states
    fast, slow = fast.clone(), slow.clone()
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            for t in range(q.shape[1]):
                new = torch.outer(k[b, t, h], v[b, t, h])
                reset = g_slow[b, t, h] != 0
                fast[b, h] = (0 if reset else g_fast[b, t, h].exp() * fast[b, h]) + new
                slow[b, h] = g_slow[b, t, h].exp() * slow[b, h] + (fast[b, h] if reset else 0)
                outputs[b, t, h] = q[b, t, h] @ (slow[b, h] + fast[b, h])
    return outputs, (fast, slow)


def test_printed_reset_law():
    """The token of a reset is counted twice, and older fast content is lost."""
    x = inputs()
    expected, (fast, slow) = printed(**x)

    def run(x, states):
        options = {"scale": 1, "output_final_state": True, "chunk_size": 4, "reset_law": "printed"}
        return gate_rank(**x, initial_state=states, **options)

    o, states = run(x, None)
    assert_close(o, expected, 1e-13)
    assert_close(dict(zip("fs", states, strict=True)), {"f": fast, "s": slow}, 1e-13)
    assert_streams(run, x, 1e-13)
    gain = torch.rand_like(x["g_fast"])
    o, _ = gate_rank(**x, gain=gain, scale=1, reset_law="printed")
    assert_close(o, printed(**{**x, "v": gain.unsqueeze(-1) * x["v"]})[0], 1e-13)
    mask, _ = gate_rank(**x, scale=1)
    assert not torch.allclose(mask, expected, atol=0.1)


def test_printed_reset_law_is_for_the_linear_update():
    x = inputs()
    assert_raises(ValueError, "linear update", gate_rank, **x, beta=torch.ones(2, 11, 3).double(), reset_law="printed")
    assert_raises(ValueError, "unknown reset_law 'mark'", gate_rank, **x, reset_law="mark")
    for name in ("gated_deltanet+gate_rank", "mamba3+gate_rank"):
        with pytest.raises(ValueError, match=r"linear update|previous token"):
            halflife.preset(name, **SIZES, mixer_options={"gate_rank": {"reset_law": "printed"}})


def test_printed_gate():
    """Eq. 8, log α = −A relu(ShortConv(W x + b)); here one number per layer, A in [1, 16] and b = 0 at the start."""
    gate = GateRank(32, 4, gates="layer", bias="before", reset_rate=0.5, rate_start="uniform_1_16").double()
    assert gate.slow_gate.bias.item() == 0
    assert 1 <= gate.slow_gate.A_log.exp().item() <= 16
    torch.nn.init.constant_(gate.slow_gate.bias, 0.3)
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    g, state = gate.slow_gate(gate.proj(x), None, Packing(*x.shape[:2]))
    assert (g.shape, state.shape) == ((2, 9, 4), (2, 1, 3))
    f = gate.proj(x)[..., 0] + 0.3
    for b in range(2):
        for t in range(9):
            conv = sum(gate.slow_gate.taps[0, 3 - i] * f[b, t - i] for i in range(4) if t >= i)
            expected = -gate.slow_gate.A_log.exp() * conv.clamp(min=0)
            assert_close(g[b, t], expected.expand(4), 1e-12)


def test_what_a_reset_keeps_at_mamba2s_rates():
    """The page has the median over gates and tokens. Gates of 4,000 draws of A stand for one gate a layer."""
    gate = SlowGate(4000, 0.5, 4, rate_start="uniform_1_16")
    g, _ = gate(torch.randn(1, 30, 4000), None, Packing(1, 30))
    assert (g != 0).float().mean().item() == pytest.approx(0.5, abs=0.01)
    kept = g[g != 0].exp().median().item()
    assert f"keep {kept:.0%} of".replace("%", " %") in (DOCS / "gate-rank.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["mamba2+gate_rank", "gated_deltanet+gate_rank"])
def test_one_gate_per_layer(name):
    """It streams, and its op is the mask's."""
    options = {"gate_rank": {"gates": "layer", "bias": "before", "reset_rate": 0.5, "rate_start": "uniform_1_16"}}
    model = halflife.LanguageModel(halflife.preset(name, **SIZES, mixer_options=options)).double()
    ids = torch.randint(31, (2, 12))
    whole, _ = model(ids)
    first, state = model(ids[:, :5])
    assert_close(torch.cat([first, model(ids[:, 5:], state)[0]], 1), whole, 1e-12)
    gates = [module for module in model.modules() if isinstance(module, GateRank)]
    assert [gate.proj.out_features for gate in gates] == [1, 1]
    assert {gate.reset_law for gate in gates} == {"mask"}


def test_no_form_is_called_the_papers():
    """The paper gives neither the number of gates nor the initial bias and rate; the error names the form that is."""
    assert_raises(ValueError, "Did you mean 'gate_rank'", halflife.preset, "mamba2+gate_rank_paper", **SIZES)
    assert EXPERIMENTS["gate-rank-lm"]().models_at("paper")[1] == "mamba2+gate_rank"


@cases(
    "options, message",
    ({"gates": "heads"}, "Did you mean 'head'"),
    ({"bias": "inside"}, "unknown bias"),
    ({"rate_start": "uniform"}, "unknown rate_start"),
    ({"bias": "before", "reset_rate": 0.1}, "reset_rate 0.5"),
)
def test_errors_say_what_is_wrong(options, message):
    assert_raises(ValueError, message, SlowGate, 2, **{"reset_rate": 0.5, "conv_size": 4, **options})
