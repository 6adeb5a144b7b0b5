"""Graphs of torch.export and ONNX: the numbers of the model, and layers that have none."""

import json

import pytest
import torch
from combinations import SIZES
from helpers import add_noise

from halflife import LanguageModel, preset
from halflife.cli import main
from halflife.export.graphs import check, export, flat, initial_state, names
from halflife.models import PRESETS, checkpoint
from halflife.models.tensor_file import read_tensors

NAMES = [*PRESETS, "mamba2+post", "mamba2+gate_rank", "mamba2+ska", "mamba2+attention", "simple+tpe"]
WITHOUT_GRAPH = {"llama": "attention", "echo": "ska", "echo_paper": "ska", "mamba2+ska": "ska"}
WITHOUT_GRAPH["mamba2+attention"] = "attention"


def build(name):
    return add_noise(LanguageModel(preset(name, **{**SIZES, "num_layers": 2})).eval())


@pytest.mark.parametrize("name", WITHOUT_GRAPH)
def test_a_layer_without_a_graph_is_named_with_its_place_and_the_reason(name):
    with pytest.raises(ValueError, match=rf"{WITHOUT_GRAPH[name]} \(blocks\.1\.mixer\): it|blocks\.0\.mixer") as error:
        check(build(name))
    assert "state" in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name not in WITHOUT_GRAPH])
@pytest.mark.parametrize("tokens", [1, 16])
def test_a_graph_of_torch_gives_the_numbers_of_the_model(name, tokens):
    """The graph holds no operation of ours (`export` checks it), and two pieces one after the other agree."""
    model = build(name)
    graph = export(model, tokens, batch=2).module()
    state = initial_state(model, batch=2)
    given = flat(state)
    with torch.no_grad():
        for _ in range(2):
            ids = torch.randint(SIZES["vocab_size"], (2, tokens))
            logits, state = model(ids, state)
            found, *given = graph(ids, *given)
            torch.testing.assert_close(found, logits, rtol=0, atol=1e-4)
            for got, expected in zip(given, flat(state), strict=True):
                torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_the_state_before_the_first_token_is_what_no_state_is():
    model = build("lightnet")  # its sums of nothing are −∞
    state = initial_state(model, batch=2)
    ids = torch.randint(SIZES["vocab_size"], (2, 6))
    with torch.no_grad():
        assert torch.equal(model(ids, state)[0], model(ids)[0])
    assert torch.isinf(dict(zip(names(state), flat(state), strict=True))["0.decay"]).all()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "form"), [("mamba2+gate_rank", "chunked"), ("gated_deltanet", "token loop")])
def test_onnx_graphs_continue_a_text_as_the_model_does(name, form, tmp_path, capsys):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = build(name)
    checkpoint.save(model, tmp_path / "model")
    main(["export", str(tmp_path / "model"), "--onnx", str(tmp_path / "onnx"), "--prompt-tokens", "8"])
    printed = capsys.readouterr().out
    assert f"prompt.onnx: 8 tokens ({form})" in printed
    assert printed.count("differs from the model by") == 2
    about = json.loads((tmp_path / "onnx" / "graphs.json").read_text())
    prompt, step = (runtime.InferenceSession(str(tmp_path / "onnx" / f"{graph}.onnx")) for graph in ("prompt", "step"))
    assert [entry.name for entry in step.get_inputs()] == about["inputs"]
    initial, _ = read_tensors(tmp_path / "onnx" / "initial_state.safetensors", "cpu")
    ids, found = torch.randint(SIZES["vocab_size"], (1, 10)), []
    state = [initial[name].numpy() for name in about["inputs"][1:]]
    for graph, start, end in ((prompt, 0, 8), (step, 8, 9), (step, 9, 10)):
        feed = dict(zip(about["inputs"], [ids[:, start:end].numpy(), *state], strict=True))
        logits, *state = graph.run(None, feed)
        found.append(torch.from_numpy(logits))
    with torch.no_grad():
        torch.testing.assert_close(torch.cat(found, 1), model(ids)[0], rtol=0, atol=1e-4)


def test_what_cannot_be_exported_ends_the_command(tmp_path, refused, monkeypatch):
    checkpoint.save(build("llama"), tmp_path / "model")
    command = ("export", str(tmp_path / "model"), "--onnx", str(tmp_path / "onnx"))
    monkeypatch.setattr("halflife.cli.require", lambda *_: None)  # the packages of ONNX are not asked for yet
    assert "llama cannot be exported because of attention" in refused(*command)
    assert "prompt_tokens ≥ 2" in refused(*command, "--prompt-tokens", "1")
