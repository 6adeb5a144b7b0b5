"""`halflife spectrum` on layers of spectral Koopman attention: the numbers it reports about operators."""

import dataclasses
import json
import math

import pytest
import torch
from helpers import assert_raises, cases, generator

from halflife.analysis import koopman
from halflife.analysis.capture import ska_layers
from halflife.analysis.decays import measure_decays
from halflife.analysis.koopman import Operator
from halflife.analysis.operators import measure_operators
from halflife.analysis.survey import measure_models
from halflife.cli import main
from halflife.files import KOOPMAN_JSON, write_json
from halflife.models import LanguageModel, checkpoint, preset
from halflife.report.figures.decays import decays
from halflife.report.figures.matplotlib_renderer import draw, save
from halflife.report.figures.operators import operators
from halflife.report.table import show
from halflife.report.tables import spectrum as tables

TEXT = b"Before we proceed any further, hear me speak. Speak, speak.\n" * 8
SINGLE = 4 * 4.4e-6  # the state is float32; worst measured error, relative
HEADS, RANK = 2, 6


def read_operators(folders, text, **reading):
    return tables.operators_of(measure_models(folders, text, **reading).to_dict())


def hybrid(base="mamba2", layers=(1,), num_layers=3, **options):
    """Build a small untrained model in which some layers are SKA with chunks of 8."""
    config = preset(f"{base}+ska", hidden_size=16, num_layers=num_layers, num_heads=2, train_length=32)
    options = {"num_heads": HEADS, "rank": RANK, "chunk_size": 8, **options}
    return LanguageModel(
        dataclasses.replace(config, hybrid={"mixer": "ska", "options": options, "layers": list(layers)})
    )


def ids_of(batch, length):
    return torch.randint(256, (batch, length), generator=generator("ids"))


def projections(model, layer, ids):
    """Return keys and values `[N, T, H, …]` of a layer, from hooks that only this test uses."""
    mixer, found = model.blocks[layer].mixer, {}
    for name in ("k_proj", "v_proj"):
        getattr(mixer, name).register_forward_hook(lambda module, x, y, name=name: found.__setitem__(name, y))
    with torch.no_grad():
        model(ids)
    return [found[name].unflatten(-1, (HEADS, -1)).double() for name in ("k_proj", "v_proj")]


@pytest.mark.parametrize("length", [19, 32])
@pytest.mark.parametrize("refresh", ["chunk", "token"])
def test_numbers_are_those_of_the_keys_and_values(refresh, length):
    model, ids = hybrid(refresh=refresh, mix="learned", power=3, ridge=1e-2), ids_of(3, length)
    readout = model.blocks[1].mixer.readout
    with torch.no_grad():
        for parameter, values in zip(readout.parameters(), ([-1.0, 2.0], [0.3, 0.7], [0.5, -0.5]), strict=True):
            parameter.copy_(torch.tensor(values))
    (layer,) = measure_operators(model, ids)
    tokens = length if refresh == "token" else length // 8 * 8
    sizes = {"layer": 1, "tokens": tokens, "rank": RANK, "width": 8, "power": 3, "ridge": 1e-2, "retries": 0}
    assert {name: getattr(layer, name) for name in sizes} == sizes
    keys, values = (x[:, :tokens].transpose(1, 2) for x in projections(model, 1, ids))
    settings = {name: x.detach().double() for name, x in readout.settings().items()}
    for h, head in enumerate(layer.heads):
        gamma, mix = settings["gamma"][h], settings["mix"][h]
        ours = [Operator.of_tokens(keys[n, h], values[n, h], 1e-2) for n in range(3)]
        energy = values[:, h].square().sum((1, 2))
        scaled = torch.stack([gamma * one.eigenvalues for one in ours])
        expected = {
            "sigma_max": [koopman.sigma_max(one) for one in ours],
            "condition": [koopman.condition(one) for one in ours],
            "unexplained": [
                (v - k @ one.readout.mT).square().sum() / v.square().sum()
                for one, k, v in zip(ours, keys[:, h], values[:, h], strict=True)
            ],
            "filter_bias": [koopman.filter_bias(o, 3, gamma, mix) / e for o, e in zip(ours, energy, strict=True)],
            "linear_distance": [koopman.linear_distance(one) for one in ours],
            "persistent": koopman.modes(scaled).persistent.sum(1),
            "kept_2": (scaled.abs() ** 2).mean(1),
        }
        for name, numbers in expected.items():
            assert getattr(head, name) == pytest.approx(sorted(float(x) for x in numbers)[1], rel=SINGLE), name
        moduli = (scaled / gamma).abs().flatten().sort().values
        assert head.median == pytest.approx(moduli[math.floor(0.5 * (len(moduli) - 1))].item(), rel=SINGLE)
        assert (head.gamma, head.mix) == pytest.approx((gamma.item(), mix.item()))
        assert head.eta == readout.eta[h]
        first = torch.view_as_complex(torch.tensor(head.eigenvalues, dtype=torch.float64))
        assert first.sum().real.item() == pytest.approx(ours[0].whitened.trace().item(), abs=SINGLE)


