"""Models of the papers' sizes have the numbers of parameters that the papers print, and controls have equal sizes."""

import dataclasses

import pytest
import torch
from helpers import assert_raises, cases

from halflife import SIZES, LanguageModel, layers, preset
from halflife.lab.experiments import EXPERIMENTS, compare
from halflife.models.controls import SIZE_TOLERANCE, control, split_control
from halflife.ops.backends import triton
from halflife.runs.sweep import Cell

DECAY = [size for size in SIZES if size.startswith("decay")]


def billions(size, name="simple", **options):
    with torch.device("meta"):
        return LanguageModel(preset(name, **SIZES[size], mixer_options=options)).num_parameters() / 1e9


SCALAR, VECTOR = {"granularity": "scalar"}, {"granularity": "vector"}
# Source: Decay, Tables 2 and 6 to 9, column "Pa".
COUNTS = [
    ("vector/mamba2", "simple", {"decay": "mamba2", **VECTOR}, (0.16, 0.42, 1.45)),
    ("vector/hgrn2", "simple", {"decay": "hgrn2", **VECTOR}, (0.16, 0.42, 1.45)),
    ("share/gla", "simple", {"decay": "gla", **VECTOR, "share_keys": True}, (0.16, 0.41, 1.45)),
    ("share/hgrn2:released", "simple", {"decay": "hgrn2_released", **VECTOR, "share_keys": True}, (0.16, 0.41, 1.45)),
    ("simple", "simple", {}, (0.16, 0.42, 1.45)),
    ("scalar/gla", "simple", {"decay": "gla", **SCALAR}, (0.16, 0.42, 1.45)),
    ("scalar/tnl", "tnl", {}, (0.16, 0.41, 1.45)),
    ("tpe/tnl", "tnl+tpe_released", {}, (0.16, 0.42, 1.45)),
    ("dplr/none", "simple", {"decay": None, **SCALAR, "update": "dplr"}, (0.16, 0.42, 1.45)),
    ("llama", "llama", {}, (0.16, 0.41, 1.44)),
]


@pytest.mark.parametrize(("preset_name", "options", "published"), [c[1:] for c in COUNTS], ids=[c[0] for c in COUNTS])
def test_parameters_of_the_decay_paper(preset_name, options, published):
    """The counts are those that the paper prints, to two digits. With 50,257 tokens those of 0.42 B would be 0.41."""
    for size, count in zip(DECAY, published, strict=True):
        assert round(billions(size, preset_name, **options), 2) == count


def test_vector_dplr_is_smaller_than_the_papers():
    """The paper prints 0.17 and 1.47 B, two low-rank maps per layer more than it describes. Our model adds only β."""
    for size in DECAY:
        more = billions(size, update="dplr") - billions(size)
        sizes = SIZES[size]
        assert more * 1e9 == pytest.approx(sizes["num_layers"] * sizes["hidden_size"] * sizes["num_heads"])


ECHO = {"echo-50m": 50e6, "echo-180m": 180e6}


def echo_parameters(size, vocabulary=32_000, *, tied=True, **options):
    sizes = {**SIZES[size], "vocab_size": vocabulary, "tie_embeddings": tied}
    with torch.device("meta"):
        return LanguageModel(preset("echo", **sizes, **options)).num_parameters()


