"""Quantised weights, by bitsandbytes and torchao through transformers, and by torch: for every preset, on a CPU."""

import copy
import re

import pytest
import torch
from combinations import every_part
from helpers import add_noise, assert_close
from torch import nn
from transformers import AutoModelForCausalLM

from halflife import LanguageModel, preset
from halflife.hf import HalflifeConfig, HalflifeForCausalLM
from halflife.hf.quantization import KEPT
from halflife.ops.linear import fast_linears

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

SIZES = {"hidden_size": 128, "num_layers": 2, "vocab_size": 64, "train_length": 16}
NAMES = every_part()


def drawn(model):
    """The model with maps that start at zero drawn at random, so that every map acts."""
    torch.manual_seed(0)
    return add_noise(model, 0.05).eval()


def build(name):
    return drawn(HalflifeForCausalLM(HalflifeConfig.from_preset(name, **SIZES)))


def ids():
    return torch.randint(64, (2, 80), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model):
    out = model(ids())
    return out[0] if isinstance(out, tuple) else out.logits


def kept(name):
    return any(re.match(rf"(?:{pattern})(?:\.|$)", name) for pattern in KEPT)


def maps(model):
    """The linear maps of the blocks by name."""
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and "head" not in n}


def load(folder, config, **options):
    options = {"device_map": "cpu", "dtype": torch.float32, **options}
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, **options).eval()


def dequantised(model, small):
    """The model with the weights of its quantised form in full precision."""
    exact = copy.deepcopy(model)
    for name, module in exact.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        weight = small.get_submodule(name).weight
        if hasattr(weight, "SCB"):  # 8 bits of bitsandbytes
            weight = weight.CB * weight.SCB.unsqueeze(1) / 127
        elif getattr(weight, "quant_state", None) is not None:
            weight = pytest.importorskip("bitsandbytes").functional.dequantize_4bit(weight.data, weight.quant_state)
        elif type(weight) is not nn.Parameter:
            weight = weight.dequantize()
        module.weight = nn.Parameter(weight.detach().float().view_as(module.weight))
    return exact


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", NAMES)
def test_bitsandbytes(name, bits, tmp_path):
    """All maps but those of `KEPT` are quantised, and the outputs are those of the rounded weights."""
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    model = build(name)
    model.save_pretrained(tmp_path)
    small = load(tmp_path, BitsAndBytesConfig(**{f"load_in_{bits}bit": True}))
    quantised = {n for n, m in small.named_modules() if type(m).__name__ in ("Linear4bit", "Linear8bitLt")}
    assert quantised == {n for n in maps(model) if not kept(n)}
    saved = sum(m.weight.numel() for n, m in maps(model).items() if n in quantised) * (4 - bits / 8)
    assert model.get_memory_footprint() - small.get_memory_footprint() == pytest.approx(saved, rel=0.01)
    exact = logits(dequantised(model, small))  # before the first call, which packs the weights
    # bitsandbytes multiplies in bfloat16, and with 8 bits it rounds the activations too.
    assert relative(logits(small), exact) < {4: 0.083, 8: 0.24}[bits]


@pytest.mark.parametrize("bits", [4, 8])
def test_sizes_are_as_small_as_those_of_transformers_mamba2(bits, tmp_path):
    pytest.importorskip("bitsandbytes")
    from transformers import AutoConfig, BitsAndBytesConfig

    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(
        "mamba2", hidden_size=128, num_hidden_layers=2, vocab_size=64, num_heads=4, head_dim=64, state_size=128,
        n_groups=1,
    ))  # fmt: skip
    ours = HalflifeForCausalLM(HalflifeConfig.from_preset("mamba2", mlp="none", **SIZES))
    shares = []
    for model, folder in ((ours, tmp_path / "ours"), (theirs, tmp_path / "theirs")):
        model.save_pretrained(folder)
        small = load(folder, BitsAndBytesConfig(**{f"load_in_{bits}bit": True}))
        shares.append(small.get_memory_footprint() / model.get_memory_footprint())
    assert shares[0] < 1.05 * shares[1]


@pytest.mark.parametrize("name", ["mamba2", "rwkv7"])
def test_quantised_models_are_saved_continued_and_tuned(name, tmp_path):
    pytest.importorskip("bitsandbytes")
    peft = pytest.importorskip("peft")
    from transformers import BitsAndBytesConfig

    build(name).save_pretrained(tmp_path / "full")
    small = load(tmp_path / "full", BitsAndBytesConfig(load_in_8bit=True))
    prompt = {"input_ids": ids(), "attention_mask": torch.ones_like(ids())}
    text = small.generate(**prompt, max_new_tokens=5, do_sample=False)
    assert text.shape == (2, 85)
    small.save_pretrained(tmp_path / "small")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "small", device_map="cpu").eval()
    assert {type(m) for m in maps(again).values()} == {type(m) for m in maps(small).values()}
    assert_close(logits(again), logits(small), 1e-6)
    tuned = peft.get_peft_model(
        peft.prepare_model_for_kbit_training(small), peft.LoraConfig(r=2, target_modules="all-linear")
    )
    tuned(input_ids=ids(), labels=ids()).loss.backward()
    assert all(x.grad is not None for n, x in tuned.named_parameters() if "lora_" in n)


@pytest.mark.parametrize("name", NAMES)
def test_torchao(name, tmp_path):
    """int8 weights, through transformers and by hand, with torch's and with the compiled products and passes."""
    quantization = pytest.importorskip("torchao.quantization")
    from transformers import TorchAoConfig

    model = build(name)
    model.save_pretrained(tmp_path)
    small = load(tmp_path, TorchAoConfig(quantization.Int8WeightOnlyConfig()))
    quantised = {n for n, m in maps(small).items() if type(m.weight) is not nn.Parameter}
    assert quantised == {n for n in maps(model) if not kept(n)}
    by_hand = copy.deepcopy(model)
    quantization.quantize_(by_hand, quantization.Int8WeightOnlyConfig())
    assert all(type(m.weight) is not nn.Parameter for m in maps(by_hand).values())
    for quantised in (small, by_hand):
        exact = logits(dequantised(model, quantised))
        assert relative(logits(quantised), exact) < 2e-5
        with fast_linears(quantised):
            assert relative(logits(quantised), exact) < 2e-5


class Rounded(nn.Module):
    """A linear map with rounded weights, which rounds its input to 7 bits as torch does."""

    def __init__(self, weight, bias):
        super().__init__()
        self.weight, self.bias = weight, bias

    def forward(self, x):
        scale, zero = torch._choose_qparams_per_tensor(x, True)
        rounded = torch.fake_quantize_per_tensor_affine(x, scale, zero, 0, 255)
        return nn.functional.linear(rounded, self.weight, self.bias)


@pytest.mark.parametrize("name", NAMES)
def test_quantize_dynamic(name):
    model = drawn(LanguageModel(preset(name, **SIZES, tie_embeddings=False)))
    small = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear}, torch.qint8)
    quantised = {n: m for n, m in small.named_modules() if isinstance(m, torch.ao.nn.quantized.dynamic.Linear)}
    assert quantised.keys() == {n for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    exact = copy.deepcopy(model)
    for target, module in quantised.items():
        exact.set_submodule(target, Rounded(module.weight().dequantize(), module.bias()))
    assert relative(logits(small), logits(exact)) < 0.22  # a sum that ends near a half rounds either way
