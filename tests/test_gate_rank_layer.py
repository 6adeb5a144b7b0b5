"""GateRank in layers: gates at the start, streaming, β in (0, 2), statistics, the warning, the experiments."""

import csv
import json
import math

import pytest
import torch
from helpers import assert_close, assert_raises, assert_same, cases

import halflife
from halflife.evaluation.recall import accuracy, by_position
from halflife.files import read_json
from halflife.lab.experiments import EXPERIMENTS, compare
from halflife.lab.experiments.gate_rank import PAIRS, GateRankMQAR, GateRankS5
from halflife.layers import GateRank, gate_statistics
from halflife.layers.memory.gate_rank import SlowGate
from halflife.packing import Packing
from halflife.runs.sweep import Cell
from halflife.tasks import build, stream_seed
from halflife.training.callbacks import Metrics

SIZES = {"hidden_size": 32, "num_layers": 2, "vocab_size": 31, "num_heads": 4, "train_length": 16}


def built(name, **options):
    torch.manual_seed(0)
    return halflife.LanguageModel(halflife.preset(name, **SIZES, **options)).double()


@pytest.mark.parametrize("rate", [0.5, 0.1, 0.01])
def test_the_share_of_resets_at_the_start(rate):
    """The share holds for inputs of unit mean square, as a mean over gates."""
    gate = GateRank(256, 200, reset_rate=rate)
    g, _ = gate.slow_gate(gate.proj(torch.randn(8, 64, 256)), None, Packing(8, 64))
    # The mean is over 200 gates × 512 tokens. Four neighbouring sums share inputs.
    assert (g != 0).float().mean().item() == pytest.approx(rate, rel=0.05)
    assert (g <= 0).all()


def test_gates_have_the_published_law():
    gate = SlowGate(3, 0.3, 4).double().requires_grad_(False)
    projected = torch.randn(2, 9, 3, dtype=torch.float64)
    g, _ = gate(projected, None, Packing(2, 9))
    for b in range(2):
        for t in range(9):
            for h in range(3):
                taps = [gate.taps[h, 3 - i] * projected[b, t - i, h] for i in range(4) if t >= i]
                expected = -gate.A_log[h].exp() * max(sum(taps) + gate.bias[h], 0)
                assert g[b, t, h].item() == pytest.approx(expected.item(), abs=1e-7)


def test_a_gate_that_never_opens_leaves_the_base():
    torch.manual_seed(1)
    gated, base = built("mamba2+gate_rank"), built("mamba2")
    for module in gated.modules():
        if isinstance(module, SlowGate):
            torch.nn.init.constant_(module.bias, -1e3)
    base.load_state_dict({k: v for k, v in gated.state_dict().items() if "gate_rank" not in k})
    ids = torch.randint(31, (2, 40))
    assert_close(gated(ids)[0], base(ids)[0], 1e-13)


def test_every_gate_parameter_learns():
    model = built("gated_deltanet+gate_rank", mixer_options={"gate_rank": {"reset_rate": 0.5}})
    model(torch.randint(31, (4, 40)))[0].square().sum().backward()
    gates = [m for m in model.modules() if isinstance(m, GateRank)]
    assert len(gates) == 2
    assert all(p.grad.abs().sum() > 0 for gate in gates for p in gate.parameters())


def test_two_states_are_counted():
    one, two = built("gated_deltanet"), built("gated_deltanet+gate_rank")
    heads, size = 4, 8
    # Each of two layers has a second state and three inputs of the convolution for each head.
    assert two.state_size() - one.state_size() == 2 * (heads * size * size + heads * 3)


@cases(
    "name, message",
    ("llama+gate_rank", "has none"),
    ("deltanet+gate_rank", "has none"),
    ("rwkv7+gate_rank", "another update"),
    ("simple+gate_rank", "a scalar decay"),
    ("simple+scalar+dplr+gate_rank", "linear or the delta update"),
)
def test_combinations_without_meaning(name, message):
    assert_raises(ValueError, message, halflife.preset, name, **SIZES)