def test_memory_of_a_head():
    (layer,) = measure_operators(hybrid(), ids_of(1, 16))
    assert layer.state_size == 2 * RANK**2 + 8 * RANK + RANK + 1 + 7 * (RANK + 8)
    assert layer.crossover == layer.state_size / (RANK + 8)


def test_repeated_factorisations_are_counted_where_they_happen():
    model = hybrid(layers=(0, 2), ridge=1e-12)
    mixer = model.blocks[2].mixer
    with torch.no_grad():
        mixer.k_proj.weight[1:] = mixer.k_proj.weight[0]  # all keys in one direction
    first, second = measure_operators(model, ids_of(2, 40))
    assert second.retries > first.retries
    assert all(math.isfinite(head.sigma_max) for head in second.heads)


def test_a_text_below_a_chunk():
    (layer,) = measure_operators(hybrid(), ids_of(2, 7))
    assert layer.tokens == 0
    for head in layer.heads:
        assert (head.sigma_max, head.condition, head.persistent) == (0, 1, 0)
        assert math.isnan(head.unexplained)


def test_the_survey_leaves_the_model_as_it_was():
    model, ids = hybrid(), ids_of(1, 20)
    with torch.no_grad():
        before, _ = model(ids)
    measure_operators(model, ids)
    for _, mixer in ska_layers(model):
        assert not [m for m in mixer.modules() if m._forward_hooks or m._forward_pre_hooks]
    with torch.no_grad():
        assert torch.equal(model(ids)[0], before)


def test_only_layers_of_ska():
    model = hybrid(layers=(0, 2))
    assert [layer.layer for layer in measure_operators(model, ids_of(1, 8))] == [0, 2]
    assert [row.layer for row in measure_decays(model, ids_of(1, 8))] == [1]
    assert measure_operators(LanguageModel(preset("mamba2", hidden_size=16, num_layers=1)), ids_of(1, 8)) == []
    assert_raises(ValueError, r"\[N, T\]", measure_operators, model, torch.zeros(4, dtype=torch.long))


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "text").write_bytes(TEXT)
    checkpoint.save(hybrid(layers=(0, 2)), tmp_path / "run" / "both")
    checkpoint.save(LanguageModel(preset("tnl", hidden_size=16, num_layers=2, num_heads=2)), tmp_path / "run" / "tnl")
    return tmp_path / "run"


def show_operators(result, output):
    show(*tables.operator_tables(result))
    return [write_json(output / KOOPMAN_JSON, result), *save(operators(result), output)]


def write_all(folder, text, output):
    options = {"length": 32, "sequences": 3}
    result = measure_models([folder], [text], **options).to_dict()
    return [*tables.write_tables(result, output), *show_operators(tables.operators_of(result), output)]


