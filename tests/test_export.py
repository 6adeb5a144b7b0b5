"""Graphs of torch.export and ONNX: the numbers of the model for every preset and modifier, and int8 weights."""

import copy
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from combinations import SIZES, every_part
from helpers import add_noise, assert_close, assert_raises, generator
from pairwise import crossed

from halflife import LanguageModel, preset
from halflife.cli import main
from halflife.export import int8
from halflife.export.graphs import export, fixed_caches, flat, growing, initial_state, names, needs_loop
from halflife.export.onnx import INITIAL, write_graph, write_onnx
from halflife.layers import LAYERS
from halflife.models import checkpoint
from halflife.models.tensor_file import read_tensors
from halflife.ops import koopman_attention
from halflife.ops.koopman.call import NORMALIZATIONS, OPERATORS
from halflife.ops.koopman.solve import eliminate

NAMES = every_part()
deprecated = pytest.mark.filterwarnings("ignore")  # torch's exporter uses functions of torch that are deprecated


def build(name):
    config = preset(name, **SIZES)
    if config.hybrid.get("mixer") == "ska":  # several chunks of a few tokens, with keys of a small rank
        config = preset(name, **SIZES, hybrid={"options": {"chunk_size": 5, "rank": 6}})
    return add_noise(LanguageModel(config).eval())


def assert_graph_is_model(model, tokens, pieces, rtol=1e-4, batch=2):
    """Pieces that the graph reads one after the other have the logits and the states of the model."""
    max_length = tokens * pieces if growing(model) else None
    graph = export(model, tokens, batch, max_length=max_length).module()
    start = initial_state(model, batch, max_length)
    # The papers' SKA keeps a first token that it reads without a state for its next chunk, and with one in its sums.
    state = start if model.config.name.endswith(("ska_paper", "echo_paper")) else None
    model_is_tree = needs_loop(model)
    order, given = names(start), flat(start)
    with torch.no_grad():
        for _ in range(pieces):
            ids = torch.randint(SIZES["vocab_size"], (batch, tokens))
            logits, state = model(ids, state)
            found, *given = graph(ids, *given)
            torch.testing.assert_close(found, logits, rtol=0, atol=rtol)
            after = dict(zip(order, given, strict=True))
            for name, expected in zip(names(state), flat(state), strict=True):
                if name.endswith(".inverse"):  # it follows from the sums, and the graph computes it again
                    continue
                # A cache of the graph has free slots behind those of the model. All other shapes are equal.
                # Log-linear attention has all its levels there.
                assert after[name].shape == expected.shape or max_length or "pending" in name or model_is_tree
                got = after[name][tuple(slice(n) for n in expected.shape)]
                torch.testing.assert_close(got, expected, rtol=rtol, atol=rtol)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("tokens", "pieces"), [(1, 12), (16, 2)])
