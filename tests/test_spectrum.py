"""`halflife spectrum`: the decay values that a model uses on a text, recorded, tabulated and drawn."""

import csv
import gzip
import json
import math

import numpy as np
import pytest
import torch

from halflife.analysis import decay_values as recorder
from halflife.analysis.decay_figures import decays
from halflife.analysis.decay_survey import checkpoints, pieces, read_ids, survey, write_tables
from halflife.analysis.decay_values import decay_values, half_life, recording
from halflife.analysis.spectrum import layer_decays
from halflife.cli import main
from halflife.models import PRESETS, LanguageModel, io, preset

TEXT = b"Before we proceed any further, hear me speak. Speak, speak.\n" * 8
WITHOUT = ("llama", "deltanet")


def tiny(name, **sizes):
    sizes = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "train_length": 32, **sizes}
    return LanguageModel(preset(name, **sizes))


def ids_of(batch, length):
    return torch.randint(256, (batch, length), generator=torch.Generator().manual_seed(1))


def lower(values, level):
    """The quantile that occurs: the lower of two equally near values."""
    values = sorted(torch.as_tensor(values).flatten().tolist())
    return values[math.floor(level * (len(values) - 1))]


# ------------------------------------------------------------------------------------------ statistics


def test_fixed_decays_are_those_of_the_formula():
    for layer, row in enumerate(decay_values(tiny("tnl"), ids_of(3, 5))):
        expected = [math.exp(-8 * head / 2 * (1 - layer / 2)) for head in (1, 2)]
        assert row["layer"] == layer
        assert row["heads"] == pytest.approx(expected)
        assert row["median"] == row["q05"] == pytest.approx(min(expected))
        assert row["mean"] == pytest.approx(sum(expected) / 2)
        assert row["half_life"] == pytest.approx(math.log(0.5) / math.log(min(expected)))
        assert row["slowest_half_life"] == pytest.approx(math.log(0.5) / math.log(max(expected)))
        assert row["head_half_lives"] == pytest.approx([half_life(decay) for decay in expected])


def test_simple_decay_without_input_is_its_p():
    model = tiny("simple", mixer_options={"decay_options": {"p": 0.9}, "decay_rank": 0})
    for _, parameter in (p for p in model.named_parameters() if "decay_proj" in p[0]):
        torch.nn.init.zeros_(parameter)
    for row in decay_values(model, ids_of(2, 7)):
        assert [row[key] for key in ("q05", "q25", "median", "q75", "q95", "mean")] == pytest.approx([0.9] * 6)


def test_position_dependent_decays_are_those_of_every_position():
    model, length = tiny("retnet+post"), 9
    scales = torch.stack([layer_decays(model)[0][1].timescales(t) for t in range(1, length + 1)])
    expected = torch.exp(-1 / scales)
    row = decay_values(model, ids_of(2, length))[0]
    for key, level in recorder.QUANTILES.items():
        assert row[key] == pytest.approx(lower(expected.expand(2, -1, -1), level), rel=1e-5)
    assert row["heads"] == pytest.approx([lower(head, 0.5) for head in expected.T], rel=1e-5)
    assert row["heads"][0] > expected[0, 0]
    assert row["slowest_half_life"] == pytest.approx(max(-math.log(0.5) / (1 / scales[1:]).mean(0)), rel=1e-5)


def test_quantiles_are_of_what_was_recorded():
    model, ids, found = tiny("mamba2"), ids_of(3, 40), []
    with recording(model, lambda layer, g: found.append((layer, g))), torch.no_grad():
        model(ids)
    assert [layer for layer, _ in found] == [0, 1]
    for row, (_, g) in zip(decay_values(model, ids), found, strict=True):
        for key, level in recorder.QUANTILES.items():
            assert row[key] == pytest.approx(lower(g.exp(), level), rel=1e-4)
        assert row["heads"] == pytest.approx(g.exp().transpose(0, 2).flatten(1).median(1).values.tolist(), rel=1e-4)


