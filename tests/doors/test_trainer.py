"""transformers' Trainer and its collators, with their defaults."""

import copy
import warnings

import pytest
import torch
from combinations import SIZES
from helpers import add_noise, assert_close, assert_raises
from pairwise import slow_beyond
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

import halflife
from halflife.hf import HalflifeConfig, HalflifeForCausalLM
from halflife.models import PRESETS

NAMES = [*PRESETS, "mamba2+post", "mamba2+gate_rank", "mamba2+ska", "mamba2+koopman_mlp"]
FEW = ["mamba2", "mamba3", "gla", "gated_deltanet", "rwkv7", "echo", "mamba2+post"]
TINY = {**SIZES, "hidden_size": 16, "num_heads": 2}
TOLERANCE = 1.2e-12  # float64: four times the largest error over all models, 3.0e-13


def build(name="mamba2", **options):
    return add_noise(HalflifeForCausalLM(HalflifeConfig.from_preset(name, **{**TINY, **options})), 0.2)


def rows(*lengths):
    drawn = (torch.randint(1, TINY["vocab_size"], (length,)).tolist() for length in lengths)
    return [{"input_ids": row, "labels": row} for row in drawn]


def trainer(model, folder, **settings):
    arguments = {
        "report_to": [], "use_cpu": True, "disable_tqdm": True, "logging_steps": 1, "max_steps": 2, "weight_decay": 0.0,
        "save_strategy": "no", "per_device_train_batch_size": 2,
    }  # fmt: skip
    parts = {key: settings.pop(key) for key in ("compute_metrics", "optimizers", "data_collator") if key in settings}
    data = rows(*[8] * 4)
    return Trainer(model, TrainingArguments(folder, **{**arguments, **settings}), None, data, data, **parts)


def test_it_evaluates_and_keeps_the_best_checkpoint(tmp_path):
    """It takes its label names from the signature of the forward pass."""
    seen = []

    def metrics(prediction):
        seen.append(prediction.predictions.shape)
        return {"number": 1.0}

    fit = trainer(
        build(), tmp_path, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1,
        load_best_model_at_end=True, compute_metrics=metrics,
    )  # fmt: skip
    assert fit.label_names == ["labels"]
    fit.train()
    assert seen == [(4, 8, TINY["vocab_size"])] * 2
    losses = [entry["eval_loss"] for entry in fit.state.log_history if "eval_loss" in entry]
    assert fit.state.best_metric == min(losses)
    assert len(losses) == 2


