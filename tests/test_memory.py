"""Sizes of states: closed forms, real states, crossover with a KV cache; the command and its figure."""

import csv
import dataclasses
import json
from itertools import pairwise
from typing import Any

import matplotlib.colors
import pytest
import torch
from combinations import SIZES, combinations
from helpers import assert_raises, cases
from pairwise import slow_beyond

from halflife import LanguageModel, preset
from halflife.cli import main
from halflife.evaluation.memory import (
    LayerState,
    StateSize,
    format_bytes,
    kv_cache,
    layer_states,
    measure_memory,
    model_state_size,
    one_layer_of_each_kind,
    ska_crossover,
    ska_sizes,
    ska_state_size,
)
from halflife.models import PRESETS, checkpoint
from halflife.report.figures.matplotlib_renderer import draw
from halflife.report.figures.memory import memory
from halflife.report.tables.memory import write_memory

D, LAYERS, HEADS = 64, 3, 2
WIDTHS: dict[str, Any] = {"hidden_size": D, "num_layers": LAYERS, "num_heads": HEADS, "vocab_size": 31}


def config(name, **options):
    return preset(name, **WIDTHS, **options)


def attention_at(*layers, **options):
    """Return Mamba-2 with softmax attention in some layers."""
    other = {"mixer": "attention", "options": {"num_heads": HEADS, **options}, "layers": list(layers)}
    return dataclasses.replace(config("mamba2"), hybrid=other)


def real_bytes(model_config, length, dtype):
    """Return the bytes of the whole model's state after one pass over `length` tokens."""
    model = LanguageModel(model_config).to(dtype)
    with torch.no_grad():
        _, state = model.hidden(torch.arange(length).remainder(31).unsqueeze(0))
    return sum(x.numel() * x.element_size() for layer in state for x in layer.values() if x.is_floating_point())


def check_foretold(name):
    """Sizes are right at lengths that were not probed, inside a chunk of SKA and beyond it."""
    model_config = preset(name, **SIZES)
    for dtype in (torch.float32, torch.bfloat16):
        size = model_state_size(layer_states(model_config, str(dtype).removeprefix("torch.")))
        for length in (3, 70):
            assert size.at(length) == real_bytes(model_config, length, dtype), name


HYBRIDS = ["mamba2+ska", "llama+ska", "gla+attention", "mamba2+gate_rank"]
FEW = ["mamba2", "mamba3_mimo", "gla", "retnet", "gated_deltanet", "comba", "mesa", "rwkv7", "llama", "fox", "echo"]


@pytest.mark.parametrize("name", slow_beyond([*FEW, *HYBRIDS], [*PRESETS, *HYBRIDS]))
def test_every_model_has_the_state_that_was_foretold(name):
    check_foretold(name)


@pytest.mark.slow
@pytest.mark.parametrize("base", PRESETS)
def test_every_combination_has_the_state_that_was_foretold(base):
    for name in combinations(base)[0]:
        check_foretold(name)


@pytest.mark.parametrize(
    "model_config",
    [attention_at(1), attention_at(0, 2), attention_at(0, 1, 2), attention_at(1, num_kv_heads=1)],
    ids=["middle", "ends", "everywhere", "one kv head"],
)
def test_hybrids_with_attention(model_config):
    assert model_state_size(layer_states(model_config, "float32")).at(9) == real_bytes(model_config, 9, torch.float32)


@pytest.mark.parametrize(("dtype", "item"), [("float32", 4), ("bfloat16", 2)])
def test_closed_forms(dtype, item):
    """Recurrent states are float32 in any model; short convolutions and caches have the model's dtype."""
    inner, state = 2 * D, 128
    value = D // HEADS
    expected = {
        "mamba2": StateSize(4 * inner * state + item * 3 * (inner + 2 * state)),
        "gated_deltanet": StateSize(4 * HEADS * value**2 + item * 3 * 3 * D),
        "simple": StateSize(4 * HEADS * value**2),
        "simple+lrpe": StateSize(4 * HEADS * 2 * value**2),
        "llama": StateSize(0, item * 2 * D),
    }
    for name, size in expected.items():
        assert model_state_size(layer_states(config(name), dtype)) == size * LAYERS


