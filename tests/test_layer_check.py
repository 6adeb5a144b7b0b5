"""`halflife check`: layers of ours pass, and each fault of a user's layer is found and named."""

import sys
from itertools import pairwise

import pytest
import torch
from pairwise import slow_beyond
from torch import nn

from halflife import extensions, preset
from halflife.cli import main
from halflife.evaluation.layer_check import CHECKS, check_layer
from halflife.lab.experiments import EXPERIMENTS
from halflife.lab.experiments.mqar import SMOKE, mqar_model
from halflife.lab.experiments.recall import recall_model
from halflife.layers import LAYERS, Mixer
from halflife.models import LanguageModel, presets
from halflife.models.presets.presets import Base


@pytest.mark.parametrize("name", slow_beyond(LAYERS.names()[::3], LAYERS.names()))
def test_layers_of_ours_pass(name):
    assert [one for one in check_layer(name) if one.fault] == []


class Sum(Mixer):
    """A running sum, right in every way, without any option that experiments offer but heads."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.map = nn.Linear(hidden_size, hidden_size, bias=False)

    def mix(self, x, state, packing, shared):
        sums = x.new_empty(x.shape)
        total = x.new_zeros(packing.num_sequences, x.shape[2]) if not state else state["sum"]
        if packing.cu_seqlens is None:
            sums = self.map(x).cumsum(1) + total.unsqueeze(1)
            return sums, {"sum": sums[:, -1]}
        ends = packing.cu_seqlens.tolist()
        parts = [self.map(x[0, a:b]).cumsum(0) + total[i] for i, (a, b) in enumerate(pairwise(ends))]
        return torch.cat(parts).unsqueeze(0), {"sum": torch.stack([part[-1] for part in parts])}


class Ahead(Sum):
    def mix(self, x, state, packing, shared):
        return x + x.mean(1, keepdim=True), {}


class Forgetful(Sum):
    def mix(self, x, state, packing, shared):
        return super().mix(x, {}, packing, shared)


class Leaking(Sum):
    def mix(self, x, state, packing, shared):
        sums = self.map(x).cumsum(1) + (state["sum"].unsqueeze(1) if state else 0)
        return sums, {"sum": sums[:, -1].expand(packing.num_sequences, -1)}


class Detached(Sum):
    def mix(self, x, state, packing, shared):
        return super().mix(x.detach(), state, packing, shared)


class Wide(Sum):
    def mix(self, x, state, packing, shared):
        y, new = super().mix(x, state, packing, shared)
        return y.float(), new


class Constant(Sum):
    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__(hidden_size, num_heads)
        self.gain = nn.Parameter(torch.ones(1, device="cpu"))

    def mix(self, x, state, packing, shared):
        return super().mix(x * self.gain, state, packing, shared)


@pytest.fixture
def registered(monkeypatch):
    def register(layer):
        monkeypatch.setitem(LAYERS._entries, "mine", layer)
        monkeypatch.setitem(presets.PRESETS._entries, "mine", Base("mine", "A layer of a user."))

    return register


@pytest.mark.parametrize(
    ("layer", "faults"),
    [(Sum, {}), (Ahead, {"causality", "streaming", "packing", "padding", "gradients"}), (Forgetful, {"streaming"}),
     (Leaking, {"packing", "padding"}), (Detached, {"gradients"}), (Wide, {"dtype"}), (Constant, {"meta device"})],
    ids=lambda one: getattr(one, "__name__", ""),
)  # fmt: skip
def test_every_fault_is_found(registered, layer, faults):
    registered(layer)
    found = {check: fault for check, fault in check_layer("mine") if fault}
    assert set(found) == set(faults), found
    if layer is Ahead:
        assert found["causality"] == "it looks ahead: the output at token 0 changes with the tokens from 13 on"


def test_experiments_give_a_layer_the_options_that_it_takes(registered):
    """A constructor of `hidden_size` and `num_heads` alone is enough, and all wrong options are named at once."""
    registered(Sum)
    recall = EXPERIMENTS["echo-transfer"]().scales["smoke"]
    for config in (mqar_model("mine", SMOKE), recall_model("mine", recall), preset("mine", hidden_size=32)):
        assert set(config.mixer_options) == {"num_heads"}
        logits, _ = LanguageModel(config)(torch.zeros(1, 3, dtype=torch.long))
        assert logits.shape == (1, 3, config.vocab_size)
    with pytest.raises(ValueError, match="layer mine has no options 'width', 'depth'; choose from"):
        preset("mine", mixer_options={"width": 1, "depth": 2})


MODULE = '''
from halflife.layers import LAYERS, Mixer


@LAYERS.add("{name}")
class Mine(Mixer):
    """A layer of a user."""

    def __init__(self, hidden_size):
        super().__init__()

    def mix(self, x, state, packing, shared):
        return {y}, {{}}
'''


@pytest.mark.parametrize(
    ("y", "said"),
    [
        ("x + x.mean(1, keepdim=True)", "cannot be trained to predict: it looks ahead"),
        ("x.cumsum(1)", "fails the check"),
    ],
)
def test_layers_of_an_imported_module_are_checked(tmp_path, monkeypatch, capsys, y, said):
    name = f"layer_{abs(hash(tmp_path)) % 10**6}"
    (tmp_path / f"{name}.py").write_text(MODULE.format(name=name, y=y))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv(extensions.VARIABLE, "")
    try:
        if "mean" in y:
            with pytest.raises(SystemExit):
                main(["--import", name, "list"])
        else:
            main(["--import", name, "list"])
        assert f"layer {name} {said}" in capsys.readouterr().err
        with pytest.raises(SystemExit):
            main(["check", f"{name}:{name}"])
        lines = capsys.readouterr()
        assert [line.split("  ")[0].strip() for line in lines.out.splitlines()] == [*CHECKS]
        assert "checks: " in lines.err
    finally:
        LAYERS._entries.pop(name, None)
        sys.modules.pop(name, None)