@pytest.mark.parametrize("shards", ["1GB", "20KB"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_training_goes_on_from_a_checkpoint(tied, shards, tmp_path, monkeypatch):
    """The Trainer loads names as they are in the file, here after its own `save_pretrained`, whole or in shards."""
    save = HalflifeForCausalLM.save_pretrained
    monkeypatch.setattr(
        HalflifeForCausalLM, "save_pretrained", lambda *args, **given: save(*args, **given, max_shard_size=shards)
    )
    start, settings = build(tie_embeddings=tied), {"save_strategy": "steps", "save_steps": 1}
    torch.manual_seed(0)
    whole = trainer(copy.deepcopy(start), tmp_path, **settings)
    whole.train()
    torch.manual_seed(0)  # the same rows
    again = trainer(start, tmp_path, **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    for key, x in again.model.named_parameters():
        assert torch.equal(x, whole.model.get_parameter(key)), key


@pytest.mark.parametrize("name", ["mamba2+post", "rwkv7", "mamba2+ska", "mamba3"])
def test_decays_are_not_decayed_or_a_warning_says_what_to_do(name, tmp_path):
    model = build(name)
    with pytest.warns(UserWarning, match="halflife.param_groups") as caught:
        trainer(model, tmp_path, weight_decay=0.1).train()
    assert sum("param_groups" in str(warning.message) for warning in caught) == 1
    still = {id(x) for x in model.parameters()} - {id(x) for x in halflife.param_groups(model, 0.1, 1e-3)[0]["params"]}
    before = {key: x.detach().clone() for key, x in model.named_parameters()}
    optimizer = torch.optim.AdamW(halflife.param_groups(model, 0.1, 1e-3), lr=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit = trainer(model, tmp_path, optimizers=(optimizer, None))
        fit.compute_loss = lambda model, inputs, **_: 0 * model(**inputs).loss  # weight decay alone
        fit.train()
    for key, x in model.named_parameters():
        assert torch.equal(x, before[key]) == (id(x) in still), key


def test_a_plain_loop_is_warned_too():
    model = build()
    model(torch.ones(1, 3, dtype=torch.long), labels=torch.ones(1, 3, dtype=torch.long)).loss.backward()
    step = torch.optim.AdamW(model.parameters(), weight_decay=0.1).step
    with pytest.warns(UserWarning, match="AdamW has weight decay on"):
        step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step()  # once is enough


MODES = {
    "cu_seq_lens": {"return_flash_attn_kwargs": True},
    "seq_idx": {"return_position_ids": False, "return_seq_idx": True},
    "all": {"return_flash_attn_kwargs": True, "return_seq_idx": True},
    "start": {"position_ids_start": 2},
}


@pytest.mark.parametrize("name", slow_beyond(FEW, NAMES))
def test_flattened_rows_give_the_losses_of_separate_rows(name):
    check_flattened(name)


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_of_the_collator_says_where_rows_begin(mode):
    check_flattened("mamba2", **MODES[mode])


def check_flattened(name, **mode):
    model, data = build(name).double(), rows(5, 1, 9)
    packed = model(**DataCollatorWithFlattening(**mode)([dict(row) for row in data]), output_hidden_states=True)
    alone = [model(torch.tensor([row["input_ids"]]), output_hidden_states=True).hidden_states[-1] for row in data]
    assert_close(packed.hidden_states[-1], torch.cat(alone, 1), TOLERANCE)
    scores = torch.cat([model.lm_head(hidden)[0, :-1] for hidden in alone])
    expected = torch.nn.functional.cross_entropy(scores, torch.tensor([y for row in data for y in row["labels"][1:]]))
    assert_close(packed.loss.double(), expected, 3e-7)  # the loss of transformers is float32


def test_positions_say_where_sequences_begin_and_nothing_else():
    model, ids = build().double(), torch.randint(31, (2, 7))
    expected = model(ids).logits
    ramp = torch.arange(7).expand(2, 7)
    assert_close(model(ids, position_ids=ramp).logits, expected, TOLERANCE)
    assert_close(model(ids, position_ids=ramp[:1] + 3).logits, expected, TOLERANCE)
    twice = torch.tensor([[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 4, 0, 1]])  # other cuts in each row
    found = model(ids, position_ids=twice).logits
    for row, cut in enumerate((3, 5)):
        parts = [model(part).logits for part in ids[row : row + 1].tensor_split([cut], 1)]
        assert_close(found[row : row + 1], torch.cat(parts, 1), TOLERANCE)
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[0, :2] = 0  # padding, and a cut in the other row
    found = model(ids, attention_mask=mask, position_ids=torch.stack([(ramp[0] - 2).clamp(0), twice[1]])).logits
    assert_close(found[:1, 2:], model(ids[:1, 2:]).logits, TOLERANCE)
    assert_close(found[1:, 5:], model(ids[1:, 5:]).logits, TOLERANCE)
    assert_raises(ValueError, "count on by one", model, ids, position_ids=2 * ramp)
    assert_raises(ValueError, "contradict", model, ids[:1], position_ids=twice[:1], seq_idx=1 - (ramp[:1] < 2).long())
    assert_raises(ValueError, r"position_ids must be \[B, T\]", model, ids, position_ids=ramp[:, :3])
    assert_raises(TypeError, "segment_ids", model, ids, segment_ids=ramp)