def test_llama_is_the_cache():
    for dtype in ("float32", "bfloat16"):
        for cache_dtype in (None, "float32", "bfloat16", "float8"):
            size = model_state_size(layer_states(config("llama"), dtype, cache_dtype))
            assert size == kv_cache(D, LAYERS, cache_dtype or dtype)
            assert size.smaller_from(size) is None


def test_cache_dtype_is_for_what_grows():
    fixed, growing = (model_state_size(layer_states(attention_at(1), "float32", kind)) for kind in (None, "float8"))
    assert (growing.constant, growing.per_token) == (fixed.constant, fixed.per_token // 4)


def test_log_linear_states_grow_with_every_doubling():
    """As many states as the position has binary digits, and at most L − 1."""
    options = {"log_linear": {"num_levels": 5}}
    model_config = config("simple+scalar+log_linear", mixer_options=options)
    size = model_state_size(layer_states(model_config, "float32"))
    assert size.most_digits == 4
    assert [size.at(n) for n in (1, 2, 3, 9, 40)] == [size.constant + n * size.per_digit for n in (1, 2, 2, 4, 4)]
    assert size.at(9) == real_bytes(model_config, 9, torch.float32)
    with pytest.raises(ValueError, match="no common size"):
        _ = size + StateSize(0, 0, 1, 7)


def test_where_layers_stand():
    kinds = {state.mixer: state.layers for state in layer_states(attention_at(0, 2))}
    assert kinds == {"mamba2": (1,), "attention": (0, 2)}
    kinds = {state.mixer: state.layers for state in layer_states(config("mamba2+tpe"))}
    assert kinds == {"mamba2": (0, 1, 2), "tpe": ("embedding",)}
    small, _ = one_layer_of_each_kind(attention_at(0, 1, 2))
    assert (small.num_layers, small.mixer_of(0)[0]) == (1, "attention")


def test_the_random_numbers_of_the_caller_stay():
    before = torch.get_rng_state()
    layer_states(config("mamba2+ska"))
    assert torch.equal(before, torch.get_rng_state())


def test_a_state_that_grows_unevenly_is_an_error(monkeypatch):
    def hidden(self, ids, state=None, cu_seqlens=None, attention_mask=None):
        seen = 1 if state is None else len(state[0]["memory"]) + 1
        return ids, tuple({"memory": torch.zeros(seen if seen < 4 else 9)} for _ in self.blocks)

    monkeypatch.setattr(LanguageModel, "hidden", hidden)
    with pytest.raises(ValueError, match=r"'memory' of mamba2 holds \[1, 2, 9\] numbers after \[1, 2, 4\] tokens"):
        layer_states(config("mamba2"))


@pytest.mark.parametrize(("rank", "value_dim", "chunk"), [(48, None, 64), (7, 5, 8), (1, 1, 1), (3, 40, 2)])
@pytest.mark.parametrize("refresh", ["chunk", "token"])
def test_ska_is_as_small_as_its_proposition(rank, value_dim, chunk, refresh):
    options = {"num_heads": HEADS, "rank": rank, "value_dim": value_dim, "chunk_size": chunk, "refresh": refresh}
    model_config = dataclasses.replace(
        config("mamba2"), hybrid={"mixer": "ska", "options": options, "layers": [1]}
    )  # fmt: skip
    found = ska_sizes(next(state for state in layer_states(model_config) if state.mixer == "ska"))
    r, p = rank, value_dim or D // HEADS
    committed, waiting = 2 * r**2 + p * r + r + 1, (chunk - 1 if refresh == "chunk" else 0) * (r + p)
    assert (found["committed"], found["pending"]) == (HEADS * committed, HEADS * waiting)
    first = next(t for t in range(1, 10**6) if t * (r + p) > committed)
    assert found["theory"] == found["measured"] == first
    assert first - 1 <= ska_crossover(r, p) < first
    assert ska_state_size(r, p, chunk if refresh == "chunk" else 1) == committed + waiting
    assert found["with_pending"] == next(t for t in range(1, 10**6) if t * (r + p) > committed + waiting)


@pytest.mark.parametrize("per_token", [0, 1, 3, 4, 5])
@pytest.mark.parametrize("other", [StateSize(0, 4), StateSize(6, 4), StateSize(12, 0), StateSize(1, 3, 2, 4)])
@pytest.mark.parametrize("digits", [(0, 0), (5, 4), (20, 5)])
def test_smaller_from_is_the_first_length_of_all_that_follow(per_token, other, digits):
    for constant in (0, 1, 5, 12, 13):
        size = StateSize(constant, per_token, *digits)
        smaller = [size.at(t) < other.at(t) for t in range(1, 200)]
        expected = next((t for t in range(1, 199) if all(smaller[t - 1 :])), None)
        assert size.smaller_from(other) == expected


def test_crossovers_of_models():
    rows = {row["model"]: row for row in measure_memory(["mamba2", "llama"], [8], **WIDTHS, dtype="float32")["models"]}
    assert rows["llama"]["smaller_from"] is None
    assert rows["mamba2"]["smaller_from"] == rows["mamba2"]["constant"] // (4 * 2 * D * LAYERS) + 1
    cache = kv_cache(D, LAYERS, "float32")
    some, all_, shared = (
        model_state_size(layer_states(model, "float32")).smaller_from(cache)
        for model in (attention_at(1), attention_at(0, 1, 2), attention_at(0, 1, 2, num_kv_heads=1))
    )
    assert some == rows["mamba2"]["smaller_from"]  # each replaced layer saves the same number of bytes
    assert (all_, shared) == (None, 1)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "0.98 KiB"), (1024, "1 KiB"), (1023.9 * 1024, "1 MiB"),
     (1.5 * 2**30, "1.5 GiB"), (2**40, "1 TiB"), (2**51, "2,048 TiB")],
)  # fmt: skip
def test_readable(size, text):
    assert format_bytes(size) == text


