"""Benchmarks of whole models time what they state, and read memory and pace correctly. No test asserts a time."""

import importlib
import json
import mmap
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import timing
import torch
from helpers import assert_raises

from halflife import LanguageModel, Session, param_groups, preset
from halflife.cli import main
from halflife.evaluation import throughput
from halflife.evaluation.throughput import Decoder, interleaved
from halflife.hf import HalflifeForCausalLM
from halflife.report.tables.memory import faster_from

FOLDER = Path(__file__).parent.parent / "benchmarks"
MB = 1 << 20
linux = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from Linux's /proc")


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


@pytest.fixture
def clock(monkeypatch):
    """A clock that only `clock.now += …` moves."""

    class Clock:
        now = 0.0

    monkeypatch.setattr(time, "perf_counter", lambda: Clock.now)
    return Clock


def small(name="mamba2", **fields):
    torch.manual_seed(0)
    return LanguageModel(preset(name, hidden_size=16, num_layers=2, num_heads=2, vocab_size=11, **fields))


def tokens(*shape):
    return torch.randint(11, shape)


def test_candidates_take_turns_and_medians_count(clock):
    """A takes 1, 9 and 2 seconds and B always 5, 27 in all. A fourth round runs only if more seconds are asked for."""
    for seconds, rounds in ((0.0, 3), (26.9, 3), (27.1, 4)):
        calls, times = [], iter((1.0, 9.0, 2.0, 2.0))

        def run(name, took, calls=calls):
            calls.append(name)
            clock.now += took

        candidates = {"a": lambda: run("a", next(times)), "b": lambda: run("b", 5.0)}  # noqa: B023
        assert interleaved(candidates, rounds=3, seconds=seconds) == {"a": 2.0, "b": 5.0}
        assert calls == ["a", "b"] * rounds


def test_pace(clock, script):
    """Seven tokens make two stretches of three; time before the first tick counts for the first token."""
    Pace = script("streaming").Pace
    pace = Pace(3)
    for took in (1.0, 2.0, 6.0, 4.0, 4.0, 1.0, 100.0):
        clock.now += took
        pace.tick()
    assert [(stretch.tokens, stretch.seconds) for stretch in pace.stretches] == [(3, 2.0), (6, 4.0)]
    assert_raises(ValueError, "at least 1 token", Pace, 0)


@pytest.mark.parametrize("bf16", [False, True])
def test_a_step_is_forward_backward_and_adamw(bf16):
    """Three steps with transformers' loss give losses and parameters that are equal to the bit."""
    model, ids = small(), tokens(2, 9)
    theirs = HalflifeForCausalLM.of(small()).train()
    step = throughput.train_step(model.eval(), bf16=bf16)
    optimizer = torch.optim.AdamW(param_groups(theirs, 0.1, 1e-4), lr=1e-4)
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = theirs(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert step(ids).item() == loss.item()
    assert model.training
    start = small().state_dict()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, theirs.model.get_parameter(name))
        assert not torch.equal(parameter, start[name]), name
        assert parameter.grad is None


@pytest.mark.parametrize("name", ["mamba2", "echo", "llama"])
def test_a_decoder_goes_on_as_a_session(name):
    """After two pieces it decodes the six likeliest tokens, as `Session.sample` does, with the same state."""
    model, ids = small(name), tokens(1, 7)
    decoder = Decoder(model).read(ids[:, :4]).read(ids[:, 4:])
    session = Session(model).feed(ids[0, :4]).feed(ids[0, 4:])
    for token in session.sample(6, temperature=0):
        assert decoder.token.item() == token
        decoder()
    assert decoder.position == session.position == 13
    for got, expected in zip(decoder.state, session.state, strict=True):
        for part in expected:
            assert torch.equal(got[part], expected[part])
    numbers = [x for layer in decoder.state for x in layer.values() if x.is_floating_point()]
    assert sum(x.nbytes for x in numbers) == 4 * model.state_size(13)


def pages():
    """64 MB from the kernel. A tensor might get memory that the allocator of this process holds already."""
    held = mmap.mmap(-1, 64 * MB)
    for start in range(0, len(held), mmap.PAGESIZE):
        held[start] = 1
    return held


@linux
def test_memory_that_is_held():
    before = timing.resident_memory()
    held = pages()
    assert 60 * MB < timing.resident_memory() - before < 72 * MB  # the kernel's counters lag by up to 0.3 MB a thread
    assert timing.resident_memory("VmHWM") >= before + 60 * MB
    held.close()
    assert timing.resident_memory() - before < 8 * MB
    assert_raises(ValueError, "choose from VmRSS, VmHWM", timing.resident_memory, "VmSwap")