def test_a_graph_of_torch_gives_the_numbers_of_the_model(name, tokens, pieces):
    """The graph holds no operation of ours (`export` checks it). K = 2 of the papers' SKA amplifies rounding.

    With decays G has fewer keys, and its condition number is larger (1.6e-4 measured).
    """
    papers, decays = name.endswith(("ska_paper", "echo_paper")), name.endswith(("ska_decay", "ska_post"))
    assert_graph_is_model(build(name), tokens, pieces, 1e-3 if papers else 6.5e-4 if decays else 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_step_of_float64_is_the_model_up_to_rounding(name):
    assert_graph_is_model(build(name).double(), 1, 7, rtol=1e-9)


def test_the_step_of_attention_and_koopman_attention_is_the_model():
    assert_graph_is_model(build("llama+ska").double(), 1, 7, rtol=1e-12)


def test_every_layer_of_the_registry_is_among_the_exported_ones():
    found = set()
    for name in NAMES:
        config = preset(name, **SIZES)
        found |= {config.mixer, config.position, *(kind["mixer"] for kind in config.hybrids)}
    assert set(LAYERS) <= found


def test_a_cache_that_grows_needs_a_length_and_other_models_take_none():
    llama, mamba2 = build("llama"), build("mamba2")
    for model, length, message in (
        (llama, None, r"llama needs max_length.*\(blocks\.0\.mixer, blocks\.1\.mixer\)"),
        (llama, 3, "max_length must be at least 4"),
        (mamba2, 3, "mamba2 reads sequences of any length"),
    ):
        assert_raises(ValueError, message, export, model, 4, max_length=length)
    assert [*growing(build("mamba2+attention"))] == ["blocks.1.mixer"]
    assert not growing(build("mamba2+swa"))  # a window has as many slots as it sees tokens


def test_a_full_cache_is_an_error():
    model = build("llama")
    ids, state = torch.randint(SIZES["vocab_size"], (1, 4)), initial_state(model, max_length=3)
    with torch.no_grad(), fixed_caches(model, 3):
        for token in ids.split(1, 1)[:3]:
            _, state = model(token, state)
        assert_raises(RuntimeError, r"is full: it holds 3 tokens \(max_length\)", model, ids[:, 3:], state)
    assert model(ids)[1][0]["keys"].shape[1] == 4  # it grows again


def koopman_inputs(*lengths, rank=5, noise=1.0, dtype=torch.float64):
    draw = generator(lengths, rank, noise)
    for length in lengths:
        q, k, v = (torch.randn(2, length, 3, size, generator=draw, dtype=torch.float64) for size in (rank, rank, 4))
        yield tuple(x.to(dtype) for x in (q, 1 - noise + noise * k, v))


def assert_exported(monkeypatch, settings, weights=lambda k, v: {}):
    """In pieces that end within, at and beyond the ends of chunks. While it is exported the op takes this form."""
    states = [None, None]
    for q, k, v in koopman_inputs(3, 1, 6, 2, 9):
        given = {**settings, **weights(k, v), "mix": 0.7, "output_final_state": True}
        expected, states[0] = koopman_attention(q, k, v, initial_state=states[0], backend="reference", **given)
        with monkeypatch.context() as exporting:
            exporting.setattr(torch.compiler, "is_exporting", lambda: True)
            found, states[1] = koopman_attention(q, k, v, initial_state=states[1], **given)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)
        torch.testing.assert_close(states[1], states[0], rtol=1e-10, atol=1e-11)


CHUNKS = [(4, "chunk"), (4, "token"), (1, "chunk")]


@crossed(strength=1, normalization=NORMALIZATIONS, operator=OPERATORS, chunk=CHUNKS, power=[0, 2])
def test_koopman_attention_as_a_graph_is_its_definition(normalization, operator, chunk, power, monkeypatch):
    settings = {"normalization": normalization, "operator": operator, "chunk_size": chunk[0], "refresh": chunk[1]}
    assert_exported(monkeypatch, {**settings, "power": power, "gamma": 1.2})


@crossed(strength=1, normalization=NORMALIZATIONS, granularity=["scalar", "vector"], chunk=CHUNKS[:2])
def test_koopman_attention_with_decays_as_a_graph_is_its_definition(normalization, granularity, chunk, monkeypatch):
    def weights(k, v):
        g = -k.abs() / 3 if granularity == "vector" else -k[..., 0].abs() / 3
        return {"beta": v[..., 0].sigmoid(), "g": g}

    settings = {"normalization": normalization, "chunk_size": chunk[0], "refresh": chunk[1]}
    assert_exported(monkeypatch, settings, weights)


def test_elimination_in_float32_is_as_exact_as_the_factorisation_of_the_model(monkeypatch):
    """Measured: 2.7e-6 and 2.2e-6 of the largest output for random keys, 4.8e-4 and 3.1e-4 for keys alike."""
    for noise in (1.0, 0.1):
        (tokens, query) = koopman_inputs(64, 16, rank=48, noise=noise)
        _, state = koopman_attention(*tokens, output_final_state=True)
        exact, _ = koopman_attention(*query, initial_state=state)
        narrow = {name: x.float() if x.is_floating_point() else x for name, x in state.items()}
        query = tuple(x.float() for x in query)
        own, _ = koopman_attention(*query, initial_state=narrow, backend="chunked")
        with monkeypatch.context() as exporting:
            exporting.setattr(torch.compiler, "is_exporting", lambda: True)
            graph, _ = koopman_attention(*query, initial_state=narrow)
        assert 0 < (graph - exact).abs().max() < 3 * (own - exact).abs().max()


def test_pivots_below_the_ridge_are_rounding_errors():
    """Sums of a long text can be wrong by more than the ridge. The factor stays finite."""
    gram = torch.diag(torch.tensor([1.0, 0.5, -1e-3]))
    assert eliminate(gram, 1e-3).diagonal().tolist() == pytest.approx([1, 2**0.5, 1e3**0.5])
    factor = torch.linalg.cholesky(torch.eye(3) + torch.ones(3, 3))
    torch.testing.assert_close(eliminate(factor @ factor.mT, 1e-3), factor.inverse().mT)


