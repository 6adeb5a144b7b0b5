"""Weights that are elsewhere until a module runs: accelerate's offloading, and any tool that hooks `forward`."""

from contextlib import contextmanager

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from combinations import SIZES, every_part
from helpers import assert_close, assert_same
from pairwise import slow_beyond
from transformers import AutoModelForCausalLM

from halflife import LanguageModel, preset
from halflife.hf import HalflifeConfig, HalflifeForCausalLM
from halflife.models import PRESETS

APART = 6e-7  # the largest error of gates that are computed apart, measured
UNTIED = {**SIZES, "tie_embeddings": False}
# Options that no preset has, and that read parameters in other ways.
OPTIONS = {
    "mamba2+post stretch_gain": ("mamba2+post", {"stretch_gain": True}),
    "rwkv7+post stretch_gain": ("rwkv7+post", {"stretch_gain": True}),
    "gated_deltanet+post stretch_gain": ("gated_deltanet+post", {"stretch_gain": True}),
    "mamba2 frozen step": ("mamba2", {"decay_options": {"step_bias": "frozen"}}),
    "mamba3 learned rate": ("mamba3", {"rate_floor": None, "output_norm": True}),
    "mimo norm": ("mamba3_mimo", {"output_norm": True}),
    "llama qk_norm": ("llama", {"qk_norm": "head_plus_one", "gate": True}),
}
HYBRIDS = {
    "ska cg_projected": {"lift": "cg_projected", "mix": "powers", "conv_size": 3},
    "ska decay": {"decay": "mamba2", "beta": True, "post": {"train_length": 16}},
}
FEW = ["mamba2", "mamba3", "gla", "hgrn2", "gated_deltanet", "rwkv7", "llama", "fox", "echo", "mamba2+gate_rank"]
FEW += ["mamba2+log_linear", "mamba2+tpe", "gla+lrpe", "mamba2+post_norm", *OPTIONS]
ALL = [*every_part(), *OPTIONS, *HYBRIDS]


def config(name):
    if name in HYBRIDS:
        return preset("mamba2+ska", hybrid={"mixer": "ska", "options": HYBRIDS[name]}, **UNTIED)
    base, options = OPTIONS.get(name, (name, {}))
    return preset(base, mixer_options=options, **UNTIED)


class Absent(torch.Tensor):
    """A parameter that is elsewhere. It has a shape and a dtype, as on the meta device, and all else is an error."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if getattr(function, "__self__", None) in (torch.Tensor.dtype, torch.Tensor.shape, torch.Tensor.requires_grad):
            return super().__torch_function__(function, types, args, kwargs or {})
        raise AssertionError(f"{function.__name__} of a parameter outside the forward pass of its module")


@contextmanager
def only_in_forward(model):
    """Take the parameters and buffers of each module away, but for the time of its own `forward`."""
    taken, handles = {}, []

    def tensors(module):
        return [(store, name) for store in (module._parameters, module._buffers) for name in store]

    def take(module, *_):
        for store, name in tensors(module):
            if store[name] is not None:
                taken[id(module), name] = store[name]
                store[name] = torch.Tensor._make_subclass(Absent, store[name].detach())

    def give(module, *_):
        for store, name in tensors(module):
            store[name] = taken.pop((id(module), name), store[name])

    for module in model.modules():
        handles += [module.register_forward_pre_hook(give), module.register_forward_hook(take, always_call=True)]
        take(module)
    try:
        yield
    finally:
        for module in model.modules():
            give(module)
        for handle in handles:
            handle.remove()


def everything(model, ids):
    """The logits of a prompt and of a token after it."""
    logits, state = model(ids)
    return {"prompt": logits, "step": model(ids[:, :1], state)[0]}


def resident(name, length):
    """A model, ids, and what it computes of them with its weights in memory."""
    torch.manual_seed(0)
    model, ids = LanguageModel(config(name)).eval(), torch.randint(31, (2, length))
    with torch.no_grad():
        return model, ids, everything(model, ids)


every_model = pytest.mark.parametrize("name", slow_beyond(FEW, ALL))


@pytest.mark.parametrize("on_cpu", [True, False])
@every_model
def test_parameters_are_read_only_in_the_forward_pass_of_their_module(name, on_cpu, monkeypatch):
    """Also in what layers do on a GPU alone, where gates whose modules have hooks are computed apart."""
    monkeypatch.setattr(torch.Tensor, "is_cpu", on_cpu)
    model, ids, expected = resident(name, 9)
    with torch.no_grad(), only_in_forward(model):
        assert_close(everything(model, ids), expected, 0 if on_cpu else 4 * APART)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("name", slow_beyond(["mamba2", "rwkv7"], list(PRESETS)))
def test_so_are_those_of_transformers_models(name, chunked):
    """Also with a tied head, in the loss, and in the loss without all logits at once."""
    torch.manual_seed(0)
    model = HalflifeForCausalLM(HalflifeConfig.from_preset(name, **{**SIZES, "tie_embeddings": True})).train(chunked)
    model.config.chunked_loss, ids = chunked, torch.randint(31, (2, 9))
    with torch.no_grad():
        expected = model(input_ids=ids, labels=ids).loss
        with only_in_forward(model):
            assert_same(model(input_ids=ids, labels=ids).loss, expected)


@every_model
def test_models_offloaded_to_memory_equal_resident_ones(name):
    """accelerate copies every dict of arguments, and takes the weights of each module away after its `forward`."""
    model, ids, expected = resident(name, 40)
    with torch.no_grad():
        cpu_offload(model, torch.device("cpu"), offload_buffers=True)
        assert {x.device.type for x in model.parameters()} == {"meta"}
        assert_same(everything(model, ids), expected)


@pytest.mark.filterwarnings("ignore")  # accelerate says where the weights are
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", slow_beyond(["rwkv7", "mamba2+post"], every_part()))
def test_models_offloaded_to_disk_equal_resident_ones(name, tied, tmp_path):
    """By `disk_offload`, and by `from_pretrained` with a map that sends all parts, or every second one, to disk."""
    torch.manual_seed(0)
    options = {**SIZES, "tie_embeddings": tied}
    model = HalflifeForCausalLM(HalflifeConfig.from_preset(name, **options)).eval()
    model.save_pretrained(tmp_path / "model")
    ids = torch.randint(31, (2, 40))
    with torch.no_grad():
        expected = model(ids).logits
    parts = [f"model.{part}" for part, _ in model.model.named_children() if part != "blocks"]
    parts = [*parts, "lm_head", "model.blocks.0", "model.blocks.1"]
    some = {part: ("cpu", "disk")[i % 2] for i, part in enumerate(parts)}
    if tied:
        some["lm_head"] = some["model.embedding"]
    for devices in (dict.fromkeys(parts, "disk"), some):
        offloaded = AutoModelForCausalLM.from_pretrained(
            tmp_path / "model", device_map=devices, offload_folder=tmp_path / "offloaded"
        ).eval()
        assert "meta" in {x.device.type for x in offloaded.parameters()}
        with torch.no_grad():
            assert_same(offloaded(ids).logits, expected)
            assert_same(offloaded(ids).logits, expected)
    disk_offload(model, str(tmp_path / "again"), torch.device("cpu"))
    with torch.no_grad():
        assert_same(model(ids).logits, expected)


def test_a_tied_head_elsewhere_is_an_error():
    model = LanguageModel(preset("gla", **SIZES)).eval()
    cpu_offload(model, torch.device("cpu"))
    with pytest.raises(ValueError, match="the weight of the head is on meta and not on cpu"), torch.no_grad():
        model(torch.ones(1, 3, dtype=torch.long))