@linux
def test_peak_is_of_this_run_alone():
    """The peak counts memory that is freed before the end, and not memory that was freed before the start."""
    pages().close()
    assert 60 * MB < timing.peak_memory(lambda: pages().close()) < 72 * MB
    assert timing.peak_memory(lambda: None) < 8 * MB


def test_without_proc(monkeypatch, tmp_path):
    monkeypatch.setattr(timing, "STATUS", tmp_path / "status")
    assert_raises(FileNotFoundError, "only Linux has", timing.peak_memory, lambda: None)


def test_a_timed_token_follows_the_one_before(script):
    """The cache of attention is then copied once for many tokens, and not for each, and keeps near its length."""
    timing = script("timing")
    mixer = script("decode").layers.build("attention", hidden_size=16, num_heads=2)
    read, steps = [], timing.CARRIED + 2

    @torch.no_grad()
    def step(state):
        read.append(state)
        return mixer(torch.randn(1, 1, 16), state)[1]

    context = step({"position": torch.tensor([5]), **{name: torch.randn(1, 5, 2, 8) for name in ("keys", "values")}})
    read.clear()
    decode = timing.decoding(step, context)
    for _ in range(steps):
        decode()
    lengths = [state["keys"].shape[1] for state in read]
    assert lengths == [*range(6, 6 + timing.CARRIED), 6, 7]
    places = [state["keys"].data_ptr() for state in read]
    copies = sum(before != after for before, after in pairwise(places))
    assert copies < steps / 4


def test_counters_are_no_bytes_of_a_state(script):
    layer = {"position": torch.ones(3, dtype=torch.long), "memory": torch.zeros(2, 3), "taps": torch.zeros(5).half()}
    state = (layer, {"memory": torch.zeros(4), "is_initialized": True})
    assert script("throughput")._state_bytes(state) == 24 + 10 + 16


def test_models_of_the_table_have_as_many_parameters(script):
    """Every model has 10 M parameters within 5 %; a peer has exactly as many as its equal in halflife."""
    table = script("throughput")
    with torch.device("meta"):
        sizes = {name: table._size(table.build(name)) for name in (*table.DEPTHS, table.BARE, table.LLAMA)}
    assert all(size == pytest.approx(10e6, rel=0.05) for size in sizes.values())
    assert sizes[table.LLAMA] == sizes["llama"]


def test_peers_compute_what_ours_do(script, monkeypatch):
    """transformers' Mamba-2 with our weights gives our logits; both peers decode to the logits of a full pass."""
    table = script("throughput")
    monkeypatch.setattr(table, "HIDDEN", 64)
    monkeypatch.setattr(table, "BARE_DEPTH", 2)
    monkeypatch.setitem(table.DEPTHS, "llama", 2)
    ids = torch.randint(256, (1, 20))
    with torch.no_grad():
        ours, theirs = (table.build(name).eval()(ids)[0] for name in (table.BARE, table.MAMBA))
        # The measured error is 3.0e-7 for logits up to 0.6, and below, in decoding, 2.5e-7 for logits up to 1.4.
        assert (ours - theirs).abs().max() < 1.2e-6
        for name in (table.MAMBA, table.LLAMA):
            model = table.build(name).eval()
            whole = model(ids)[0]
            decoder = Decoder(model).read(ids[:, :-1])
            assert torch.equal(decoder.token, whole[:, -2:-1].argmax(-1))
            after = model(ids[:, -1:], decoder.state)[0]
            assert (after - whole[:, -1:]).abs().max() < 1.2e-6
    # The cache has keys and values of 64 numbers each, of 20 tokens in two layers; the peer's grows in place.
    assert table._state_bytes(decoder.state) == 4 * 2 * 64 * 20 * 2


def test_faster_from(script):
    faster_from = script("throughput").faster_from
    assert faster_from({512: 0.9, 1024: 1.1, 2048: 1.5}) == "1,024"
    assert faster_from({512: 1.2, 1024: 0.9, 2048: 1.5}) == "2,048"
    assert faster_from({512: 1.2, 1024: 1.0}) == "never"


def test_streams(script):
    streaming = script("streaming")
    found = {name: streaming.stream(name, 20) for name in ("generate() mamba2", "mamba2", "llama")}
    for stretches in found.values():
        assert [stretch.tokens for stretch in stretches] == list(range(2, 21, 2))
        assert all(stretch.seconds > 0 and stretch.resident > MB for stretch in stretches)
    lines = list(streaming.table(found))
    assert len(lines) == 6  # two of the heading, three stretches and the ratio
    assert lines[0] == "| tokens | generate() mamba2 | mamba2 | llama |"
    assert lines[-1].count("×") == 3


