"""Batches of a corpus: their tokens, their order, the tokens that a model reads together, and carried states."""

import itertools
import pickle

import numpy as np
import pytest
import torch
from corpora import open_corpus, write_texts
from helpers import assert_raises, cases
from tiny_runs import interrupt_after

from halflife import LanguageModel, preset
from halflife.cli import main
from halflife.cli.train import Text, Train
from halflife.data.batches import Batches, TokenFiles, permuted
from halflife.data.corpus import CorpusConfig
from halflife.tasks import IGNORED
from halflife.training.carried import CarriedStates, require_constant_state
from halflife.training.fit import Objective

LENGTHS = (5, 1, 30, 8, 3, 16, 2, 41, 7, 4)  # of the documents; token i has id i, so that a batch shows its origin


@pytest.fixture
def files(tmp_path):
    return numbered(tmp_path, LENGTHS)


def numbered(folder, lengths):
    np.arange(sum(lengths), dtype=np.uint16).tofile(folder / "train.tokens")
    np.cumsum([0, *lengths]).astype(np.int64).tofile(folder / "train.offsets")
    return TokenFiles(folder, "train", "uint16")


STARTS = {sum(LENGTHS[:i]) for i in range(len(LENGTHS) + 1)}  # and the end of the last document


@pytest.mark.parametrize("context", [1, 4, 7, 8, 39])
@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("mode", ["packed", "concatenated"])
def test_an_epoch_has_every_token_once(files, mode, batch_size, context):
    total = sum(LENGTHS)
    batches = Batches(files, batch_size, context, seed=1, mode=mode)
    left, orders = set(), []
    for epoch in range(6):
        batches = Batches(files, batch_size, context, seed=1, mode=mode, steps=6 * batches.steps_per_epoch)
        steps = range(epoch * batches.steps_per_epoch, (epoch + 1) * batches.steps_per_epoch)
        seen = torch.cat([batches[i]["input_ids"].flatten() for i in steps]).tolist()
        assert len(set(seen)) == len(seen)
        assert 0 <= total - len(seen) < batch_size * context
        left |= set(range(total)) - set(seen)
        orders.append(seen)
    assert len({tuple(order) for order in orders}) > 1
    if (dropped := total - len(seen)) and total // context > batch_size:
        assert len(left) > dropped  # different tokens are left out each time


@pytest.mark.parametrize("context", [1, 4, 7, 16])
def test_packed_rows_start_anew_at_documents(files, context):
    """The batches equal those of a walk over the tokens, one by one."""
    for batch in Batches(files, 3, context, seed=2):
        assert batch["input_ids"].shape == batch["labels"].shape == (1, 3 * context)
        assert batch["cu_seqlens"].dtype == torch.int32
        ids, bounds = batch["input_ids"].flatten().tolist(), {0, 3 * context}
        for i, token in enumerate(ids):
            if i % context == 0 or token in STARTS:
                bounds.add(i)
            assert batch["labels"][0, i] == (IGNORED if token + 1 in STARTS else token + 1)
        assert batch["cu_seqlens"].tolist() == sorted(bounds)


def test_concatenated_rows_go_through_documents(files):
    for batch in Batches(files, 3, 13, seed=2, mode="concatenated"):
        ids = batch["input_ids"]
        assert ids.shape == (3, 13)
        assert torch.equal(ids, ids[:, :1] + torch.arange(13))
        expected = ids + 1
        expected[expected == sum(LENGTHS)] = IGNORED  # no token follows the last one
        assert torch.equal(batch["labels"], expected)


