"""Every layer is the same function of each sequence if it is cut, padded or packed, and it trains in any dtype."""

import pytest
import torch
from helpers import assert_close, assert_packs, assert_pads, assert_raises, assert_same, assert_streams
from pairwise import slow_beyond

from halflife import LanguageModel, layers, preset
from halflife.layers import LAYERS
from halflife.ops.backends import dispatch, native
from halflife.precision import Float32Module

HIDDEN, LENGTH = 32, 11

# Four times the worst measured error, relative to the largest entry: bfloat16 weights and activations, and float64.
BFLOAT16, EXACT = 4 * 1.6e-2, 4 * 6e-14
RIDGE = 4 * 1e-10  # the Koopman operators of a few keys have the condition number 1/ε

# Small options for layers with large defaults. All other layers are built with their defaults.
SMALL = {
    "mamba2": {"state_size": 8, "num_groups": 2},
    "mamba3": {"state_size": 8, "num_groups": 2},
    "attention": {"num_kv_heads": 2},
    "ska": {"rank": 5, "mix": "learned"},
}
POST = {"post": {"train_length": 16}}

# Every registered layer, and other parts of layers that must survive cutting and packing.
CASES = {name: (name, SMALL.get(name, {})) for name in LAYERS}
CASES |= {
    f"{name}+post": (name, {**SMALL.get(name, {}), **POST})
    for name in ("mamba2", "gated_deltanet", "retnet", "rwkv7", "linear")
}
CASES |= {
    "mamba3+post": ("mamba3", {**SMALL["mamba3"], "rate_floor": None, **POST}),
    "lightnet": ("linear", {"decay": "lightnet", "share_keys": True}),
    "hgrn2": ("linear", {"decay": "hgrn2", "share_keys": True, "layer_idx": 1, "num_layers": 3}),
    "vector+rope": ("linear", {"position": "rope", "conv_size": 4}),
    "vector+delta": ("linear", {"update": "delta", "gate": "none"}),
    "attention+window": ("attention", {"window": 4, "num_kv_heads": 2}),
    "fox+window": ("fox", {"window": 4}),
    "ska+token": ("ska", {**SMALL["ska"], "refresh": "token"}),
    "ska+cg": ("ska", {**SMALL["ska"], "rank": 6, "lift": "cg"}),
}
# Options that models of other libraries have. These cases take the time of the slow tests.
RELEASED = {
    "mamba2+before": ("mamba2", {**SMALL["mamba2"], "output_norm": "before_gate", "decay_options": {"min_step": 0.05}}),
    "mamba2+head_norm": ("mamba2", {**SMALL["mamba2"], "norm_per_head": True}),
    "mamba2+ungated": ("mamba2", {**SMALL["mamba2"], "output_norm": "none", "decay_options": {"max_step": 0.02}}),
    "mamba3+rate": ("mamba3", {**SMALL["mamba3"], "rate_floor": None, "output_norm": True}),
    "mamba3+mimo": ("mamba3", {**SMALL["mamba3"], "output_norm": True, "rank": 2}),
    "attention+gate": (
        "attention",
        {"head_dim": 12, "qk_norm": "head_plus_one", "gate": True, "rope_fraction": 0.5, "num_kv_heads": 2},
    ),
    "attention+all": ("attention", {"qk_norm": "all", "window": 4, "position": "none"}),
    "gla+map": ("gla", {"feature_map": "relu", "conv_size": 4}),
}
CASES |= RELEASED


def exact(case):
    return RIDGE if case.startswith("ska") else EXACT


each_layer = pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case in RELEASED)) for case in CASES]
)


def build(case, **options):
    name, own = CASES[case]
    chunked = {} if name in ("attention", "fox") else {"chunk_size": 4}  # several chunks in a short sequence
    return wake(layers.build(name, hidden_size=HIDDEN, **{**chunked, **own, **options}))


def wake(layer):
    """Add noise to parameters that start at zero. Otherwise a zero output map (RWKV-7) would pass every test."""
    with torch.no_grad():
        for parameter in layer.parameters():
            if not parameter.any():
                parameter.normal_(std=0.1)
    return layer