def test_decays_and_operators_end_to_end(run_dir, tmp_path, capsys):
    output = tmp_path / "out"
    files = write_all(run_dir, tmp_path / "text", output)
    names = ["decays.json", "decays.csv", "koopman.json", "koopman.png", "koopman.svg"]
    assert [file.name for file in files] == names
    out = capsys.readouterr().out
    for expected in ("Koopman operators of mamba2+ska", "3 × 32 tokens", "layer 2: 32 tokens in "):
        assert expected in out
    decay_models = json.loads((output / "decays.json").read_text())["models"]
    assert [[layer["layer"] for layer in model["layers"]] for model in decay_models] == [[1], [0, 1]]
    data = json.loads((output / "koopman.json").read_text(), parse_constant=pytest.fail)
    assert [[layer["layer"] for layer in model["layers"]] for model in data["models"]] == [[0, 2]]
    before = {name: (output / name).read_bytes() for name in names}
    write_all(run_dir, tmp_path / "text", output)
    assert {file.name: file.read_bytes() for file in output.iterdir()} == before


def test_the_table_fits_a_terminal(run_dir, tmp_path, capsys):
    result = read_operators([run_dir], [tmp_path / "text"], length=32)
    for layer in result["models"][0]["layers"]:
        layer |= {"rank": 64, "retries": 3}
        layer["heads"] = [{**layer["heads"][0], "head": h, "condition": 1.23e6} for h in range(12)]
    show(*tables.operator_tables(result))
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line.rstrip()) for line in lines) <= 80
    assert "3 factorisations repeated" in "\n".join(lines)


def test_no_operator_no_output(run_dir, tmp_path, capsys):
    main(["spectrum", str(run_dir / "tnl"), "--text", str(tmp_path / "text"), "--output", str(tmp_path / "out")])
    assert "Koopman" not in capsys.readouterr().out
    assert not list((tmp_path / "out").glob("koopman*"))
    assert (tmp_path / "out" / "decays.json").exists()


def test_operators_without_any_decay(tmp_path):
    (tmp_path / "text").write_bytes(TEXT)
    checkpoint.save(hybrid("llama"), tmp_path / "run")
    result = measure_models([tmp_path / "run"], [tmp_path / "text"], length=32).to_dict()
    assert result["models"][0]["layers"] == []
    figure = draw(decays(result))
    assert [text.get_text() for axes in figure.axes for text in axes.texts] == ["no layer with a decay"] * 3
    found = read_operators([tmp_path / "run"], [tmp_path / "text"], length=32)
    assert len(show_operators(found, tmp_path / "out")) == 3


def test_a_text_below_a_chunk_is_written_and_drawn(run_dir, tmp_path):
    show_operators(read_operators([run_dir], [tmp_path / "text"], length=5), tmp_path)
    data = json.loads((tmp_path / "koopman.json").read_text(), parse_constant=pytest.fail)
    assert data["models"][0]["layers"][0]["heads"][0]["unexplained"] is None


def made_up(layers, heads, power=2):
    """Return the result of `operators_of` for made-up models with the given numbers of layers."""
    draw = generator("made up")

    def head(h):
        return {"head": h, "eigenvalues": (torch.rand(5, 2, generator=draw) - 0.5).tolist()}

    return {"models": [
        {"model": f"model ${n}", "layers": [
            {"layer": i, "power": power, "heads": [head(h) for h in range(heads)]} for i in range(count)
        ]} for n, count in enumerate(layers)
    ]}  # fmt: skip


@cases("layers, heads, panels", ([1], 1, 1), ([2], 12, 2), ([1] * 5, 2, 5), ([2, 3], 4, 5), ([24], 4, 6))
def test_figure(layers, heads, panels):
    result = made_up(layers, heads)
    data = operators(result)
    figure = draw(data)
    figure.canvas.draw()
    assert len(figure.axes) == panels
    unit, half, *dots = figure.axes[0].lines
    assert [line.get_xydata().tolist() for line in dots] == [
        head["eigenvalues"] for head in result["models"][0]["layers"][0]["heads"]
    ]
    assert len({(line.get_color(), line.get_marker()) for line in dots}) == heads
    assert [abs(complex(*line.get_xydata()[7])) for line in (unit, half)] == pytest.approx([1, math.sqrt(0.5)])
    assert len(data.legend) == heads + 1


def test_without_a_power_nothing_is_filtered():
    data = operators(made_up([1], 2, power=0))
    assert len(data.panels[0].series) == 1 + 2
    assert list(data.legend) == ["head 0", "head 1"]