@pytest.mark.parametrize("mode", ["packed", "concatenated"])
def test_a_batch_depends_on_its_step_alone(files, mode):
    batches = Batches(files, 2, 8, seed=5, mode=mode, steps=30)
    later = pickle.loads(pickle.dumps(batches))  # as a worker process receives it, before the first access
    assert len(pickle.dumps(batches)) < 1000
    other = Batches(files, 2, 8, seed=6, mode=mode, steps=30)
    for step in (29, 3, 17):
        assert all(torch.equal(later[step][name], value) for name, value in batches[step].items())
    assert any(not torch.equal(other[i]["input_ids"], batches[i]["input_ids"]) for i in range(30))
    assert len(list(batches)) == len(batches) == 30
    with pytest.raises(IndexError, match="step 30 of 30"):
        batches[30]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("mode", ["packed", "concatenated"])
def test_processes_share_a_batch(files, mode, world_size):
    whole = Batches(files, 6, 5, seed=5, mode=mode)
    parts = [Batches(files, 6, 5, seed=5, mode=mode, rank=r, world_size=world_size) for r in range(world_size)]
    assert {len(part) for part in parts} == {len(whole)}
    for step in range(len(whole)):
        found = [part[step] for part in parts]
        dim = 1 if mode == "packed" else 0
        for name in ("input_ids", "labels"):
            assert torch.equal(torch.cat([batch[name] for batch in found], dim), whole[step][name])
        if mode == "packed":
            share = 30 // world_size
            bounds = {b + r * share for r, batch in enumerate(found) for b in batch["cu_seqlens"].tolist()}
            assert sorted(bounds) == whole[step]["cu_seqlens"].tolist()


@cases(
    "settings, message",
    ({"mode": "packd"}, "unknown mode 'packd'. Did you mean 'packed'"),
    ({"batch_size": 0}, "batch_size must be at least 1"),
    ({"context": 0}, "context must be at least 1"),
    ({"rank": 2, "world_size": 2}, r"rank must be in \[0, 2\); got 2"),
    ({"batch_size": 3, "world_size": 2}, "batch_size 3 cannot be shared equally by 2 processes"),
    ({"steps": -1}, "steps must be 0 or more"),
    ({"context": 100}, "the train split has 117 tokens, fewer than a batch of 2 x 100"),
)
def test_batches_that_make_no_sense(files, settings, message):
    assert_raises(ValueError, message, Batches, files, **{"batch_size": 2, "context": 8, **settings})


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 17, 64, 65, 1000])
def test_a_permutation(count):
    orders = [permuted(np.arange(count), count, key).tolist() for key in range(200)]
    assert all(sorted(order) == list(range(count)) for order in orders)
    assert permuted(np.array([count - 1]), count, 7).tolist() == orders[7][-1:]
    # The first place is uniform, with mean (count − 1)/2 and deviation count/√12. Over 200 keys, four deviations are
    # allowed.
    assert abs(np.mean([order[0] for order in orders]) - (count - 1) / 2) <= 4 * count / (12 * 200) ** 0.5
    if count >= 64:  # The next step is uniform too: no order is a shifted or strided one.
        assert len(set(np.diff(orders[3]) % count)) > count // 3


def test_packed_documents_do_not_see_each_other(folder, tmp_path):
    """The logits on a batch are those on each of its sequences alone (measured: 1.7e-16 apart)."""
    batches = open_corpus(folder, tmp_path, context=40).split("train").batches(batch_size=2)
    batch = max(batches, key=lambda batch: len(batch["cu_seqlens"]))
    model = LanguageModel(preset("mamba2+post", hidden_size=16, num_layers=1, num_heads=2, vocab_size=256)).double()
    bounds = batch["cu_seqlens"].tolist()
    assert len(bounds) > 3  # a document ends within a row
    with torch.no_grad():
        whole, _ = model(batch["input_ids"], cu_seqlens=batch["cu_seqlens"])
        alone = torch.cat([model(batch["input_ids"][:, a:b])[0] for a, b in itertools.pairwise(bounds)], 1)
        leaky, _ = model(batch["input_ids"])
    assert (whole - alone).abs().max() < 4 * 1.7e-16
    assert (leaky - alone).abs().max() > 1e-3