def inputs(batch=2, length=LENGTH, dtype=torch.float64):
    return torch.randn(batch, length, HIDDEN, dtype=dtype)


def gradient_inputs(batch, length):
    return inputs(batch, length).requires_grad_()


def slow_down(layer):
    """Make memory last, so that a leak from one sequence to another is visible."""
    slow = {"A_log": -9.0, "theta": -12.0, "decay.delta": 9.0, "decay.logit": -9.0}
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            for ending, value in slow.items():
                if name.endswith(ending):
                    parameter.fill_(value)
    return layer


@each_layer
def test_streams_like_the_full_pass(case):
    assert_streams(build(case).double(), inputs(), exact(case), cuts=(0, 1, 3, 4, 6, 9, LENGTH))


@each_layer
def test_gradients_flow_through_the_state(case):
    layer, x = build(case).double(), inputs().requires_grad_()
    weights = torch.randn_like(x)
    (whole,) = torch.autograd.grad((layer(x)[0] * weights).sum(), x)
    first, state = layer(x[:, :5])
    cut = torch.cat([first, layer(x[:, 5:], state)[0]], 1)
    assert_close(torch.autograd.grad((cut * weights).sum(), x)[0], whole, exact(case))


@each_layer
def test_the_callers_state_is_not_changed(case):
    layer = build(case)
    _, state = layer(inputs(dtype=torch.float32))
    before = {name: x.clone() for name, x in state.items()}
    layer(inputs(length=3, dtype=torch.float32), state)
    assert state.keys() == before.keys()
    assert_same(state, before)


@each_layer
def test_continues_a_state_of_another_dtype(case):
    """As that of a prompt that was read without autocast."""
    layer, x = build(case).double(), inputs()
    _, state = layer(x[:, :5])
    expected, _ = layer(x[:, 5:], state)
    found, _ = layer.float()(x[:, 5:].float(), state)
    assert_close(found, expected, 1e-3)


@each_layer
def test_shortest_sequences(case):
    for length in (0, 1):
        y, state = build(case)(inputs(length=length, dtype=torch.float32))
        assert y.shape == (2, length, HIDDEN)
        assert y.isfinite().all()
        assert state["position"].tolist() == [length] * 2


@pytest.mark.parametrize("case", ["retnet", "vector+rope"])
def test_rope_depends_on_distance_alone(case):
    """This holds for a vector decay too, because the two channels of a rotated pair share a decay."""
    layer, x = build(case).double(), inputs()
    _, nothing = layer(x[:, :0])
    later = {**nothing, "position": nothing["position"] + 1000}
    assert_close(layer(x, later)[0], layer(x, nothing)[0], exact(case))


@each_layer
def test_packed_equals_separate(case):
    state, _ = assert_packs(build(case).double(), gradient_inputs, exact(case))
    assert state["position"].tolist() == [7, 3, 1, 8]


@each_layer
def test_packed_documents_do_not_leak(case):
    """With a slow decay, other documents change no bit of an output. The gradient across is exactly 0."""
    layer = slow_down(build(case))
    x, bounds = inputs(batch=1, length=18, dtype=torch.float32), torch.tensor([0, 6, 11, 18])
    before, _ = layer(x, cu_seqlens=bounds)
    changed = x.clone()
    changed[:, 6:11] += 1
    changed.requires_grad_()
    after, _ = layer(changed, cu_seqlens=bounds)
    others = [*range(6), *range(11, 18)]
    assert_same(after[:, others], before[:, others])
    assert not torch.equal(after[:, 6:11], before[:, 6:11])
    (grad,) = torch.autograd.grad(after[:, others].sum(), changed)
    assert grad[:, 6:11].count_nonzero() == 0


@each_layer
def test_nothing_looks_ahead(case):
    layer, x = slow_down(build(case)), inputs(dtype=torch.float32)
    before, _ = layer(x)
    x[:, 6:] += 1
    after, _ = layer(x)
    assert_same(after[:, :6], before[:, :6])


@each_layer
@pytest.mark.parametrize("side", slow_beyond(["left"], ["left", "right"]))
def test_padding_changes_nothing(case, side):
    state = assert_pads(build(case).double(), gradient_inputs, side, exact(case))
    assert state["position"].tolist() == [7, 3, LENGTH + 3]


