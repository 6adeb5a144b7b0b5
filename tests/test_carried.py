"""Rows that continue each other: their order, the carried state, its checkpoints, what is refused."""

import numpy as np
import pytest
import torch
from helpers import assert_raises, cases

from halflife import LanguageModel, preset
from halflife.cli.train import Train
from halflife.data.batches import Batches, TokenFiles
from halflife.data.corpus import CorpusConfig
from halflife.training.carried import CarriedStates, require_constant_state
from halflife.training.fit import Objective

SIZES = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 64}
ROWS, CONTEXT = 4, 8


@pytest.fixture
def files(tmp_path):
    """A split of one document whose tokens are their own numbers."""
    np.arange(330, dtype=np.uint16).tofile(tmp_path / "train.tokens")
    np.array([0, 330], dtype=np.int64).tofile(tmp_path / "train.offsets")
    return TokenFiles(tmp_path, "train", "uint16")


def batches(files, part=0, parts=1, steps=25):
    return Batches(files, ROWS, CONTEXT, 0, "continued", part, parts, steps)


def test_rows_continue_each_other(files):
    """An epoch has 41 // 4 = 10 steps. Within it, row b goes on where it ended, and the streams do not overlap."""
    read = [batches(files)[step] for step in range(25)]
    for step in range(24):
        ids, after = read[step]["input_ids"], read[step + 1]["input_ids"]
        assert torch.equal(ids[:, 1:], read[step]["labels"][:, :-1])
        assert read[step + 1]["part"].tolist() == [0, 1, int((step + 1) % 10 == 0)]
        assert torch.equal(after[:, 0], ids[:, -1] + 1) == ((step + 1) % 10 != 0)
    epoch = torch.cat([one["input_ids"] for one in read[:10]], 1)
    assert epoch.shape == (ROWS, 80)
    assert len(epoch.unique()) == 320
    assert read[0]["part"].tolist() == [0, 1, 1]
    halves = [batches(files, part, 2)[13] for part in range(2)]
    assert torch.equal(torch.cat([half["input_ids"] for half in halves]), read[13]["input_ids"])
    assert [half["part"].tolist() for half in halves] == [[0, 2, 0], [1, 2, 0]]


def model_of(name="mamba2+post"):
    torch.manual_seed(0)
    return LanguageModel(preset(name, train_length=CONTEXT, **SIZES)).train()


@cases("name", "mamba2+post", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gated_deltanet", "rwkv7")))
def test_the_carried_state_is_that_of_the_full_pass(name):
    """The states, and the losses of all rows, are those of one pass over the joined rows. No gradient is carried."""
    model = model_of(name)
    objective = Objective(model)
    ids, losses = torch.randint(64, (ROWS, 4 * CONTEXT + 1)), []
    for step in range(4):
        span = slice(step * CONTEXT, (step + 1) * CONTEXT)
        labels = ids[:, span.start + 1 : span.stop + 1]
        part = torch.tensor([0, 1, int(step == 0)])
        losses.append(objective(ids[:, span], labels, part=part)["loss"])
    with torch.no_grad():
        logits, full = model(ids[:, :-1])
    for layer, expected in zip(objective.carried.parts[0], full, strict=True):
        for key, x in layer.items():
            torch.testing.assert_close(x, expected[key], rtol=1e-4, atol=1e-5)
            assert not x.requires_grad
    by_hand = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(torch.stack(losses).mean(), by_hand, rtol=1e-4, atol=1e-5)


def test_a_new_stream_starts_empty_and_evaluation_carries_nothing():
    model = model_of()
    objective, ids = Objective(model), torch.randint(64, (ROWS, CONTEXT + 1))
    first = objective(ids[:, :-1], ids[:, 1:], part=torch.tensor([0, 1, 1]))["loss"]
    later = objective(ids[:, :-1], ids[:, 1:], part=torch.tensor([0, 1, 0]))["loss"]
    again = objective(ids[:, :-1], ids[:, 1:], part=torch.tensor([0, 1, 1]))["loss"]
    assert torch.equal(first, again)
    assert not torch.equal(first, later)
    state = objective.carried.parts[0]
    model.eval()
    objective(ids[:, :-1], ids[:, 1:], part=torch.tensor([0, 1, 0]))
    assert objective.carried.parts[0] is state


def test_states_of_a_checkpoint_may_be_cut_otherwise(tmp_path):
    """Two processes wrote a micro-batch each. One process reads both, in one part or in four."""
    rows = {"memory": torch.randn(4, 2, 3), "position": torch.arange(4)}
    for rank in range(2):
        states = CarriedStates()
        states.after(torch.tensor([rank, 2, 0]), ({name: x.chunk(2)[rank] for name, x in rows.items()},))
        states.save(tmp_path, rank)
    for parts in (1, 4):
        loaded = CarriedStates()
        loaded.load(tmp_path)
        for i in range(parts):
            (layer,) = loaded.before(torch.tensor([i, parts, 0]))
            assert all(torch.equal(x, rows[name].chunk(parts)[i]) for name, x in layer.items())
    assert_raises(ValueError, "holds no carried states", CarriedStates().before, torch.tensor([0, 1, 0]))


def test_what_cannot_be_carried():
    llama = LanguageModel(preset("llama", **SIZES))
    assert_raises(ValueError, "that of llama grows with the text", require_constant_state, llama, "llama")
    with pytest.raises(ValueError, match="cannot come from sources with weights"):
        CorpusConfig(sources=("a", "b"), weights=(0.5, 0.5), mode="continued")
    with pytest.raises(ValueError, match="--carry-state needs --documents concatenated"):
        Train(model="mamba2", data=("text",), carry_state=True)._configure({}, show=False)


@pytest.mark.slow
def test_an_interrupted_run_goes_on_with_its_states(tmp_path, monkeypatch):
    from halflife.cli import main
    from halflife.training.callbacks import Metrics

    text = tmp_path / "text"
    text.mkdir()
    for i in range(40):
        (text / f"{i}.txt").write_text(f"slow decay and fast decay, number {i}. " * (3 + i % 7))
    recipe = ["train", "mamba2", "--data", text, "--context", 32, "--batch-size", 4, "--tokens", 8 * 4 * 32]
    recipe += ["--hidden-size", 16, "--num-layers", 1, "--num-heads", 2, "--save-every", 4, "--validate-every", 4]
    recipe += ["--documents", "concatenated", "--carry-state", "--held-out", 0.2, "--quiet"]
    main([*map(str, recipe), "--output", str(tmp_path / "whole")])

    def interrupted(self, arguments, state, control, **options):
        if state.global_step == 6:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Metrics, "on_step_begin", interrupted)
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            main([*map(str, recipe), "--output", str(tmp_path / "parts")])
    assert list((tmp_path / "parts" / "checkpoints").glob("checkpoint-4/states-0.pt"))
    main(["train", "--resume", str(tmp_path / "parts"), "--quiet"])
    whole, parts = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "parts"))
    assert whole == parts