@cases(
    "options, message",
    ({"reset_rate": 0.0}, "between 0 and 1"),
    ({"reset_rate": 1.5}, "between 0 and 1"),
    ({"conv_size": 0}, "1 or more"),
)
def test_gate_options_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        halflife.preset("mamba2+gate_rank", **SIZES, mixer_options={"gate_rank": options})


def test_beta_up_to_two_flips_the_state():
    """`I − 2 k kᵀ` is a reflection. With β = 2 and v = 0, the state's part along k changes sign at every token."""
    torch.manual_seed(0)
    mixer = halflife.layers.build(
        "gated_deltanet", hidden_size=32, num_heads=2, allow_neg_eigval=True, conv_size=0, decay=None
    )
    half = halflife.layers.build("gated_deltanet", hidden_size=32, num_heads=2, conv_size=0, decay=None)
    half.load_state_dict(mixer.state_dict())
    x = torch.randn(1, 5, 32)
    captured = {}
    for name, layer in (("full", mixer), ("half", half)):
        beta = layer.update.strength(layer, x)
        captured[name] = beta
    assert_same(captured["full"], 2 * captured["half"])
    assert not torch.allclose(mixer(x)[0], half(x)[0])
    with pytest.raises(ValueError, match="the update is linear"):
        halflife.layers.build("linear", hidden_size=32, allow_neg_eigval=True)


def test_statistics_count_what_happened():
    model = built("gated_deltanet+gate_rank", mixer_options={"gate_rank": {"reset_rate": 0.3}})
    seen = {}

    def hook(module, arguments, result):
        seen.setdefault(module, []).append(result[0])

    gates = [m for m in model.modules() if isinstance(m, GateRank)]
    for gate in gates:
        gate.slow_gate.register_forward_hook(hook)
    model.train()
    model(torch.randint(31, (2, 24)))
    model(torch.randint(31, (3, 10)))
    model.eval()
    model(torch.randint(31, (3, 10)))  # evaluation does not count
    found = gate_statistics(model)
    assert len(found) == 2
    for values, gate in zip(found.values(), gates, strict=True):
        trained = seen[gate.slow_gate][:2]
        resets = sum((g != 0).sum().item() for g in trained)
        tokens, sequences = 4 * (2 * 24 + 3 * 10), 4 * (2 + 3)
        assert values["reset_rate"] == pytest.approx(resets / tokens)
        assert values["segment_length"] == pytest.approx(tokens / (resets + sequences))
        assert 0 < values["slow_share"] < 1
    assert gate_statistics(model) == {}
    model.train()(torch.randint(31, (2, 0)))  # no tokens have no segments
    assert gate_statistics(model) == {}


@pytest.mark.parametrize(("bias", "word"), [(-1e3, "never resets"), (1e3, "always resets")])
def test_a_layer_with_one_state_is_named_once(bias, word, tmp_path):
    model = built("mamba2+gate_rank").train()
    torch.nn.init.constant_(model.blocks[1].mixer.gate_rank.slow_gate.bias, bias)
    torch.nn.init.constant_(model.blocks[0].mixer.gate_rank.slow_gate.bias, 0)
    metrics = Metrics(tmp_path, lambda _: 0.0, "loss", 10)
    state = type("State", (), {"global_step": 20, "is_world_process_zero": True})()
    model(torch.randint(31, (2, 24)))
    with pytest.warns(UserWarning, match=rf"blocks\.1.*{word}"):
        metrics.on_log(None, state, None, {"loss": 1.0}, model=model)
    model(torch.randint(31, (2, 24)))
    metrics.on_log(None, state, None, {"loss": 1.0}, model=model)  # a second warning would raise an error
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["gates"]["blocks.1.mixer.gate_rank"]["reset_rate"] == (0 if bias < 0 else 1)


