"""The hooks that show what a model computes inside, and the records that analyses return."""

import dataclasses
import math

import pytest
import torch
from helpers import assert_raises

from halflife.analysis.capture import capture, read_from, ska_layers, slow_gates
from halflife.analysis.records import Record
from halflife.evaluation import evaluating
from halflife.files import finite, without_null
from halflife.models import LanguageModel, preset


def tiny(name, **sizes):
    torch.manual_seed(0)
    return LanguageModel(preset(name, **{"hidden_size": 16, "num_layers": 3, "num_heads": 2, **sizes}))


def num_hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) + ("scan" in vars(m)) for m in model.modules())


def fail(*_):
    raise RuntimeError("enough")


CASES = [("mamba2", "decay"), ("lightnet", "decay"), ("mamba2+gate_rank", "slow_decay"), ("mamba2+ska", "koopman")]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_hooks_are_removed_also_after_an_error(name, kind):
    model, ids = tiny(name), torch.randint(256, (2, 9))
    with capture(model, **{kind: lambda *_: None}):
        assert num_hooks(model) > 0
        model(ids)
    assert num_hooks(model) == 0
    with pytest.raises(RuntimeError, match="enough"), capture(model, **{kind: fail}):
        model(ids)
    assert num_hooks(model) == 0


def test_only_what_is_asked_for_is_hooked():
    model = tiny("mamba2+ska")
    with capture(model):
        assert num_hooks(model) == 0


def test_each_layer_reports_in_every_forward_pass():
    model, ids, seen = tiny("gated_deltanet+gate_rank"), torch.randint(256, (2, 9)), []
    takes = {kind: lambda layer, g, kind=kind: seen.append((kind, layer, g.shape)) for kind in ("decay", "slow_decay")}
    with capture(model, **takes), torch.no_grad():
        model(ids)
        model(ids)
    once = [(kind, layer, (2, 9, 2)) for layer in range(3) for kind in ("decay", "slow_decay")]
    assert seen == once * 2
    assert [layer for layer, _ in slow_gates(model)] == [0, 1, 2]
    printed = tiny("mamba2+gate_rank", mixer_options={"gate_rank": {"reset_law": "printed"}})
    assert_raises(ValueError, "this model has 'printed'", slow_gates, printed)


def test_a_reading_of_ska_is_the_layers_state():
    model, ids, seen = tiny("mamba2+ska"), torch.randint(256, (2, 9)), []
    with capture(model, koopman=lambda layer, reading: seen.append((layer, reading))), torch.no_grad():
        _, state = model(ids)
    assert [layer for layer, _ in seen] == [layer for layer, _ in ska_layers(model)] == [1]
    reading = seen[0][1]
    assert reading.values.shape[:2] == (2, 9)
    assert reading.retries == 0
    for name, value in reading.state.items():
        assert torch.equal(value, state[1][name]), name


def test_evaluating_restores_each_module():
    model = tiny("mamba2").train()
    model.blocks[1].eval()
    modes = [m.training for m in model.modules()]
    with evaluating(model):
        assert not any(m.training for m in model.modules())
    assert [m.training for m in model.modules()] == modes
    with pytest.raises(RuntimeError, match="enough"), evaluating(model):
        fail()
    assert [m.training for m in model.modules()] == modes


def test_blocks_run_again_from_other_states():
    """A block that starts from its saved state ends where the model does. From zeros, it ends as without a past."""
    model, ids = tiny("mamba2", num_layers=2).double().eval(), torch.randint(256, (2, 12))
    with torch.no_grad():
        before = model.hidden(ids[:, :5])[1]
        expected = model.hidden(ids[:, 5:], before)[1]
    zeros = [{**layer, "memory": torch.zeros_like(layer["memory"])} for layer in before]
    after, (same, empty) = read_from(model, ids[:, 5:], before, [before, zeros])
    for layer in range(2):
        for name, value in expected[layer].items():
            assert torch.equal(after[layer][name], value)
            assert torch.equal(same[layer][name], value)
        assert not torch.equal(empty[layer]["memory"], expected[layer]["memory"])
    with torch.no_grad():  # the first block reads the same inputs in both models
        bare = model.hidden(ids[:, 5:], tuple(zeros))[1]
    assert torch.equal(empty[0]["memory"], bare[0]["memory"])


@dataclasses.dataclass(frozen=True)
class Inner(Record):
    value: float
    extra: int | None = None


@dataclasses.dataclass(frozen=True)
class Outer(Record):
    length: int | None
    inner: Inner
    named: dict[str, Inner]
    listed: list[Inner]
    missing: Inner | None = None


def test_records_become_plain_data():
    """A None that is a result is written. A None that means "not applicable" is omitted."""
    outer = Outer(None, Inner(1.0), {"a": Inner(2.0, 3)}, [Inner(math.inf)])
    assert outer.to_dict() == {
        "length": None, "inner": {"value": 1.0}, "named": {"a": {"value": 2.0, "extra": 3}},
        "listed": [{"value": math.inf}],
    }  # fmt: skip
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(outer, "length", 3)  # noqa: B010


def test_numbers_that_json_cannot_hold():
    data = {"a": [1.0, math.inf, {"b": math.nan}], "c": "text", "d": 2}
    assert finite(data) == {"a": [1.0, None, {"b": None}], "c": "text", "d": 2}
    again = without_null(finite(data), math.nan)
    assert again["a"][0] == 1.0
    assert math.isnan(again["a"][1])
    assert math.isnan(again["a"][2]["b"])
    assert finite(again) == finite(data)