def test_the_configuration_says_how_batches_look(folder, tmp_path):
    split = open_corpus(folder, tmp_path, context=4, mode="concatenated", seed=3).split("train")
    assert split.batches(2)[0]["input_ids"].shape == (2, 4)
    assert torch.equal(split.batches(2)[1]["input_ids"], split.batches(2, 4, 3)[1]["input_ids"])
    assert split.batches(2, 5, mode="packed")[0]["input_ids"].shape == (1, 10)


SIZES = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 64}
ROWS, CONTEXT = 4, 8


@pytest.fixture
def files_carried(tmp_path):
    """A split of one document whose tokens are their own numbers."""
    np.arange(330, dtype=np.uint16).tofile(tmp_path / "train.tokens")
    np.array([0, 330], dtype=np.int64).tofile(tmp_path / "train.offsets")
    return TokenFiles(tmp_path, "train", "uint16")


def batches(files_carried, part=0, parts=1, steps=25):
    return Batches(files_carried, ROWS, CONTEXT, 0, "continued", part, parts, steps)


def test_rows_continue_each_other(files_carried):
    """An epoch has 41 // 4 = 10 steps. Within it, row b goes on where it ended, and the streams do not overlap."""
    read = [batches(files_carried)[step] for step in range(25)]
    for step in range(24):
        ids, after = read[step]["input_ids"], read[step + 1]["input_ids"]
        assert torch.equal(ids[:, 1:], read[step]["labels"][:, :-1])
        assert read[step + 1]["part"].tolist() == [0, 1, int((step + 1) % 10 == 0)]
        assert torch.equal(after[:, 0], ids[:, -1] + 1) == ((step + 1) % 10 != 0)
    epoch = torch.cat([one["input_ids"] for one in read[:10]], 1)
    assert epoch.shape == (ROWS, 80)
    assert len(epoch.unique()) == 320
    assert read[0]["part"].tolist() == [0, 1, 1]
    halves = [batches(files_carried, part, 2)[13] for part in range(2)]
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
            (layer,) = loaded.before((i, parts, 0), rows["memory"].device)
            assert all(torch.equal(x, rows[name].chunk(parts)[i]) for name, x in layer.items())
    assert_raises(
        ValueError, "holds no carried states", CarriedStates().before, torch.tensor([0, 1, 0]), torch.device("cpu")
    )


def test_what_cannot_be_carried():
    llama = LanguageModel(preset("llama", **SIZES))
    assert_raises(ValueError, "that of llama grows with the text", require_constant_state, llama, "llama")
    with pytest.raises(ValueError, match="cannot come from sources with weights"):
        CorpusConfig(sources=("a", "b"), weights=(0.5, 0.5), mode="continued")
    with pytest.raises(ValueError, match="--carry-state needs --documents concatenated"):
        Train("mamba2", Text(("text",), carry_state=True))._configure({}, show=False)


@pytest.mark.slow
def test_an_interrupted_run_goes_on_with_its_states(tmp_path, monkeypatch):
    text = write_texts(tmp_path / "text", "slow decay and fast decay, number {i}. " * 6, count=40)
    recipe = ["train", "mamba2", "--data", text, "--context", 32, "--batch-size", 4, "--tokens", 8 * 4 * 32]
    recipe += ["--hidden-size", 16, "--num-layers", 1, "--num-heads", 2, "--save-every", 4, "--validate-every", 4]
    recipe += ["--documents", "concatenated", "--carry-state", "--held-out", 0.2, "--quiet"]
    main([*map(str, recipe), "--output", str(tmp_path / "whole")])
    with monkeypatch.context() as patched:
        interrupt_after(patched, 6)
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            main([*map(str, recipe), "--output", str(tmp_path / "parts")])
    assert list((tmp_path / "parts" / "checkpoints").glob("checkpoint-4/states-0.pt"))
    main(["train", "--resume", str(tmp_path / "parts"), "--quiet"])
    whole, parts = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "parts"))
    assert whole == parts