def test_by_position_agrees_with_the_mean(monkeypatch):
    task = build("s5", group="s3", length=12)
    torch.manual_seed(0)
    model = halflife.LanguageModel(halflife.preset("gated_deltanet", **{**SIZES, "vocab_size": 6}))
    settings = {"split": "test", "seed": 3, "num_examples": 50}
    monkeypatch.setattr("halflife.evaluation.recall.BATCH_TOKENS", 60)
    found = by_position(model, task, **settings)
    assert len(found["accuracy"]) == len(found["loss"]) == 12
    assert sum(found["accuracy"]) / 12 == pytest.approx(accuracy(model, task, **settings))
    examples = task.generate(50, stream_seed("test", 3))
    logits, _ = model(examples.inputs)
    losses = -logits.log_softmax(-1).gather(-1, examples.labels.unsqueeze(-1)).squeeze(-1)
    assert found["loss"] == pytest.approx(losses.mean(0).tolist(), abs=1e-5)


def test_a_transform_is_not_counted():
    """What `torch.func` computes with is dead after it, and would make the next step fail."""
    model, x = built("mamba2+gate_rank").train(), torch.arange(9)
    model(x[None])

    def loss(parameters, ids):
        return torch.func.functional_call(model, parameters, (ids[None],))[0].square().mean()

    grads = torch.func.vmap(torch.func.grad(loss), (None, 0))(dict(model.named_parameters()), x.view(3, 3))
    assert torch.isfinite(grads["embedding.weight"]).all()
    torch.func.grad(loss)(dict(model.named_parameters()), x)
    model(x[None])
    found = gate_statistics(model)
    model(x[None])
    for name, alone in gate_statistics(model).items():
        assert found[name] == pytest.approx(alone)  # two steps have the mean of one


def test_validation_is_not_counted_as_training():
    model = halflife.LanguageModel(halflife.preset("mamba2+gate_rank", **{**SIZES, "vocab_size": 6})).train()
    task = build("s5", group="s3", length=12)
    accuracy(model, task, split="validation", seed=0, num_examples=4)
    by_position(model, task, split="validation", seed=0, num_examples=4)
    assert model.training
    assert gate_statistics(model) == {}


@pytest.mark.parametrize("name", ["gate-rank-s5", "gate-rank-mqar", "gate-rank-niah"])
def test_experiments_resolve_at_every_scale(name):
    experiment = EXPERIMENTS[name]()
    assert set(PAIRS) <= set(experiment.models)
    for scale in experiment.scales:
        settings = experiment.settings_at(scale, {})
        sizes = {}
        for model in experiment.models:
            config = experiment.configure(settings, Cell(model, 1e-2, 0))
            assert config.model.name in (model, model.partition(":")[0])
            if scale == "smoke":
                sizes[model] = halflife.LanguageModel(config.model).state_size()
        if name == "gate-rank-mqar" and scale == "smoke":
            for base in ("mamba2", "gated_deltanet"):
                assert sizes[f"{base}:double"] == pytest.approx(sizes[f"{base}+gate_rank"], rel=0.15)


@cases("name, message", ("mamba2:nonsense", "reset10.* swaps"), ("mamba2:reset10", r"lacks \+gate_rank"))
def test_variants_are_checked(name, message):
    experiment = EXPERIMENTS["gate-rank-s5"]()
    assert_raises(ValueError, message, experiment.configure, experiment.settings_at("smoke", {}), Cell(name, 1e-2, 0))


def configured(experiment, name):
    return experiment.build_cell(experiment.scales["smoke"], Cell(name, 1e-2, 0))


