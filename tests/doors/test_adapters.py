"""Adapters of PEFT over every linear map of every model: they act, learn, merge, are saved and swapped."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from combinations import SIZES, every_part
from helpers import assert_close
from torch import nn

from halflife.evaluation import language
from halflife.hf import HalflifeConfig, HalflifeForCausalLM
from halflife.training.fit import Objective

peft = pytest.importorskip("peft")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

NAMES = [*every_part(), "ska phi"]
PHI = {"mixer": "ska", "options": {"lift": "cg_projected"}}

EXACT = 3e-12  # in float64; four times the error of Koopman attention, the others are below 1e-13


def build(name, **options):
    """A model in which every map acts: maps that start at zero, and θ and the like, are drawn at random."""
    torch.manual_seed(0)
    name, options = ("mamba2+ska", {"hybrid": PHI, **options}) if name == "ska phi" else (name, options)
    model = HalflifeForCausalLM(HalflifeConfig.from_preset(name, **{**SIZES, "tie_embeddings": False, **options}))
    with torch.no_grad():
        for x in model.parameters():
            x += 0.05 * torch.randn_like(x)
    return model.eval()


def maps(model):
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]


def ids():
    return torch.randint(31, (2, 80), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model):
    return model(input_ids=ids()).logits


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_every_map_takes_lora(name, chunked, monkeypatch):
    """Its hooks fire, its adapter changes the output and gets a gradient, and the merged model is the unmerged one."""
    monkeypatch.setattr("halflife.models.loss.LOGITS", 3 * 31)
    model = build(name)
    model.config.chunked_loss = chunked
    before, targets, fired = logits(model), maps(model), set()

    def note(target, map, inputs, output):
        assert inputs[0].ndim < 4  # OFT reads those as images
        fired.add(target)

    for target in targets:
        model.get_submodule(target).register_forward_hook(partial(note, target))
    logits(model)
    assert fired == set(targets)
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False, exclude_modules=[])
    )
    assert (logits(adapted.eval()) - before).abs().max() > 1e-3
    fired.clear()
    adapted.train()
    adapted(input_ids=ids(), labels=ids()).loss.backward()
    assert fired == set(targets)
    grads = {n: x.grad for n, x in adapted.named_parameters() if "lora_" in n}
    assert len(grads) == 2 * len(targets)
    still = [n for n, x in grads.items() if x is None or not x.any()]
    assert not still
    unmerged = logits(adapted.eval().double())
    assert_close(logits(adapted.merge_and_unload()), unmerged, EXACT)


KINDS = {
    "lora": lambda maps: peft.LoraConfig(r=2, target_modules=maps, init_lora_weights=False),
    "dora": lambda maps: peft.LoraConfig(r=2, target_modules=maps, init_lora_weights=False, use_dora=True),
    "pissa": lambda maps: peft.LoraConfig(r=2, target_modules=maps, init_lora_weights="pissa"),
    "olora": lambda maps: peft.LoraConfig(r=2, target_modules=maps, init_lora_weights="olora"),
    "oft": lambda maps: peft.OFTConfig(r=0, oft_block_size=2, target_modules=maps, init_weights=False),
    "ia3": lambda maps: peft.IA3Config(target_modules=maps, feedforward_modules=[], init_ia3_weights=False),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["mamba2", "rwkv7", "gated_deltanet", "echo", "ska phi"])
def test_kinds_of_adapters(name, kind, tmp_path):
    """They act, learn, are saved and loaded, are swapped for another one, and merge."""
    base = build(name)
    plain, targets = logits(base), maps(base)
    adapted = peft.get_peft_model(base, KINDS[kind](targets)).train()
    optimizer = torch.optim.Adam([x for x in adapted.parameters() if x.requires_grad], lr=1e-2)
    for _ in range(2):
        adapted(input_ids=ids(), labels=ids()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    one = logits(adapted.eval())
    assert (one - plain).abs().max() > 1e-3
    adapted.save_pretrained(tmp_path)
    if kind not in ("pissa", "olora"):  # these change the weights of the base
        again = peft.PeftModel.from_pretrained(build(name), tmp_path).eval()
        assert_close(logits(again), one, 1e-6)
        adapted.add_adapter("other", KINDS[kind](targets))
        adapted.set_adapter("other")
        assert (logits(adapted) - one).abs().max() > 1e-3
        with adapted.disable_adapter():
            assert_close(logits(adapted), plain, 1e-6)
        adapted.set_adapter("default")
        assert_close(logits(adapted), one, 1e-6)
    unmerged = logits(adapted.double())
    assert_close(logits(adapted.merge_and_unload()), unmerged, EXACT)


@pytest.mark.parametrize("tied", [False, True])
def test_adapters_in_our_own_loops(tied, monkeypatch):
    """The losses of `halflife train` and of its evaluation call an adapted head, chunk by chunk."""
    model = build("mamba2", tie_embeddings=tied)
    adapted = peft.get_peft_model(model, KINDS["lora"](["in_proj"] if tied else ["in_proj", "lm_head"])).eval()
    network = model.to_halflife()
    labels = torch.cat([ids()[:, 1:], ids()[:, :1]], 1)
    exact = F.cross_entropy(logits(adapted).flatten(0, 1), labels.flatten())
    monkeypatch.setattr("halflife.models.loss.LOGITS", 3 * 31)
    loss = Objective(network)(ids(), labels)["loss"]
    assert_close(loss, exact, 1e-6)
    loss.backward()
    assert all(x.grad.any() for name, x in adapted.named_parameters() if "lora_B" in name)
    assert_close(language.by_position(network, [(ids(), labels)]).mean(), exact, 1e-6)
