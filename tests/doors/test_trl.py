"""TRL's trainers with their defaults: two steps of each."""

import math
import os

import pytest
import torch
from combinations import SIZES

from halflife import LanguageModel, preset
from halflife.data.tokenizers import ByteTokenizer
from halflife.models import PRESETS, checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
NAMES = ["mamba2", "rwkv7", "gated_deltanet+post", "mamba2+ska", "retnet+gate_rank", "mamba3"]
TEXTS = ["hello there my friend", "bye now", "what is this", "never mind this long sentence"] * 4
PAIRS = {"prompt": ["Hi ", "Well "] * 8, "chosen": ["there", "done"] * 8, "rejected": ["x", "yy"] * 8}
COMPLETIONS = {"prompt": PAIRS["prompt"], "completion": PAIRS["chosen"], "label": [True, False] * 8}
KINDS = {
    "SFT": ({}, {"text": TEXTS}),
    "SFT packed": ({"packing": True, "max_length": 32}, {"text": TEXTS}),
    "SFT wrapped": ({"packing": True, "packing_strategy": "wrapped", "max_length": 32}, {"text": TEXTS}),
    "SFT padding-free": ({"padding_free": True, "max_length": None}, {"text": TEXTS}),
    "SFT evaluated": ({"eval_strategy": "steps", "eval_steps": 1}, {"text": TEXTS}),
    "DPO": ({}, PAIRS),
    "DPO padding-free": ({"padding_free": True}, PAIRS),
    "KTO": ({}, COMPLETIONS),
    "Reward": ({}, PAIRS),
    "GRPO": ({"num_generations": 2, "max_completion_length": 6}, {"prompt": PAIRS["prompt"]}),
}


FIRST = ("SFT", "SFT packed", "DPO", "Reward", "GRPO")
CASES = [(name, kind) for name in NAMES for kind in KINDS]
CASES += [(name, kind) for name in PRESETS if name not in NAMES for kind in FIRST]


@pytest.fixture
def folder(tmp_path, request):
    """A saved model with its tokenizer."""
    torch.manual_seed(0)
    tokenizer = ByteTokenizer(end_of_document=True)
    sizes = {**SIZES, "hidden_size": 32, "vocab_size": tokenizer.vocab_size}
    checkpoint.save(LanguageModel(preset(request.param, **sizes)), tmp_path, tokenizer.name)
    tokenizer.save(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("folder", "kind"), CASES, indirect=["folder"])
def test_it_trains(kind, folder):
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    import halflife.hf  # noqa: F401

    settings, columns = KINDS[kind]
    name = kind.split()[0]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    auto = AutoModelForSequenceClassification if name == "Reward" else AutoModelForCausalLM
    options = {"num_labels": 1} if name == "Reward" else {}
    arguments = getattr(trl, f"{name}Config")(
        output_dir=str(folder / "out"), max_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True,
        logging_steps=1, save_strategy="no", disable_tqdm=True, **settings,
    )  # fmt: skip
    data = Dataset.from_dict(columns)
    reward = {"reward_funcs": lambda completions, **_: [float(len(set(text))) for text in completions]}
    trainer = getattr(trl, f"{name}Trainer")(
        model=auto.from_pretrained(folder, **options), args=arguments, train_dataset=data, processing_class=tokenizer,
        **({"eval_dataset": data} if "eval_strategy" in settings else {}), **(reward if name == "GRPO" else {}),
    )  # fmt: skip
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 2
    assert all(math.isfinite(loss) for loss in losses)
    if "eval_strategy" in settings:
        assert sum("eval_loss" in entry for entry in trainer.state.log_history) == 2


@pytest.mark.parametrize("folder", ["mamba2"], indirect=True)
def test_sft_loads_a_path(folder):
    import trl
    from datasets import Dataset

    import halflife.hf  # noqa: F401

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    arguments = trl.SFTConfig(str(folder / "out"), max_steps=1, report_to=[], use_cpu=True, save_strategy="no")
    trainer = trl.SFTTrainer(str(folder), args=arguments, train_dataset=Dataset.from_dict({"text": TEXTS}))
    trainer.train()
    assert type(trainer.model).__name__ == "HalflifeForCausalLM"


def test_its_padding_free_collator_packs_what_we_unpack():
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    from halflife.hf import HalflifeConfig, HalflifeForCausalLM

    torch.manual_seed(0)
    model = HalflifeForCausalLM(HalflifeConfig.from_preset("gated_deltanet", **SIZES)).double()
    data = [{"input_ids": torch.randint(1, 31, (length,)).tolist()} for length in (5, 1, 9)]
    batch = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)([dict(row) for row in data])
    assert "position_ids" in batch
    assert batch.get("attention_mask") is None
    alone = [model(torch.tensor([row["input_ids"]])).logits for row in data]
    torch.testing.assert_close(model(**batch).logits[:, :15], torch.cat(alone, 1), rtol=0, atol=1e-12)