@pytest.mark.slow
def test_numbers_of_a_quick_run_are_not_written(tmp_path):
    for name in ("throughput", "streaming", "loss"):
        command = [sys.executable, str(FOLDER / f"{name}.py"), "--quick", "--write", str(tmp_path / "x.md")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert "not to be written" in done.stderr


def test_steps_by_length(tmp_path, capsys):
    """GateRank, Figure 5: whole models by length, on the CPU as on a GPU."""
    models = ["mamba2+gate_rank", "llama"]
    main([
        "throughput", *models, "--lengths", "32", "8", "--tokens", "16", "--hidden-size", "16", "--num-layers", "1",
        "--num-heads", "1", "--rounds", "1", "--device", "cpu", "--output", str(tmp_path),
    ])  # fmt: skip
    result = json.loads((tmp_path / "throughput.json").read_text())
    assert (result["lengths"], result["timed"]) == ([8, 32], "training step")
    for row in result["models"]:
        for seconds, speed, tokens in zip(row["seconds"], row["tokens_per_second"], (16, 32), strict=True):
            assert speed == pytest.approx(tokens / seconds)
    lines = (tmp_path / "throughput.csv").read_text().splitlines()
    assert [line.split(",")[:2] for line in lines[1:]] == [[name, length] for name in models for length in ("8", "32")]
    assert "faster from" in capsys.readouterr().out
    assert (tmp_path / "throughput.png").stat().st_size > 5_000


def test_a_forward_pass_alone(tmp_path, capsys):
    """PoST's overhead (§5.2): the logits of evaluation, without a gradient or an optimiser."""
    model, ids = small(), tokens(2, 9)
    logits = throughput.forward_pass(model)(ids)
    assert torch.equal(logits, small().eval()(ids)[0])
    assert not logits.requires_grad
    assert not model.training
    assert throughput.forward_pass(model, bf16=True)(ids).dtype == torch.bfloat16
    command = ["throughput", "mamba2", "mamba2+post", "--lengths", "8", "--tokens", "16", "--hidden-size", "16"]
    sizes = ["--num-layers", "1", "--num-heads", "2", "--rounds", "1", "--device", "cpu", "--output", str(tmp_path)]
    main([*command, *sizes, "--forward"])
    assert json.loads((tmp_path / "throughput.json").read_text())["timed"] == "forward pass"
    assert "a forward pass, ms" in capsys.readouterr().out


def test_the_length_from_which_a_model_is_faster():
    def result(own, softmax):
        models = [{"model": "gla", "seconds": own}, {"model": "llama", "seconds": softmax}]
        return {"lengths": [8, 16, 32], "models": models}

    assert faster_from(result([1, 3, 1], [2, 2, 2]))["gla"] == "32"
    assert faster_from(result([1, 1, 1], [2, 2, None]))["gla"] == "8"
    assert faster_from(result([1, 1, None], [2, 2, 2]))["gla"] == "never"
    assert faster_from({"lengths": [8], "models": [{"model": "gla", "seconds": [1]}]}) == {}


def test_a_step_without_memory_has_no_time(monkeypatch):
    def step(model, *, bf16):
        def run(ids):
            if ids.shape[1] > 8:
                raise torch.OutOfMemoryError("no memory")

        return run

    monkeypatch.setattr(throughput, "train_step", step)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    (row,) = throughput.measure_steps(["gla"], [8, 16], hidden_size=16, num_layers=1, num_heads=1)["models"]
    assert row["seconds"][0] >= 0
    assert row["seconds"][1] is row["tokens_per_second"][1] is None
    assert_raises(ValueError, "each once", throughput.measure_steps, ["gla", "gla"], [8])
    for lengths in ([], [1, 8]):  # one token has no next one to predict
        assert_raises(ValueError, "at least one length", throughput.measure_steps, ["gla"], lengths)


def test_what_cannot_be_measured(monkeypatch):
    monkeypatch.setattr(throughput, "_fits", lambda run: False)
    with pytest.raises(ValueError, match="fewer tokens"):
        throughput.measure_steps(["gla"], [8, 16], hidden_size=16, num_layers=1, num_heads=1)
    assert_raises(ValueError, "at least 1", interleaved, {}, rounds=0)
    assert_raises(ValueError, "read nothing yet", Decoder(small()))