def of_the_paper(d, layers, ska_layers, r, heads):
    """Compute the parameters of Echo (§3): Mamba-2 with d_state 64, expand 2, heads of 64, one group; 32,000 tokens."""
    inner, mixed = 2 * d, 2 * d + 2 * 64
    mamba_heads = inner // 64
    mamba = d * (inner + mixed + mamba_heads) + 5 * mixed + 3 * mamba_heads + inner + inner * d  # A, Δ, D; norm; W_out
    ska = 2 * d * heads * r + 2 * d * d + 3 * heads  # γ, η and μ, which halflife learns
    width = -(-8 * d // 3 // 64) * 64
    mlp = 2 * d * width + width  # a modulus and an angle for each pair
    blocks = (layers - len(ska_layers)) * mamba + len(ska_layers) * ska + layers * mlp
    return blocks + (2 * layers + 1) * d + 32_000 * d


@cases("size, shape", ("echo-50m", (448, 16, [3, 7, 11, 15], 56, 7)), ("echo-180m", (768, 24, [8, 16], 48, 12)))
def test_echo_is_that_of_its_paper(size, shape):
    """Layers, rank, heads, chunk and d_state are the paper's; the parameter count is within 3 % of the name."""
    config = preset("echo", **SIZES[size])
    hidden, layers, where, rank, heads = shape
    assert (config.hidden_size, config.num_layers, config.mlp) == (hidden, layers, "koopman")
    assert config.hybrid == {"mixer": "ska", "options": {"num_heads": heads, "rank": rank}, "layers": where}
    with torch.device("meta"):
        model = LanguageModel(config)
    assert model.blocks[where[0]].mixer.options["chunk_size"] == 64
    assert (model.blocks[0].mixer.state_size, model.blocks[0].mixer.head_dim) == (64, 64)
    assert model.num_parameters() == of_the_paper(*shape)
    assert model.num_parameters() == pytest.approx(ECHO[size], rel=0.03)


@pytest.mark.slow
@cases(
    "reading, millions",
    ({}, (50.1, 184.9)),
    ({"mixer_options": {"state_size": 128}}, (50.8, 187.1)),
    ({"mlp": "koopman_gated"}, (58.8, 222.7)),
    ({"tied": False}, (64.4, 209.5)),
    ({"vocabulary": 50257}, (58.3, 199.0)),
    ({"vocabulary": 50277}, (58.3, 199.0)),
    ({"vocabulary": 50257, "tied": False}, (80.8, 237.6)),
)
def test_what_other_readings_of_echo_would_have(reading, millions):
    """The counts are those of docs/design-space.md; only the first reading is within 3 % of both names."""
    found = [echo_parameters(size, **reading) / 1e6 for size in ECHO]
    assert found == pytest.approx(millions, abs=0.05)
    near = all(x == pytest.approx(name / 1e6, rel=0.03) for x, name in zip(found, ECHO.values(), strict=True))
    assert near == (reading == {})


def test_the_papers_variants_share_echos_layout():
    """Hybrids of Echo's sizes have its layers (§3.4, §4.2); other sizes replace one layer in twelve."""
    for size in ECHO:
        where = preset("echo", **SIZES[size]).hybrid["layers"]
        assert preset("mamba2+ska", **SIZES[size]).hybrid == preset("echo", **SIZES[size]).hybrid
        assert preset("mamba2+attention", **SIZES[size]).hybrid["layers"] == where
        assert preset("mamba2", **SIZES[size]).hybrid == {}


def parameters(name, size, **options):
    with torch.device("meta"):
        return LanguageModel(preset(name, **{**SIZES[size], **options})).num_parameters()


def mamba2_layer(d, d_state=128):
    """Compute the parameters of a Mamba-2 layer from its paper: expand 2, heads of 64, one group, 4 taps."""
    inner, mixed, heads = 2 * d, 2 * d + 2 * d_state, 2 * d // 64
    return d * (inner + mixed + heads) + 5 * mixed + 3 * heads + inner + inner * d


@cases(
    "size, layers, hidden, heads, published",
    ("post-180m", 24, 768, 24, 188.9e6),
    pytest.param("post-440m", 48, 1024, 32, 448.2e6, marks=pytest.mark.slow),
)
def test_post_is_that_of_its_paper(size, layers, hidden, heads, published):
    """PoST's Table 5 gives every size: "~180M" is 188.9M, 4.9 % more than the name; "~440M" is within 2 %."""
    config = preset("mamba2+post", **SIZES[size])
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (layers, hidden, 128_256)
    assert (config.mlp, config.tie_embeddings) == ("none", True)
    with torch.device("meta"):
        model = LanguageModel(config)
    mixer = model.blocks[0].mixer
    assert (mixer.num_heads, mixer.head_dim, mixer.state_size, mixer.conv.weight.shape[-1]) == (heads, 64, 128, 4)
    assert model.num_parameters() == 128_256 * hidden + layers * (mamba2_layer(hidden) + hidden) + hidden
    assert model.num_parameters() == parameters("mamba2", size)  # the two models differ only in their decay
    assert model.num_parameters() == pytest.approx(published, rel=1e-3)


def test_the_other_models_of_post_are_those_of_its_code():
    """The paper gives only "~180M" for these models."""
    for name, end, released in (("rwkv7", "mlp", 188.9e6), ("gated_deltanet", "delta", 212.3e6)):
        for modifier in ("", "+post"):
            assert parameters(name + modifier, f"post-180m-{end}") == pytest.approx(released, rel=1e-3)


GATE_RANK = {"mamba2": "gate-rank-760m", "gated_deltanet": "gate-rank-760m-delta"}


def of_gate_rank(base, d=1536):
    """Compute the parameters of the base from GateRank, §4.1: SwiGLU of width 4,096; 32,000 tokens, untied."""
    keys, values, heads = d, 2 * d, 12
    delta = 2 * d * keys + 3 * d * values + 4 * (2 * keys + values) + 2 * d * heads + 2 * heads + values // heads
    layers, mixer = {"mamba2": (20, mamba2_layer(d)), "gated_deltanet": (18, delta)}[base]
    return layers * (mixer + 3 * d * 4096 + 2 * d) + d + 2 * 32_000 * d


@pytest.mark.parametrize("base", GATE_RANK)
def test_gate_rank_is_that_of_its_paper(base):
    """Width, layers and the base's parameters agree; the count is within 3 % of 760M with and without GateRank."""
    size = GATE_RANK[base]
    assert SIZES[size]["hidden_size"] == 1536
    assert SIZES[size]["num_layers"] == {"mamba2": 20, "gated_deltanet": 18}[base]
    assert parameters(base, size) == of_gate_rank(base)
    for name in (base, f"{base}+gate_rank"):
        assert parameters(name, size) == pytest.approx(760e6, rel=0.03)


def test_both_models_of_gate_rank_remember_as_much():
    """A state has 128 · 3,072 numbers per layer, in head sizes that the kernels support."""
    for base, size in GATE_RANK.items():
        config = preset(f"{base}+gate_rank", **{**SIZES[size], "num_layers": 1})
        mixer = layers.build(config.mixer, hidden_size=1536, **config.mixer_options)
        _, state = mixer(torch.randn(1, 1, 1536))
        for part in ("memory", "slow"):
            assert state[part].numel() == 128 * 3072
            assert max(state[part].shape[-2:]) <= max(triton.SIZES)


@pytest.mark.slow
@cases(
    "reading, millions",
    ({}, (770.2, 779.3)),
    ({"vocab_size": 50257, "tie_embeddings": True}, (749.1, 758.2)),
    ({"tie_embeddings": True}, (721.0, 730.1)),
    ({"vocab_size": 50257}, (826.3, 835.4)),
)
def test_what_other_readings_of_gate_rank_would_have(reading, millions):
    """The counts are those of docs/design-space.md."""
    found = [parameters(f"{base}+gate_rank", size, **reading) / 1e6 for base, size in GATE_RANK.items()]
    assert found == pytest.approx(millions, abs=0.05)


@pytest.mark.slow
@cases(
    "reading, millions",
    ({"mixer_options": {}}, 651.8),
    ({"num_heads": 6, "mixer_options": {"value_dim": 512}}, 778.8),
    ({"num_heads": 24, "mixer_options": {"value_dim": 128}}, 780.3),
)
def test_what_other_heads_under_the_delta_rule_would_have(reading, millions):
    found = parameters("gated_deltanet+gate_rank", "gate-rank-760m-delta", **reading) / 1e6
    assert found == pytest.approx(millions, abs=0.05)


SIZES_CONTROL = {"hidden_size": 64, "num_layers": 2, "vocab_size": 32, "num_heads": 4, "train_length": 32}
TARGETS = ("mamba2+gate_rank", "mamba2+ska", "mamba2+attention")


def close(found, wanted):
    return abs(found - wanted) <= SIZE_TOLERANCE * wanted


CASES = [
    (base, target, mlp) for base in ("mamba2", "gated_deltanet") for target in TARGETS for mlp in ("none", "swiglu")
]
FAST = [("mamba2", "mamba2+gate_rank", "none"), ("gated_deltanet", "mamba2+attention", "swiglu")]


@pytest.mark.parametrize(
    ("base", "target", "mlp"), [case if case in FAST else pytest.param(*case, marks=pytest.mark.slow) for case in CASES]
)
def test_sizes(base, target, mlp):
    one, other = (preset(name, **SIZES_CONTROL, mlp=mlp) for name in (base, target))
    models = [LanguageModel(each) for each in (one, other)]
    state = LanguageModel(control(one, "state", other, 32, "a"))
    assert close(state.state_size(32), models[1].state_size(32))
    parameters = LanguageModel(control(one, "parameters", other, 32, "b"))
    assert close(parameters.num_parameters(), models[1].num_parameters())
    assert (state.config.name, parameters.config.name) == ("a", "b")
    assert parameters.config.num_layers == 2
    logits, _ = state(torch.zeros(1, 5, dtype=torch.long))
    assert logits.shape == (1, 5, 32)


def test_the_nearest_size_is_chosen():
    one, other = preset("mamba2", **SIZES_CONTROL), preset("mamba2", **SIZES_CONTROL, mixer_options={"state_size": 37})
    assert control(one, "state", other, 1, "a").mixer_options["state_size"] == 37


def test_names():
    assert split_control("mamba2+post") is None
    assert split_control("mamba2@state(mamba2+gate_rank:reset10)") == ("mamba2", "state", "mamba2+gate_rank:reset10")
    for name in ("mamba2@state", "mamba2@bytes(llama)", "@state(llama)"):
        assert_raises(ValueError, r"a control is called base@state\(target\)", split_control, name)


def test_a_control_of_longhorn_has_more_rows():
    """Its `state_size` is K; `head_dim` would widen the layer."""
    base = preset("longhorn", **SIZES_CONTROL)
    found = control(base, "state", preset("mamba2+gate_rank", **SIZES_CONTROL), 1, "x")
    assert found.mixer_options.keys() - base.mixer_options.keys() <= {"state_size"}
    assert "head_dim" not in found.mixer_options


def test_what_has_no_control():
    attention, other = preset("llama", **SIZES_CONTROL), preset("mamba2", **SIZES_CONTROL)
    with pytest.raises(ValueError, match=r"x: no size of llama has [\d,]+ numbers of state to 5%, as mamba2 has"):
        control(attention, "state", other, 1, "x")


def test_controls_in_an_experiment():
    name = "mamba2@state(mamba2+gate_rank)"
    plan = compare.plan_comparison([name, "mamba2+gate_rank"], experiment="gate-rank-niah", scale="small")
    configs = {cell.model: plan.experiment.configure(plan.settings, cell) for cell in plan.cells()}
    sizes = [LanguageModel(config.model).state_size() for config in configs.values()]
    assert close(*sizes)
    assert configs[name].model.name == name
    experiment = EXPERIMENTS["gate-rank-niah"]()
    plain = experiment.configure(plan.settings, Cell("mamba2", 1e-2, 0))
    same = dataclasses.replace(configs[name], model=plain.model)
    assert same == plain  # the model alone differs