def test_the_state_before_the_first_token_is_what_no_state_is():
    model = build("lightnet")  # its sums of nothing are −∞
    state = initial_state(model, batch=2)
    ids = torch.randint(SIZES["vocab_size"], (2, 6))
    with torch.no_grad():
        assert torch.equal(model(ids, state)[0], model(ids)[0])
    assert torch.isinf(dict(zip(names(state), flat(state), strict=True))["0.decay"]).all()


@pytest.mark.slow
@deprecated
@pytest.mark.parametrize("name", NAMES)
def test_the_step_of_every_preset_is_an_onnx_graph(name, tmp_path):
    """`write_graph` compares the graph with the model."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = build(name)
    max_length = 2 if growing(model) else None
    state = initial_state(model, 2, max_length)
    written = write_graph(model, tmp_path / "step.onnx", 1, state, max_length)
    assert written.form == "step"
    assert written.path.stat().st_size > 0


@pytest.mark.slow
@deprecated
@pytest.mark.parametrize("name", ["mamba2", "gated_deltanet", "mamba2+attention", "mamba2+ska"])
def test_onnx_graphs_continue_a_text_as_the_model_does(name, tmp_path, capsys):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = build(name)
    checkpoint.save(model, tmp_path / "model")
    length = ["--max-length", "10"] if growing(model) else []
    main(["export", str(tmp_path / "model"), "--onnx", str(tmp_path / "onnx"), "--prompt-tokens", "8", *length])
    printed = capsys.readouterr().out
    form = "token loop" if name == "gated_deltanet" else "chunked"  # ONNX has no triangular solves
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
    assert about["max_length"] == (10 if length else None)
    if length:  # the eleventh token has no slot in the cache
        with pytest.raises(Exception, match="invalid indice found, indice = 10"):
            step.run(None, dict(zip(about["inputs"], [ids[:, :1].numpy(), *state], strict=True)))


SAVED = {}


class Program:
    """A graph of torch in the place of ONNX's program of it, and of onnxruntime's session."""

    def __init__(self, graph, *, input_names, **_):
        self.graph, self.inputs = graph.module(), input_names

    def save(self, path):
        SAVED[path] = self
        Path(path).touch()

    def get_inputs(self):
        return [SimpleNamespace(name=name) for name in self.inputs]

    def run(self, _, given):
        assert [*given] == self.inputs
        return [x.detach().numpy() for x in self.graph(*map(torch.from_numpy, given.values()))]


@pytest.fixture
def without_onnx(monkeypatch):
    """Graphs of torch in the place of ONNX's."""
    runtime = SimpleNamespace(InferenceSession=lambda path, providers: SAVED.pop(path))
    monkeypatch.setitem(sys.modules, "onnxruntime", runtime)
    monkeypatch.setattr(torch.onnx, "export", Program)


def small(name):
    return LanguageModel(preset(name, **{**SIZES, "num_layers": 1})).eval()


@deprecated
def test_two_graphs_are_written_checked_and_described(tmp_path, without_onnx):
    model, length = small("llama"), 10
    graphs = write_onnx(model, tmp_path, tokens=4, max_length=length)
    assert [(graph.path.name, graph.tokens, graph.form) for graph in graphs] == [
        ("step.onnx", 1, "step"), ("prompt.onnx", 4, "chunked")
    ]  # fmt: skip
    assert all(graph.path.exists() and graph.difference < 1e-5 for graph in graphs)
    about, (tensors, _) = json.loads((tmp_path / "graphs.json").read_text()), read_tensors(tmp_path / INITIAL, "cpu")
    state = initial_state(model, 1, length)
    assert about["inputs"] == ["ids", *names(state)]
    assert about["outputs"] == ["logits", *(f"{name}.after" for name in names(state))]
    assert about["max_length"] == length
    assert about["model"] == model.config.to_dict()
    for name, x in zip(names(state), flat(state), strict=True):
        assert torch.equal(tensors[name], x)
        assert about["state"][name] == [str(x.dtype).removeprefix("torch."), *x.shape]