@cases(
    "arguments, message",
    (["mamba22", "--lengths", "8"], "Did you mean 'mamba2'"),
    (["mamba2+pots", "--lengths", "8"], "Did you mean 'post'"),
    (["llama+post", "--lengths", "8"], "llama has none"),
    (["mamba2", "--lengths", "0"], "at least 1; got 0"),
    (["mamba2", "--lengths", "8", "-3"], "at least 1; got -3"),
    (["mamba2", "--lengths"], "at least one length"),
    (["mamba2", "mamba2", "--lengths", "8"], "each once"),
    (["mamba2", "--lengths", "8", "--num-heads", "0"], "num_heads must be at least 1"),
    (["simple", "--lengths", "8", "--num-heads", "3"], "'simple' has no meaning"),
    (["mamba2", "--lengths", "8", "--hidden-size", "0"], "at least 1"),
    (["mamba2", "--lengths", "8", "--num-layers", "0"], "at least 1"),
    (["mamba2", "--lengths", "8", "--vocab-size", "0"], "vocab_size must be at least 1"),
)
def test_wrong_input_is_one_line_and_exit_code_2(arguments, message, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in refused("memory", *arguments)
    assert not list(tmp_path.iterdir())


def test_unknown_dtypes():
    assert_raises(ValueError, "Did you mean 'float32'", layer_states, config("mamba2"), "float23")
    with pytest.raises(ValueError, match=r"unknown cache dtype 'int8'.*float8"):
        measure_memory(["mamba2"], [8], cache_dtype="int8")


COMMAND = ["memory", "mamba2", "mamba2+ska", "llama", "--lengths", "4096", "16", "256"]


def test_end_to_end(tmp_path, capsys):
    folder = tmp_path / "out"
    arguments = [*COMMAND, "--hidden-size", "64", "--num-layers", "3", "--output", str(folder)]
    main(arguments)
    out = capsys.readouterr().out
    for expected in ("state of one sequence", "smaller from", "KV cache", "never", "committed", "4,096", "bfloat16"):
        assert expected in out
    names = ["memory.csv", "memory.json", "memory.png", "memory.svg"]
    files = {name: (folder / name).read_bytes() for name in names}
    data = json.loads(files["memory.json"], parse_constant=pytest.fail)
    assert data["lengths"] == [16, 256, 4096]
    assert data["cache"]["bytes"] == [2 * 64 * 3 * 2 * length for length in data["lengths"]]
    assert [row["smaller_from"] is None for row in data["models"]] == [False, False, True]
    rows = list(csv.DictReader(files["memory.csv"].decode().splitlines()))
    assert [int(row["bytes"]) for row in rows] == [size for model in data["models"] for size in model["bytes"]]
    assert rows[-1]["smaller_from"] == "never"
    assert files["memory.png"].startswith(b"\x89PNG")
    main(arguments)
    assert sorted(path.name for path in folder.iterdir()) == names  # no temporary file remains
    assert {name: (folder / name).read_bytes() for name in names} == files


def test_a_folder_has_its_own_sizes(tmp_path, capsys, refused):
    for place, width in (("run/a", 32), ("run/b", 32), ("wide", 64)):
        small = preset("mamba2", hidden_size=width, num_layers=2, vocab_size=8)
        checkpoint.save(LanguageModel(small), tmp_path / place)
    main(["memory", str(tmp_path / "run"), "llama", "--lengths", "8", "--output", str(tmp_path / "out")])
    assert "2 layers of width 32" in capsys.readouterr().out
    data = json.loads((tmp_path / "out/memory.json").read_text())
    expected = measure_memory(["mamba2", "llama"], [8], hidden_size=32, num_layers=2, vocab_size=8)
    assert data == json.loads(json.dumps(expected))
    message = refused("memory", str(tmp_path / "run"), str(tmp_path / "wide"))
    assert "mamba2 has 2 of width 32, mamba2 has 2 of width 64" in message


def test_files_go_to_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main(["memory", "simple", "--lengths", "8", "--hidden-size", "16"])
    assert len(list(tmp_path.glob("runs/*-memory/memory.png"))) == 1
    assert "Koopman" not in capsys.readouterr().out


def made_up(sizes, lengths, per_token=1024):
    """Make a result of `measure_memory` for models of given (constant, per_token) bytes."""
    cache = StateSize(per_token=per_token)
    models = [
        {"model": f"model ${i}", "constant": a, "per_token": b, "bytes": [StateSize(a, b).at(n) for n in lengths],
         "smaller_from": StateSize(a, b).smaller_from(cache)} for i, (a, b) in enumerate(sizes)
    ]  # fmt: skip
    return {"lengths": lengths, "cache_dtype": "bfloat16", "models": models,
            "cache": {"per_token": per_token, "bytes": [cache.at(n) for n in lengths]}}  # fmt: skip


def rings(figure):
    return [
        (float(line.get_xdata()[0]), float(line.get_ydata()[0])) for line in figure.axes[0].lines
        if matplotlib.colors.to_rgba(line.get_markerfacecolor())[3] == 0
    ]  # fmt: skip


def test_rings_mark_crossings_that_are_shown():
    figure = draw(memory(made_up([(100 * 1024, 0), (10**9, 0), (0, 1024), (50 * 1024, 512)], [16, 4096])))
    figure.draw_without_rendering()
    assert rings(figure) == [(101, 100 * 1024), (101, 50 * 1024 + 101 * 512)]
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert len(texts) == 5
    assert sum("never smaller" in text for text in texts) == 1
    assert texts[0] == "KV cache of llama, bfloat16"


@cases("models, lengths", (1, [1]), (30, [1, 2**20]), (4, [1000, 1001, 1002, 8000]), (30, list(range(1, 200))))
def test_names_and_ticks_stand_in_the_figure(models, lengths):
    figure = draw(memory(made_up([(2**20, 0)] * models, lengths)))
    figure.draw_without_rendering()
    box = figure.legends[0].get_window_extent()
    assert min(box.x0, box.y0) >= 0
    assert box.x1 <= figure.bbox.width
    assert figure.axes[0].get_window_extent().height > 100
    ticks = sorted((text.get_window_extent() for text in figure.axes[0].get_xticklabels()), key=lambda box: box.x0)
    assert all(left.x1 < right.x0 for left, right in pairwise(ticks))


def test_tables_of_nothing_that_grows(tmp_path):
    files = write_memory(made_up([(5, 0)], [1, 2]), tmp_path)
    assert (
        files[1].read_text()
        == "model,length,bytes,cache_bytes,smaller_from\nmodel $0,1,5,1024,1\nmodel $0,2,5,2048,1\n"
    )


def test_a_layer_holds_the_sum_of_its_tensors():
    for state in layer_states(config("mamba2+ska")):
        assert isinstance(state, LayerState)
        assert state.bytes.constant == sum(stored.bytes.constant for stored in state.tensors.values())
        assert "position" not in state.tensors