def test_lightnet_is_recorded_where_it_scans():
    model, ids, found, inputs = tiny("lightnet"), ids_of(1, 6), [], []
    mixer = model.blocks[0].mixer
    mixer.decay_proj.register_forward_hook(lambda module, given, f: inputs.append(f))
    with recording(model, lambda layer, g: found.append(g)), torch.no_grad():
        model(ids)
    f, g = inputs[0], found[0]
    assert len(found) == 2
    assert g[:, 0].exp().eq(0).all()
    past = torch.stack([f[:, : t + 1].logsumexp(1) for t in range(6)], 1)
    torch.testing.assert_close(g[:, 1:], past[:, :-1] - past[:, 1:])
    row = decay_values(model, ids[:, :2])[0]
    assert (row["q05"], row["median"], row["half_life"]) == (0, 0, 0)  # half of the tokens are first ones
    assert 0 < row["q75"] < 1
    assert row["slowest_half_life"] > 0


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_read(name):
    rows = decay_values(tiny(name), ids_of(2, 5))
    assert [row["layer"] for row in rows] == ([] if name in WITHOUT else [0, 1])
    for row in rows:
        levels = [row[key] for key in recorder.QUANTILES]
        assert 0 <= levels[0] <= levels[-1] <= 1
        assert levels == sorted(levels)
        assert len(row["heads"]) == 2


def test_above_the_limit_every_nth_token_counts(monkeypatch):
    model, ids, found = tiny("retnet+post", num_layers=1), ids_of(3, 8), []
    with recording(model, lambda layer, g: found.append(g)), torch.no_grad():
        model(ids)
    whole = decay_values(model, ids)[0]
    monkeypatch.setattr(recorder, "MAX_VALUES", 3 * 8 * 2 // 4)
    row = decay_values(model, ids)[0]
    chosen = found[0].flatten(0, 1)[::5].exp()  # 4 would meet the same positions in each sequence
    assert row["median"] == pytest.approx(lower(chosen, 0.5))
    assert row["mean"] == pytest.approx(chosen.mean().item())
    assert row["slowest_half_life"] == whole["slowest_half_life"]  # sums are of all tokens


@pytest.mark.parametrize("name", ["lightnet", "mamba2", "mamba2+post"])
def test_the_recorder_leaves_the_model_as_it_was(name):
    model, ids = tiny(name), ids_of(1, 4)
    with torch.no_grad():
        before, _ = model(ids)

    def fail(layer, g):
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"), recording(model, fail):
        model(ids)
    decay_values(model, ids)
    for _, decay in layer_decays(model):
        assert "scan" not in vars(decay)
        assert not decay._forward_hooks
    with torch.no_grad():
        assert torch.equal(model(ids)[0], before)


def test_half_life():
    assert half_life(0.5) == 1
    assert half_life(0.5 ** (1 / 8)) == pytest.approx(8)
    assert (half_life(0), half_life(1)) == (0, math.inf)
    assert math.isnan(half_life(math.nan))


@pytest.mark.parametrize("ids", [torch.zeros(4, dtype=torch.long), torch.zeros(2, 1, dtype=torch.long)])
def test_ids_must_be_sequences(ids):
    with pytest.raises(ValueError, match="T ≥ 2"):
        decay_values(tiny("tnl"), ids)


# ------------------------------------------------------------------------------------------ text, models


def test_pieces_are_evenly_spread():
    ids = torch.arange(100)
    assert pieces(ids, 10, 3)[:, 0].tolist() == [0, 45, 90]
    assert pieces(ids, 30, 8)[:, 0].tolist() == [0, 35, 70]  # no more than fit side by side
    assert pieces(ids, 1000, 8).tolist() == [list(range(100))]
    for length, sequences in ((1, 1), (4, 0)):
        with pytest.raises(ValueError, match="at least 1 sequence"):
            pieces(ids, length, sequences)


def test_text_is_read_as_bytes_of_all_files(tmp_path):
    (tmp_path / "a.bin").write_bytes(bytes(range(256)))
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"abc"))
    ids = read_ids([tmp_path / "a.bin", tmp_path / "b.txt.gz"])
    assert ids.tolist() == [*range(256), 97, 98, 99]