def test_what_onnx_cannot_express_is_a_token_loop_or_an_error(tmp_path, monkeypatch):
    """The first form that is tried is in chunks, but for log-linear attention, whose chunks are no graph."""

    class Graph(torch.export.ExportedProgram):
        def __init__(self, model, tokens, batch, loop, max_length):
            self.loop = loop
            tried.append(loop)

        def run_decompositions(self, given):
            return self

    def convert(graph, **options):
        if not graph.loop or refuses:
            raise RuntimeError("the exporter failed") from ValueError("no such\noperation")
        return SimpleNamespace(save=lambda path: None)

    tried, refuses = [], False
    monkeypatch.setattr("halflife.export.onnx.export", Graph)
    monkeypatch.setattr("halflife.export.onnx._difference", lambda *_: 0.0)
    monkeypatch.setattr(torch.onnx, "export", convert)
    message = "ONNX cannot express how {} reads 4 tokens at once: no such operation"
    for name, loops in (("retnet", [False, True]), ("mamba2+log_linear", [True])):
        model = small(name)
        given = model, tmp_path / "prompt.onnx", 4, initial_state(model), None
        refuses = False
        assert write_graph(*given).form == "token loop"
        refuses = True
        assert_raises(ValueError, message.format(re.escape(name)), write_graph, *given)
        assert tried == loops * 2
        tried.clear()


def test_no_graph_is_left_that_failed_its_check(tmp_path, monkeypatch):
    class Program:
        def save(self, path):
            Path(path).touch()
            Path(f"{path}.data").touch()  # large weights are beside the graph

    monkeypatch.setattr("halflife.export.onnx._convert", lambda *_, **__: Program())
    monkeypatch.setattr("halflife.export.onnx._difference", lambda *_: math.nan)
    model = build("mamba2")
    with pytest.raises(ValueError, match="differs from the model by nan"):
        write_graph(model, tmp_path / "step.onnx", 1, initial_state(model), None)
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_exported_ends_the_command(tmp_path, refused, monkeypatch):
    checkpoint.save(build("llama"), tmp_path / "model")
    command = ("export", str(tmp_path / "model"), "--onnx", str(tmp_path / "onnx"))
    monkeypatch.setattr("halflife.cli.require", lambda *_: None)  # the packages of ONNX are not asked for yet
    assert "llama needs max_length, the most tokens of a sequence" in refused(*command)
    assert "max_length must be at least 16" in refused(*command, "--max-length", "15")
    assert "prompt_tokens ≥ 2" in refused(*command, "--prompt-tokens", "1")


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
    assert small(x[:, :0]).shape == (2, 0, 19)
    assert_close(copy.deepcopy(small).half()(x.half()).float(), small(x), 1e-2)
    assert ((small(x) - exact).abs() <= allowed).all()
    assert (small(x) - exact).abs().max() > 1e-4  # it is no float32 map


@pytest.mark.parametrize("name", ["mamba2", "rwkv7", "gla"])
def test_a_quantised_model_is_smaller_and_reads_nearly_the_same(name):
    model = build(name)
    ids = torch.randint(SIZES["vocab_size"], (2, 9))
    with torch.no_grad():
        expected, _ = model(ids)
        assert int8.quantize(model) > 4
        found, _ = model(ids)
    small = [module.weight for module in model.modules() if isinstance(module, int8.Int8Linear)]
    assert all(weight.dtype == torch.int8 for weight in small)
    assert 0 < (found - expected).abs().max() < 0.15 * expected.abs().max()


def test_generate_with_int8_weights(tmp_path):
    model = LanguageModel(preset("mamba2", **{**SIZES, "vocab_size": 256})).eval()
    checkpoint.save(model, tmp_path / "model", "bytes")
    main(["generate", str(tmp_path / "model"), "a", "--greedy", "--max-new-tokens", "2", "--quantize", "int8"])


@pytest.mark.slow
def test_the_benchmark_of_int8_weights_measures_loss_bytes_and_times():
    script = Path(__file__).parent.parent / "benchmarks" / "int8.py"
    done = subprocess.run([sys.executable, str(script), "--quick"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines()[-2:]]
    assert [row[1] for row in rows] == ["float32", "int8"]
    assert [float(row[-1]) for row in rows] == pytest.approx([7.8, 7.8], abs=0.5)  # after 4,096 bytes, below log2(256)
    assert float(rows[1][2].split()[0]) <= float(rows[0][2].split()[0])