def test_depth_and_curriculum_of_a_name():
    config = configured(GateRankS5(), "gated_deltanet+gate_rank:neg-d4-curriculum")
    assert config.model.name == "gated_deltanet+gate_rank:neg-d4-curriculum"
    assert config.model.num_layers == 4
    assert config.model.mixer_options["allow_neg_eigval"]
    assert [stage[0]["length"] for stage in config.stages] == [2, 4, 8, 16]
    assert len(configured(GateRankS5(), "gated_deltanet:neg").stages) == 1
    swaps = configured(GateRankS5(), "deltaproduct:n4-swaps")
    assert [(stage[0]["length"], stage[0]["words"]) for stage in swaps.stages] == [
        (16, "swaps"), *4 * [(16, "mixed")], *3 * [(16, "all")],
    ]  # fmt: skip
    assert swaps.model.mixer_options["num_householder"] == 4
    for name, message in (
        ("gated_deltanet:d2-d4", "two depths"), ("mamba2:swaps-curriculum", "two curricula"),
        ("mamba2:deep", "unknown variant 'deep'"),
    ):  # fmt: skip
        assert_raises(ValueError, message, configured, GateRankS5(), name)


def test_gates_that_stay_closed_and_gates_that_are_not_trained():
    """Closed gates get no gradient. An untrained gate passes none to its input, and its resets change the output."""
    assert configured(GateRankMQAR(), "mamba2+gate_rank:closed").model.mixer_options["gate_rank"] == {
        "reset_rate": 1e-6
    }
    x, outputs = torch.randn(2, 12, 32), {}
    for name, options in (("closed", {"reset_rate": 1e-6}), ("fixed", {"reset_rate": 0.5, "trained": False})):
        torch.manual_seed(0)
        mixer = halflife.layers.build("gated_deltanet", hidden_size=32, num_heads=2, gate_rank=options)
        outputs[name], state = mixer(x)
        outputs[name].square().sum().backward()
        gate = mixer.get_submodule("gate_rank")
        assert not any(p.grad is not None and p.grad.any() for p in gate.parameters())
        assert bool(state["slow"].any()) == (name == "fixed")
        assert all(p.requires_grad == (name == "closed") for p in gate.parameters())
    assert not torch.allclose(outputs["closed"], outputs["fixed"])


def test_a_comparison_is_measured_by_position(tmp_path):
    sizes = {"hidden_size": 16, "steps": 4, "batch_size": 4, "test_examples": 8, "lengths": (16, 32)}
    names = ("gated_deltanet", "gated_deltanet+gate_rank:reset50")
    folder = compare.create_comparison(names, experiment="gate-rank-s5", settings=sizes, output=tmp_path / "s5")
    compare.run_comparison(folder, show=False)
    result = read_json(next(folder.glob("*/*/result.json")))
    assert [len(p["accuracy"]) for p in result["positions"]] == [16, 32]
    assert all(math.isfinite(x) for p in result["positions"] for x in p["loss"])
    with (folder / "positions.csv").open(newline="") as file:
        spans = list(csv.DictReader(file))
    assert list(spans[0]) == ["model", "learning_rate", "seed", "first", "last", "accuracy", "loss"]
    assert len(spans) == 2 * 2  # models and spans
    assert {(row["first"], row["last"]) for row in spans} == {("1", "16"), ("17", "32")}
    longest = result["positions"][1]
    assert {f"{float(row['loss']):.6f}" for row in spans} >= {f"{sum(longest['loss'][:16]) / 16:.6f}"}
    drawn = {path.stem for path in (folder / "figures").glob("*.png")}
    assert {"positions", "gates", "accuracy", "training"} <= drawn


def test_recall_is_measured_with_its_gates(tmp_path):
    sizes = {"hidden_size": 16, "steps": 4, "batch_size": 4, "test_examples": 8, "lengths": (32,), "test_pairs": (1,)}
    folder = compare.create_comparison(
        ("mamba2+gate_rank",), experiment="gate-rank-niah", settings=sizes, output=tmp_path / "niah"
    )
    compare.run_comparison(folder, show=False)
    with (folder / "gates.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["layer"] for row in rows] == ["0", "1"]
    assert all(0 <= float(row["reset_rate"]) <= 1 <= float(row["segment_length"]) for row in rows)