def test_labels_tell_models_apart(tmp_path):
    def save(name, *parts):
        return io.save(tiny(name, num_layers=1), tmp_path.joinpath(*parts))

    save("tnl", "run", "tnl", "lr0.01-seed0")
    save("simple", "run", "simple", "lr0.01-seed0")
    assert list(checkpoints([tmp_path / "run"])) == ["simple", "tnl"]
    save("tnl", "run", "tnl", "lr0.01-seed1")
    labels = ["simple lr0.01-seed0", "tnl lr0.01-seed0", "tnl lr0.01-seed1"]
    assert list(checkpoints([tmp_path / "run"])) == labels
    assert list(checkpoints([tmp_path / "run", tmp_path / "run" / "tnl"])) == labels
    other = save("tnl", "other", "tnl", "lr0.01-seed1")
    assert list(checkpoints([other, tmp_path / "run"]))[0] == str(other)
    (tmp_path / "other" / "foreign").mkdir()
    for name in ("config.json", "model.safetensors"):  # of another library
        (tmp_path / "other" / "foreign" / name).write_text('{"model_type": "mamba"}')
    assert list(checkpoints([tmp_path / "other"])) == ["tnl"]


def test_a_model_of_tokens_needs_its_tokenizer(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"[UNK]": 0, "speak": 1, "hear": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(tmp_path / "words")
    text = tmp_path / "text"
    text.write_text("hear hear speak  louder")
    assert read_ids([text], str(tmp_path / "words")).tolist() == [2, 2, 1, 0]
    for size in (3, 2):
        io.save(tiny("tnl", vocab_size=size), tmp_path / str(size))
    result = survey([tmp_path / "3"], [text], tokenizer=str(tmp_path / "words"))
    assert (result["length"], result["sequences"]) == (4, 1)
    with pytest.raises(ValueError, match="token 2.* vocabulary of 2"):
        survey([tmp_path / "2"], [text], tokenizer=str(tmp_path / "words"))
    with pytest.raises(ValueError, match="no tokenizer './nowhere'"):
        survey([tmp_path / "3"], [text], tokenizer="./nowhere")


# ---------------------------------------------------------------------------------------- command line


@pytest.fixture
def run_dir(tmp_path):
    """A run of four models, one with two seeds, one without a decay."""
    run = tmp_path / "run"
    for name, seeds in {"mamba2": 2, "mamba2+post": 1, "lightnet": 1, "llama": 1}.items():
        for seed in range(seeds):
            io.save(tiny(name), run / name / f"lr0.01-seed{seed}")
    (run / "config.json").write_text('{"models": ["mamba2"]}')
    (tmp_path / "text").write_bytes(TEXT)
    return run


def test_end_to_end(run_dir, tmp_path, capsys):
    arguments = ["spectrum", str(run_dir), "--text", str(tmp_path / "text"), "--length", "32", "--sequences", "3"]
    main(arguments)
    out = capsys.readouterr().out
    for expected in ("median", "half-life", "mamba2 lr0.01-seed1", "no decay", "3 sequences of 32 tokens"):
        assert expected in out
    folder = run_dir / "spectrum"
    names = ["decays.csv", "decays.json", "decays.png", "decays.svg"]
    files = {name: (folder / name).read_bytes() for name in names}
    data = json.loads(files["decays.json"], parse_constant=pytest.fail)
    layers = {model["model"].split()[0]: model["layers"] for model in data["models"]}
    assert [len(found) for found in layers.values()] == [2, 0, 2, 2]
    rows = list(csv.DictReader(files["decays.csv"].decode().splitlines()))
    assert [float(row["median"]) for row in rows] == [
        layer["median"] for model in data["models"] for layer in model["layers"]
    ]
    assert b"mamba2+post lr0.01-seed0" in files["decays.svg"] or b"<svg" in files["decays.svg"]
    main(arguments)
    assert sorted(path.name for path in folder.iterdir()) == names  # nothing else, no temporary file
    assert {name: (folder / name).read_bytes() for name in names} == files


def test_checkpoints_side_by_side(run_dir, tmp_path, capsys):
    folders = [str(run_dir / "mamba2" / "lr0.01-seed0"), str(run_dir / "lightnet")]
    output = tmp_path / "out"
    main(["spectrum", *folders, "--text", str(tmp_path / "text"), "--output", str(output)])
    assert [model["model"] for model in json.loads((output / "decays.json").read_text())["models"]] == [
        "mamba2",
        "lightnet",
    ]
    assert "written to" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda run: (run.parent / "text").unlink(), "no file"),
        (lambda run: (run.parent / "text").write_bytes(b""), "is empty"),
        (lambda run: (run.parent / "text").write_bytes(b"a"), "too short"),
        (lambda run: io.save(tiny("mamba2", vocab_size=512), run / "a"), "--tokenizer"),
        (lambda run: (run / "lightnet" / "lr0.01-seed0" / "model.safetensors").write_bytes(b"{"), "truncated"),
        (lambda run: (run / "lightnet" / "lr0.01-seed0" / "config.json").write_text("{"), "truncated"),
        (lambda run: [path.unlink() for path in run.glob("*/*/model.safetensors")], "no checkpoint"),
        (lambda run: [path.unlink() for path in run.glob("[!l]*/*/config.json")]
         + [path.unlink() for path in run.glob("lightnet/*/config.json")], "there is no decay"),
        (lambda run: run.rename(run.parent / "moved"), "no folder"),
    ],
)  # fmt: skip
def test_errors_are_one_line_and_exit_code_2(run_dir, tmp_path, capsys, break_it, message):
    break_it(run_dir)
    with pytest.raises(SystemExit) as stop:
        main(["spectrum", str(run_dir), "--text", str(tmp_path / "text")])
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert message in error
    assert error.startswith("halflife: ")
    assert len(error.strip().splitlines()) == 1
    assert not (run_dir / "spectrum").exists()


