"""Runs lines of docs/how-to/with-other-libraries.md, which come as JSON, and prints an error or "" for each as JSON.

It is a program of its own, because annotations are not checked where people work.
"""

import contextlib
import json
import sys
import tempfile
import traceback
from pathlib import Path

import accelerate
import torch
from datasets import Dataset
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Pooling, Transformer
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import AdamW
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    DataCollatorWithFlattening,
    Trainer,
    TrainingArguments,
    pipeline,
)
from trl import SFTConfig, SFTTrainer

import halflife.hf  # noqa: F401 (registers the models)
from halflife import LanguageModel, preset
from halflife.data.tokenizers import ByteTokenizer
from halflife.models import checkpoint
from halflife.training import sharding

# The names that lines use.
SHOWN = (
    AdamW, AutoModel, AutoModelForSequenceClassification, AutoModelForTokenClassification, BitsAndBytesConfig,
    DataCollatorWithFlattening, FullyShardedDataParallel, HFLM, Int8WeightOnlyConfig, LoraConfig, ModuleWrapPolicy,
    Pooling, PromptTuningConfig, SFTConfig, SFTTrainer, SentenceTransformer, Trainer, accelerate, fully_shard,
    get_peft_model, pipeline, quantize_, sharding,
)  # fmt: skip


def run(line, folder):
    torch.manual_seed(0)
    own = ByteTokenizer(end_of_document=True)
    sizes = {"hidden_size": 64, "num_layers": 2, "num_heads": 2, "vocab_size": own.vocab_size}
    place = str(folder / "model")
    checkpoint.save(LanguageModel(preset("gated_deltanet", **sizes)), place, own.name)
    own.save(place)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(place), AutoTokenizer.from_pretrained(place)
    tokenizer.pad_token = tokenizer.eos_token
    settings = {"output_dir": str(folder / "out"), "max_steps": 1, "report_to": [], "use_cpu": True}
    settings |= {"save_strategy": "no", "disable_tqdm": True}
    encoder = Transformer(place)
    encoder.tokenizer.pad_token = tokenizer.eos_token
    ids = torch.tensor([tokenizer("hello hello hello")["input_ids"]])
    names = {
        "folder": place, "offload": str(folder / "offload"), "model": model, "tokenizer": tokenizer, "ids": ids,
        "rows": [{"input_ids": row, "labels": row} for row in (list(range(1, 9)), list(range(3, 11)))],
        "texts": Dataset.from_dict({"text": ["hello there", "bye now"] * 4}), "settings": settings,
        "arguments": TrainingArguments(**settings), "encoder": encoder,
        "request": Instance("loglikelihood", {}, ("hello", " there"), 0),
    }  # fmt: skip
    result = eval(line, {**globals(), **names})
    result = getattr(result, "logits", result)
    assert not isinstance(result, torch.Tensor) or not result.is_floating_point() or result.isfinite().all(), result
    if "offload" not in line:
        loss = model.train()(ids, labels=ids).loss
        assert loss.isfinite()
        if loss.requires_grad:
            loss.backward()


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    found = []
    for line in json.load(sys.stdin):
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
            try:
                run(line, Path(folder))
                found.append("")
            except Exception:
                found.append(traceback.format_exc())
    print(json.dumps(found))