@each_layer
def test_a_full_mask_is_no_mask(case):
    layer, x = build(case).double(), inputs()
    assert_close(layer(x, attention_mask=torch.ones(2, LENGTH))[0], layer(x)[0], exact(case))


@each_layer
def test_every_parameter_learns(case):
    layer = build(case)
    y, state = layer(inputs(dtype=torch.float32))
    (y.square().sum() + state.get("memory", y).sum()).backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


def float32_parameters(layer):
    """Return the parameters and buffers of the modules that must stay in float32."""
    kept = [module for module in layer.modules() if isinstance(module, Float32Module)]
    return [x for module in kept for x in (*module.parameters(), *module.buffers())]


@each_layer
def test_bfloat16(case):
    """Weights are bfloat16; decays, D and the state stay float32. The result is close to that of float32."""
    layer, x = build(case), inputs(dtype=torch.bfloat16)
    exact, _ = layer(x.float())
    layer.bfloat16()
    assert all(parameter.dtype == torch.float32 for parameter in float32_parameters(layer))
    kept = {id(x) for x in float32_parameters(layer)}
    assert all(p.dtype == torch.bfloat16 for p in layer.parameters() if id(p) not in kept)
    y, state = layer(x)
    assert y.dtype == torch.bfloat16
    assert state.get("memory", torch.zeros(())).dtype == torch.float32
    assert_close(y, exact, BFLOAT16)
    y.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())


@each_layer
def test_autocast(case, monkeypatch):
    def recorded(call, backend):
        if "q" in call.tensors:
            dtypes.append({x.dtype for name in native.MATRICES if (x := call.get(name)) is not None})
        return choose(call, backend)

    dtypes, choose = [], dispatch.implementation_of
    monkeypatch.setattr(dispatch, "implementation_of", recorded)
    layer, x = build(case), inputs(dtype=torch.float32)
    exact, _ = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        y, state = layer(x)
        y, state = layer(x, state)  # a state that was computed under autocast is accepted
        y, _ = layer(x)
    assert all(len(each) == 1 for each in dtypes)  # otherwise no fast kernel takes the call
    assert state.get("memory", torch.zeros(())).dtype == torch.float32
    assert_close(y, exact, BFLOAT16)
    y.sum().backward()
    assert all(parameter.grad.dtype == parameter.dtype for parameter in layer.parameters())


@each_layer
def test_either_packed_or_padded(case):
    with pytest.raises(ValueError, match="not both"):
        build(case)(inputs(batch=1), cu_seqlens=torch.tensor([0, LENGTH]), attention_mask=torch.ones(1, LENGTH))


@each_layer
def test_inputs_that_do_not_fit_are_errors(case):
    layer, x = build(case), inputs(dtype=torch.float32)
    for arguments, message in (
        ({"attention_mask": torch.ones(2, LENGTH + 1)}, "attention_mask must be"),
        ({"cu_seqlens": torch.tensor([0, LENGTH])}, "batch size 1"),
        ({"x": x[:1], "cu_seqlens": torch.tensor([0, 5])}, "rise from 0"),
        ({"x": x[0]}, r"x must be \[B, T, D\]"),
        ({"x": torch.zeros(3, 1, HIDDEN), "state": layer(x)[1]}, "state has 2 sequences, but the input has 3"),
    ):
        assert_raises(ValueError, message, layer, **{"x": x, **arguments})


@pytest.mark.parametrize("name", ["lightnet", "mamba2+ska", "mamba2+log_linear"])
def test_no_sequences_are_fine(name):
    """Whole and packed, without a state and with one."""
    model = LanguageModel(preset(name, hidden_size=32, num_layers=2, vocab_size=16)).eval()
    ids, state = torch.zeros(0, 5, dtype=torch.long), None
    for mask in (None, torch.zeros(0, 5)):
        logits, state = model(ids, attention_mask=mask)
        assert logits.shape == (0, 5, 16)
        assert model(ids, state, attention_mask=mask)[0].shape == (0, 5, 16)
