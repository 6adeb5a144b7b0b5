"""Graphs of torch.export and ONNX: the numbers of the model, and layers that have none."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from combinations import SIZES
from helpers import add_noise

from halflife import LanguageModel, preset
from halflife.cli import main
from halflife.export import int8
from halflife.export.graphs import check, export, flat, initial_state, names
from halflife.models import PRESETS, checkpoint
from halflife.models.tensor_file import read_tensors

NAMES = [*PRESETS, "mamba2+post", "mamba2+gate_rank", "mamba2+ska", "mamba2+attention", "simple+tpe"]
WITHOUT_GRAPH = {"llama": "attention", "echo": "ska", "echo_paper": "ska", "mamba2+ska": "ska"}
WITHOUT_GRAPH |= {"mamba2+attention": "attention", "fox": "attention"}


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
@pytest.mark.filterwarnings("default")  # torch's exporter uses functions of torch that are deprecated
@pytest.mark.parametrize(("name", "form"), [("mamba2", "chunked"), ("gated_deltanet", "token loop")])
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


# ------------------------------------------------------------------------------------------------------ int8 weights


def test_an_int8_map_is_the_map_up_to_half_a_step_of_its_scale():
    """Activations and scales are bfloat16, so both are chosen from its numbers. The outputs are padded to 32 inside."""
    weight, bias = torch.randn(19, 32).bfloat16().float(), torch.randn(19)
    weight[3] = 0
    x = torch.randn(2, 3, 32).bfloat16().float()
    small = int8.Int8Linear(weight, bias)
    step = weight.abs().amax(-1) / 127
    exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    allowed = x.abs().sum(-1, keepdim=True) * step * 0.5 * 1.6 + 2**-8 * exact.abs() + 1e-2
    assert small(x).shape == (2, 3, 19)
    assert ((small(x) - exact).abs() <= allowed).all()
    assert (small(x) - exact).abs().max() > 1e-4  # it is no float32 map


@pytest.mark.parametrize("name", ["mamba2", "rwkv7", "gla"])
def test_a_quantised_model_is_smaller_and_reads_nearly_the_same(name):
    model = build(name)
    ids = torch.randint(SIZES["vocab_size"], (2, 9))
    with torch.no_grad():
        expected, _ = model(ids)
        before = int8.weight_bytes(model)
        assert int8.quantize(model) > 4
        found, _ = model(ids)
    assert int8.weight_bytes(model) < 0.6 * before
    assert 0 < (found - expected).abs().max() < 0.15 * expected.abs().max()


def test_quantize_prints_what_int8_costs_and_saves(tmp_path, capsys, refused):
    torch.manual_seed(0)
    model = LanguageModel(preset("mamba2", **{**SIZES, "vocab_size": 256})).eval()
    checkpoint.save(model, tmp_path / "model", "bytes")
    text = tmp_path / "text"
    text.write_text("a rose is a rose " * 9)
    main(["quantize", str(tmp_path / "model"), "--text", str(text), "--tokens", "100"])
    lines = capsys.readouterr().out.splitlines()
    ids = torch.tensor(list(text.read_bytes()[:100]))
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(ids[None, :-1])[0][0], ids[1:]) / math.log(2)
    assert lines[1].startswith(f"float32  {loss:.4f} bits per byte")
    assert lines[2].startswith("int8")
    main(["generate", str(tmp_path / "model"), "a", "--greedy", "--max-new-tokens", "2", "--quantize", "int8"])
    assert "need tokens ≥ 2" in refused("quantize", str(tmp_path / "model"), "--text", str(text), "--tokens", "1")


@pytest.mark.slow
def test_the_benchmark_of_int8_weights_measures_loss_bytes_and_times():
    script = Path(__file__).parent.parent / "benchmarks" / "int8.py"
    done = subprocess.run([sys.executable, str(script), "--quick"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines()[-2:]]
    assert [row[1] for row in rows] == ["float32", "int8"]
    assert [float(row[-1]) for row in rows] == pytest.approx([7.8, 7.8], abs=0.5)  # after 4,096 bytes, below log2(256)
    assert float(rows[1][2].split()[0]) <= float(rows[0][2].split()[0])