def test_nothing_named(tmp_path, capsys):
    (tmp_path / "text").write_bytes(TEXT)
    for arguments in (["--text", str(tmp_path / "text")], [str(tmp_path), "--text"]):
        with pytest.raises(SystemExit) as stop:
            main(["spectrum", *arguments])
        assert stop.value.code == 2
    assert "name at least one checkpoint" in capsys.readouterr().err


def test_help_shows_examples(capsys):
    with pytest.raises(SystemExit):
        main(["spectrum", "--help"])
    assert "halflife spectrum runs/" in capsys.readouterr().out


# --------------------------------------------------------------------------------------------- figures


def made_up(models, layers, **values):
    """What `survey` gives, for models between forgetting at once and never."""

    def layer(i, share):
        median = share * (1 - 0.1 * i / layers)
        return {"layer": i, "mean": median, "q05": median**3, "q25": median**2, "median": median,
                "q75": median**0.5, "q95": median**0.1, "half_life": half_life(median), "slowest_half_life": math.inf,
                "heads": [median], "head_half_lives": [half_life(median)], **values}  # fmt: skip

    return {"text": ["t"], "tokenizer": None, "length": 64, "sequences": 1, "models": [
        {"model": f"model ${n}", "checkpoint": "c", "channels": "heads",
         "layers": [layer(i, n / max(1, models - 1)) for i in range(layers)]} for n in range(models)
    ]}  # fmt: skip


@pytest.mark.parametrize(("models", "layers"), [(1, 1), (4, 3), (12, 24)])
def test_figure(models, layers):
    figure = decays(made_up(models, layers))
    figure.canvas.draw()
    values, lives = figure.axes
    assert [line.get_ydata()[0] for line in values.lines] == pytest.approx(np.linspace(0, 1, models))
    assert len(lives.lines) == models + 1
    assert bool(values.collections) == (models <= 4)
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert len(labels) == models + (2 if models <= 4 else 1)


def test_numbers_that_are_not_finite(tmp_path):
    result = made_up(2, 2, q25=math.nan, median=math.nan)
    decays(result).canvas.draw()
    write_tables(result, tmp_path)
    layer = json.loads((tmp_path / "decays.json").read_text(), parse_constant=pytest.fail)["models"][0]["layers"][0]
    assert (layer["median"], layer["slowest_half_life"]) == (None, None)


def test_a_model_that_diverged_has_no_numbers():
    model = tiny("mamba2")
    torch.nn.init.constant_(model.embedding.weight, math.nan)
    row = decay_values(model, ids_of(1, 4))[0]
    assert all(math.isnan(row[key]) for key in ("median", "mean", "q95", "half_life", "slowest_half_life"))
