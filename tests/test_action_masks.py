"""Which tokens of a task are facts, and that training and evaluation pass them to the layers that read them."""

import dataclasses

import pytest
import torch
from helpers import cases

from halflife import LanguageModel, preset
from halflife.data.task_stream import TaskStream
from halflife.evaluation.recall import accuracy
from halflife.runs.task_run import RunConfig, TestSpec
from halflife.tasks import TASKS, build
from halflife.training.config import ExecutionConfig
from halflife.training.fit import Objective

SIZES = {"hidden_size": 32, "num_layers": 2, "vocab_size": 128, "num_heads": 4}


def text(ids):
    return "".join(map(chr, ids.tolist()))


@cases(
    "name, settings, kept",
    ("sysprompt", {"length": 32, "num_pairs": 3}, 6),
    ("tooltrace", {"length": 40, "num_pairs": 3}, 15),
    ("niah", {"length": 40, "num_pairs": 3}, 6),
    ("niah", {"length": 40, "num_pairs": 3, "hard": True}, 12),
    ("multihop", {"length": 40, "num_pairs": 3}, 12),
    ("commonword", {"length": 40, "num_pairs": 3}, 10),
    ("mqar", {"length": 40, "num_pairs": 3, "vocab_size": 64}, 6),
)
def test_facts_among_fillers(name, settings, kept):
    """The blocks that the task writes, the query's name not among them."""
    batch = build(name, **settings).generate(50, 0)
    assert (batch.facts.sum(1) == kept).all()
    assert not batch.facts[:, -1].any()
    if name != "mqar":
        ids = batch.inputs[batch.facts]
        assert (((ids >= 16) & (ids < 80)) | (ids == 5) | (ids == 6)).all()


@pytest.mark.parametrize("name", ["toolcalling", "economy", "amnesia"])
def test_facts_in_text(name):
    """All statements of the history, and nothing of the gap and the query."""
    for tier in TASKS[name].tiers.values():
        batch = build(name, **tier).generate(8, 0)
        for ids, facts in zip(batch.inputs, batch.facts, strict=True):
            whole = text(ids[ids != 0])
            end = int(facts.sum())
            assert facts[:end].all()
            assert text(ids[:end]).endswith(";")
            gap = whole[end : whole.rindex("?")]
            statements = {"toolcalling": ">", "economy": ":", "amnesia": ""}[name]
            assert not statements or statements not in gap


def test_a_task_without_facts_masks_nothing():
    batch = build("s5").generate(3, 0)
    assert batch.facts is None
    assert batch.action_mask().all()


def test_batches_of_training_hold_the_masks():
    stage = [build("niah", length=32, num_pairs=2), build("sysprompt", length=32, num_pairs=2)]
    assert "action_mask" not in TaskStream([stage], 4, 6, seed=0)[0]
    item = TaskStream([stage], 4, 6, seed=0, action_mask=True)[0]
    assert item["action_mask"].shape == item["input_ids"].shape
    assert (item["action_mask"].sum(1) == 4).all()


def test_the_mask_reaches_the_layer():
    """In training and in evaluation; a model without Koopman attention does not get it."""
    model = LanguageModel(preset("mamba2+ska", **SIZES))
    seen = []
    model.blocks[1].mixer.register_forward_pre_hook(
        lambda _, args, named: seen.append(named["shared"].get("action_mask")), with_kwargs=True
    )
    task = build("niah", length=32, num_pairs=2)
    batch = task.generate(3, 0)
    Objective(model)(batch.inputs, batch.labels, action_mask=batch.action_mask())
    assert torch.equal(seen.pop(), batch.facts)
    accuracy(model, task, split="test", seed=0, num_examples=3, action_mask=True)
    assert seen.pop().sum() == 12
    accuracy(model, task, split="test", seed=0, num_examples=3)
    with pytest.raises(ValueError, match="num_examples must be at least 1; got 0"):
        accuracy(model, task, split="test", seed=0, num_examples=0)
    assert seen.pop() is None


def test_a_run_passes_masks_to_models_that_read_them():
    task = {"name": "niah", "length": 32, "num_pairs": 2}
    config = RunConfig(
        model=preset("mamba2+ska", **SIZES), steps=1, batch_size=2, learning_rate=1e-3, stages=((task,),),
        validation=(task,), tests=(TestSpec(name="niah", task=task),), action_mask=True,
    )  # fmt: skip
    assert config.passes_action_mask
    assert not dataclasses.replace(config, action_mask=False).passes_action_mask
    plain = dataclasses.replace(config, model=preset("mamba2", **SIZES))
    assert not plain.passes_action_mask
    run = plain.open()
    assert "action_mask" not in run.data(ExecutionConfig())[0]
    assert run.validation()(Objective(LanguageModel(plain.model))) >= 0


def test_tests_by_token():
    """They read one token at a time, with their masks."""
    task = {"name": "sysprompt", "length": 64, "num_pairs": 4}
    config = RunConfig(
        model=preset("mamba2+ska", **SIZES), steps=1, batch_size=2, learning_rate=1e-3, stages=((task,),),
        validation=(task,), tests=(TestSpec(name="recall", task=task, examples=100),), action_mask=True, by_token=True,
    )  # fmt: skip
    model, seen = LanguageModel(config.model), []
    torch.nn.init.normal_(model.blocks[1].mixer.out_proj.weight)
    model.blocks[1].mixer.register_forward_pre_hook(
        lambda _, args, named: seen.append((args[0].shape[1], named["shared"]["action_mask"].sum())), with_kwargs=True
    )
    rows = config.open().evaluate(model, diverged=False)["tests"]
    assert [row["test"] for row in rows] == ["recall", "recall_by_token"]
    assert rows[0]["accuracy"] == rows[1]["accuracy"]  # of a layer whose outputs are those of one pass
    (length, facts), *pieces = seen
    assert length == 64
    assert len(pieces) == 64
    assert {length for length, _ in pieces} == {1}
    assert sum(facts for _, facts in pieces) == facts == 100 * 8
    whole = {"mixer": "ska", "options": {"mode": "masked", "num_heads": 4}, "layers": [1]}
    with pytest.raises(ValueError, match="reads in both directions, so there is no by_token"):
        dataclasses.replace(config, model=dataclasses.replace(config.model, hybrid=whole))
