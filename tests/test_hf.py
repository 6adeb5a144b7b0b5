"""The models in transformers: they meet its interface, and keep the values and the states of halflife's models."""

import json

import pytest
import torch
from combinations import SIZES
from helpers import add_noise, assert_close, assert_raises, assert_same
from pairwise import slow_beyond
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, pipeline
from transformers.loss.loss_utils import ForCausalLMLoss

import halflife
from halflife import LanguageModel, preset
from halflife.cli.checkpoint import load_tokenizer
from halflife.data.tokenizers import ByteTokenizer
from halflife.hf import HalflifeCache, HalflifeConfig, HalflifeForCausalLM
from halflife.hf.cache import CACHE
from halflife.models import PRESETS, checkpoint
from halflife.models.convert import convert
from halflife.models.load import checkpoints, load_any
from halflife.precision import Float32Module

NAMES = [*PRESETS, "mamba2+gate_rank", "mamba2+ska"]
FEW = ["mamba2", "rwkv7", "mamba2+ska"]
# Models of each kind. What differs within a layer is tested in test_layers.py.
KINDS = [*FEW, "mamba3", "gla", "gated_deltanet", "llama", "echo", "mamba2+gate_rank"]
TINY = {**SIZES, "hidden_size": 16, "num_heads": 2}
TOLERANCE = 1.2e-12  # float64: four times the largest error over all models, 3.0e-13


def build(name="mamba2", **options):
    model = HalflifeForCausalLM(HalflifeConfig.from_preset(name, **{**TINY, **options})).eval().double()
    return add_noise(model, 0.2)


def tokens(*shape):
    return torch.randint(1, TINY["vocab_size"], shape)


def same_weights(one, other):
    one, other = one.state_dict(), other.state_dict()
    assert one.keys() == other.keys()
    assert_same(one, other)


def test_config_survives_json_and_wraps_the_models(tmp_path):
    config = HalflifeConfig(model=preset("mamba2+post", **SIZES), eos_token_id=3)
    assert config.model_config() == preset("mamba2+post", **SIZES)
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (31, 32, 2)
    assert config.tie_word_embeddings
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(again, HalflifeConfig)
    assert (again.model, again.eos_token_id, again.use_cache) == (config.model, 3, True)
    assert HalflifeConfig.from_preset("mamba2+post", **SIZES).model == config.model
    assert json.loads((tmp_path / "config.json").read_text())["vocab_size"] == 31
    again.vocab_size = 40
    assert again.model["vocab_size"] == 40
    assert AutoConfig.from_pretrained(tmp_path, tie_word_embeddings=False).model["tie_embeddings"] is False
    for sizes in ({}, {"hidden_size": 30, "vocab_size": 9}):
        assert HalflifeConfig(**sizes).model_config() == preset("mamba2", **sizes)
    assert HalflifeConfig(num_attention_heads=4).model_config() == preset("mamba2", num_heads=4)


def test_config_errors():
    model = preset("mamba2", **SIZES).to_dict()
    assert_raises(ValueError, "hidden_sizes", HalflifeConfig, model={**model, "hidden_sizes": 3})
    assert_raises(ValueError, "vocab_size is 40", HalflifeConfig, model=model, vocab_size=40)
    assert_raises(ValueError, "num_attention_heads is 3, but", HalflifeConfig, model=model, num_attention_heads=3)
    assert_raises(ValueError, "but the first layer has", setattr, HalflifeConfig(model), "num_attention_heads", 3)
    assert_raises(TypeError, r"got 'mamba2'\. HalflifeConfig\.from_preset takes names", HalflifeConfig, model="mamba2")
    assert_raises(TypeError, r"num_layers, preset: give .*from_preset", HalflifeConfig, preset="gla", num_layers=2)


@pytest.mark.parametrize("name", slow_beyond(KINDS, NAMES))
def test_forward_is_the_models_own_and_streams(name):
    model, ids = build(name), tokens(2, 11)
    expected, _ = model.to_halflife()(ids)
    out = model(ids, use_cache=True, output_hidden_states=True)
    assert torch.equal(out.logits, expected)
    assert [tuple(x.shape) for x in out.hidden_states] == [(2, 11, 16)] * 3
    assert torch.equal(model.lm_head(out.hidden_states[-1]), expected)
    assert torch.equal(model(inputs_embeds=model.get_input_embeddings()(ids)).logits, expected)
    assert_close(model(ids, logits_to_keep=3).logits, expected[:, -3:], TOLERANCE)
    assert_close(model(ids, logits_to_keep=torch.tensor([2, 5])).logits, expected[:, [2, 5]], TOLERANCE)
    first = model(ids[:, :4])
    before = [{key: x.clone() for key, x in layer.items()} for layer in first.get(CACHE).state]
    second = model(ids[:, 4:], **{CACHE: first.get(CACHE)}, attention_mask=torch.ones(2, 11))
    assert_close(second.logits, expected[:, 4:], TOLERANCE)
    assert (first.get(CACHE).get_seq_length(), second.get(CACHE).get_seq_length()) == (4, 11)
    for layer, old in zip(first.get(CACHE).state, before, strict=True):
        assert all(torch.equal(layer[key], x) for key, x in old.items())
    assert model(ids, return_dict=False)[0].shape == expected.shape
    assert model(ids, use_cache=False).get(CACHE) is None


@pytest.mark.parametrize("name", slow_beyond(KINDS, NAMES))
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(name, side):
    model, short, long = build(name), tokens(1, 5), tokens(1, 9)
    padding = torch.zeros(1, 4, dtype=torch.long)
    padded = torch.cat([padding, short] if side == "left" else [short, padding], 1)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, slice(0, 4) if side == "left" else slice(5, None)] = 0
    out = model(torch.cat([padded, long]), attention_mask=mask, output_hidden_states=True)
    assert_close(out.logits[0][mask[0].bool()], model(short).logits[0], TOLERANCE)
    assert_close(out.logits[1], model(long).logits[0], TOLERANCE)
    assert_close(
        out.hidden_states[1][0][mask[0].bool()], model(short, output_hidden_states=True).hidden_states[1][0], TOLERANCE
    )
    # A further piece of several tokens continues from the same states.
    more, seen = tokens(2, 3), torch.cat([mask, torch.ones(2, 3, dtype=torch.long)], 1)
    got = model(more, attention_mask=seen, **{CACHE: out.get(CACHE)}).logits
    assert_close(got[0], model(torch.cat([short, more[:1]], 1)).logits[0, 5:], TOLERANCE)


def test_packed_sequences_are_separate():
    model, a, b = build("mamba2"), tokens(1, 4), tokens(1, 6)
    out = model(torch.cat([a, b], 1), cu_seqlens=torch.tensor([0, 4, 10]))
    assert_close(out.logits[:, 4:], model(b).logits, TOLERANCE)
    assert out.get(CACHE).batch_size == 2


def test_loss_is_that_of_transformers():
    model, ids = build(), tokens(2, 7)
    labels = ids.clone()
    labels[0, :3] = -100
    logits = model(ids).logits
    for count in (None, 20):
        expected = ForCausalLMLoss(logits, labels, 31, num_items_in_batch=count)
        assert torch.equal(model(ids, labels=labels, num_items_in_batch=count).loss, expected)
    kept = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    # Four times the error of the float32 loss, 3.4e-8.
    assert_close(model(ids, labels=labels).loss.double(), kept, 1.4e-7)


def test_the_wrapper_has_the_models_mode():
    for training in (False, True):
        net = LanguageModel(preset("mamba2", **SIZES)).train(training)
        assert HalflifeForCausalLM.of(net).training is training


def test_forward_errors():
    model, ids = build(), tokens(2, 3)
    for arguments, message in (
        ({}, "either"),
        ({"input_ids": ids, "inputs_embeds": torch.zeros(2, 3, 16)}, "either"),
        ({"input_ids": ids, "output_attentions": True}, "attention weights"),
        ({"input_ids": ids, "attention_mask": torch.ones(2, 2)}, r"\[B, T\] = \(2, 3\)"),
        ({"input_ids": ids, "attention_mask": torch.ones(4, 3)}, "attention_mask"),
        ({"input_ids": ids, "attention_mask": torch.ones(2, 6)}, "attention_mask"),
    ):
        assert_raises(ValueError, message, model, **arguments)
    assert_raises(TypeError, "attn_mask", model, ids, attn_mask=torch.ones(2, 3))


def test_it_is_drawn_as_the_library_draws_it():
    config = HalflifeConfig.from_preset("mamba2", **SIZES)
    torch.manual_seed(1)
    wrapped = HalflifeForCausalLM(config)
    torch.manual_seed(1)
    same_weights(wrapped.to_halflife(), LanguageModel(config.model_config()))


@pytest.mark.parametrize("name", ["mamba2", "rwkv7", "mamba2+post", "echo", "gated_deltanet"])
def test_files_keep_every_weight(name, tmp_path):
    model = build(name).float()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    same_weights(model, again)
    assert again.config.model == model.config.model
    assert not again.training
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16
    wide = [module for module in half.modules() if isinstance(module, Float32Module)]
    kept = {id(x) for module in wide for x in module.parameters(recurse=False)}
    assert kept
    for key, x in half.named_parameters():
        assert x.dtype == (torch.float32 if id(x) in kept else torch.bfloat16), key
        if id(x) in kept:
            assert torch.equal(x, model.get_parameter(key))
    assert torch.isfinite(half(tokens(1, 5)).logits).all()


def test_folders_of_halflife_load(tmp_path):
    model = LanguageModel(preset("rwkv7", **{**TINY, "vocab_size": 257}))
    wrapped = HalflifeForCausalLM.of(model)
    assert all(x is y for x, y in zip(wrapped.parameters(), model.parameters(), strict=True))
    loaded = HalflifeForCausalLM.from_halflife(checkpoint.save(model, tmp_path / "ours", "bytes+eos"))
    same_weights(loaded.to_halflife(), model)
    assert loaded.config.tokenizer == "bytes+eos"
    assert loaded.config.eos_token_id == loaded.generation_config.eos_token_id == 256  # where `generate` stops
    loaded.save_pretrained(tmp_path / "theirs")
    same_weights(HalflifeForCausalLM.from_pretrained(tmp_path / "theirs"), wrapped)


def test_another_head_in_the_place_of_a_tied_one_is_kept():
    model, ids = build(), tokens(1, 6)
    model.set_output_embeddings(torch.nn.Linear(16, 31, bias=False, dtype=torch.float64))
    ours = model.to_halflife()
    assert_close(ours(ids)[0], model(ids).logits, TOLERANCE)
    assert not ours.config.tie_embeddings
    assert build().to_halflife().config.tie_embeddings


@pytest.mark.parametrize("shards", [None, "10KB"])
def test_what_transformers_saves_opens_everywhere(tmp_path, shards):
    """`load`, `load_any`, `convert` and the list of checkpoints read it, with its tokenizer."""
    ours, theirs, converted = (tmp_path / name for name in ("ours", "theirs", "converted"))
    model = LanguageModel(preset("mamba2+post", **{**TINY, "vocab_size": 257}))
    ByteTokenizer(end_of_document=True).save(ours)
    checkpoint.save(model, ours, "bytes+eos")
    wrapped = AutoModelForCausalLM.from_pretrained(ours)
    assert wrapped.config.eos_token_id == 256  # where `generate` stops
    wrapped.save_pretrained(theirs, **({} if shards is None else {"max_shard_size": shards}))
    AutoTokenizer.from_pretrained(ours).save_pretrained(theirs)
    assert (theirs / "model.safetensors").exists() == (shards is None)
    for loaded in (checkpoint.load(theirs), load_any(theirs), checkpoint.load(convert(theirs, converted))):
        same_weights(loaded, model)
    assert checkpoints([tmp_path / "theirs"]) == {"mamba2+post": theirs}
    for folder in (ours, theirs, converted):
        tokenizer = load_tokenizer(folder, 257)
        assert (tokenizer.name, tokenizer.eos) == ("bytes+eos", 256)
        assert AutoTokenizer.from_pretrained(folder)("hé")["input_ids"] == tokenizer.encode("hé").tolist()
    assert_raises(ValueError, "halflife checkpoint already", convert, converted, tmp_path / "again")


@pytest.mark.parametrize("end", [False, True])
def test_the_byte_tokenizer_is_one_of_transformers(tmp_path, end):
    """`AutoTokenizer` and `pipeline` load its files, and its ids are the bytes."""
    own = ByteTokenizer(end)
    checkpoint.save(LanguageModel(preset("mamba2", **{**TINY, "vocab_size": own.vocab_size})), tmp_path, own.name)
    own.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert (len(theirs), theirs.eos_token_id) == (own.vocab_size, own.eos)
    for text in ("", "hello wörld\n\t  日本 🙂\x00\x7f", "".join(map(chr, range(400)))):
        assert theirs(text)["input_ids"] == own.encode(text).tolist()
        assert theirs.decode(own.encode(text).tolist()) == text
    assert theirs("<|endoftext|>")["input_ids"] == ([256] if end else own.encode("<|endoftext|>").tolist())
    written = pipeline("text-generation", str(tmp_path))("The ", max_new_tokens=3, do_sample=False)
    assert written[0]["generated_text"].startswith("The ")


def test_missing_weights_are_drawn_and_loaded_ones_stay(tmp_path):
    """This also holds in a module with some missing parameters, and in a PoST around a decay."""
    from safetensors.torch import load_file, save_file

    absent = {"mamba2": ("A_log", "embedding.weight"), "mamba2+post": ("delta",), "rwkv7": ("mu.r", "a0")}
    for name, missing in absent.items():
        folder = tmp_path / name
        model = build(name, hidden_size=64, num_heads=32).float()
        model.save_pretrained(folder)
        weights = load_file(folder / "model.safetensors")
        kept = {key: x for key, x in weights.items() if not key.endswith(missing)}
        assert len(kept) < len(weights)
        save_file(kept, folder / "model.safetensors", {"format": "pt"})
        head = kept.get("lm_head.weight", kept.get("model.embedding.weight"))  # of a tied one
        kept |= {} if head is None else {"lm_head.weight": head}
        again = HalflifeForCausalLM.from_pretrained(folder)
        fresh = HalflifeForCausalLM(model.config)
        for key, x in again.state_dict().items():
            if key in kept:
                assert torch.equal(x, kept[key]), key
            elif key.endswith("A_log"):
                assert ((x.exp() >= 1) & (x.exp() <= 16)).all()
                assert x.exp().max() > 10
            elif key.endswith(("embedding.weight", "lm_head.weight")):
                assert 0.018 < x.std() < 0.022
            else:  # deterministic initialisation
                assert torch.equal(x, fresh.state_dict()[key]), key


def test_meta_device():
    with torch.device("meta"):
        model = HalflifeForCausalLM(HalflifeConfig.from_preset("mamba2", **TINY))
    assert all(x.is_meta for x in model.parameters())
    model.to_empty(device="cpu")
    model.init_weights()
    rate = model.model.blocks[0].mixer.decay.A_log.exp()
    assert ((rate >= 1) & (rate <= 16)).all()
    assert torch.isfinite(model(tokens(1, 5)).logits).all()


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_and_their_size(tied, tmp_path):
    model, ids = build(tie_embeddings=tied), tokens(1, 6)
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied
    before = model(ids).logits
    for size in (40, 35):
        assert model.resize_token_embeddings(size, mean_resizing=False).weight.shape == (size, 16)
        assert model.config.vocab_size == model.lm_head.out_features == size
        out = model(ids, labels=ids)
        assert out.logits.shape == (1, 6, size)
        assert_close(out.logits[..., :31], before, TOLERANCE)
    assert (len({x.data_ptr() for x in model.parameters() if x.shape[0] == 35}) == 1) == tied
    model.save_pretrained(tmp_path)
    same_weights(HalflifeForCausalLM.from_pretrained(tmp_path), model)
    other = torch.nn.Embedding(35, 16, dtype=torch.float64)
    model.set_input_embeddings(other)
    assert model.get_input_embeddings() is other


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_recomputes_and_gives_the_same_gradients(name, reentrant):
    model, ids = build(name).train(), tokens(2, 6)
    calls = []
    model.model.blocks[1].mixer_norm.register_forward_hook(lambda *_: calls.append(1))

    def gradients():
        model.zero_grad()
        calls.clear()
        out = model(ids, labels=ids)
        assert out.get(CACHE) is None
        out.loss.backward()
        return {key: x.grad.clone() for key, x in model.named_parameters() if x.grad is not None}, len(calls)

    expected, once = gradients()
    assert len(expected) == len(list(model.parameters()))  # every parameter contributes to the loss
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    got, twice = gradients()
    assert (once, twice) == (1, 2)
    for key, x in expected.items():
        assert torch.equal(got[key], x), key
    model.activation_checkpointing_disable()
    assert gradients()[1] == 1


def test_hooks_of_accelerate_do_not_cut_layers_apart():
    """Over several devices, hooks copy the inputs of blocks, and RWKV-7's layers still pass values to later layers."""
    from accelerate import dispatch_model

    model, ids = build("rwkv7"), tokens(1, 6)
    expected = model(ids).logits
    parts = ("embedding", "embedding_norm", "blocks.0", "blocks.1", "norm")
    dispatch_model(
        model, {**{f"model.{part}": "cpu" for part in parts}, "lm_head": "cpu"}, main_device="cpu", force_hooks=True,
        skip_keys=model._skip_keys_device_placement,
    )  # fmt: skip
    assert hasattr(model.model.blocks[1], "_hf_hook")
    assert torch.equal(model(ids).logits, expected)


def test_device_map_auto(tmp_path):
    model = build("mamba2")
    model.save_pretrained(tmp_path)
    same_weights(AutoModelForCausalLM.from_pretrained(tmp_path, device_map="auto").to("cpu"), model)


def greedy(model, ids, count):
    """Decode greedily without a cache and without transformers."""
    for _ in range(count):
        ids = torch.cat([ids, model.to_halflife()(ids)[0][:, -1:].argmax(-1)], 1)
    return ids


# Echo's paper decodes in another way than it reads a prompt (test_ska_forms.py).
@pytest.mark.parametrize("name", slow_beyond(["mamba2", "mamba2+ska"], [n for n in NAMES if n != "echo_paper"]))
def test_generate_batched_is_what_each_prompt_gives(name):
    model, short, long = build(name), tokens(1, 4), tokens(1, 7)
    ids = torch.cat([torch.cat([torch.zeros(1, 3, dtype=torch.long), short], 1), long])
    mask = (ids > 0).long()
    settings = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    out = model.generate(ids, **settings, return_dict_in_generate=True)
    assert torch.equal(out.sequences[:1, 3:], greedy(model, short, 5))
    assert torch.equal(out.sequences[1:], greedy(model, long, 5))
    assert torch.equal(model.generate(ids, **settings, use_cache=False), out.sequences)
    # Given all tokens and the state, it reads only the tokens that the state has not seen.
    mask = torch.cat([mask, torch.ones(2, 5, dtype=torch.long)], 1)
    more = model.generate(
        out.sequences, **{CACHE: out.get(CACHE)}, **{**settings, "attention_mask": mask, "max_new_tokens": 3}
    )
    assert torch.equal(more[:1, 3:], greedy(model, short, 8))
    assert torch.equal(more[1:], greedy(model, long, 8))


@pytest.mark.parametrize("name", [*FEW, "llama"])
def test_beams_and_samples(name):
    model, ids = build(name), tokens(2, 5)
    settings = {"max_new_tokens": 4, "pad_token_id": 0}
    beams = {**settings, "num_beams": 3, "num_return_sequences": 2, "do_sample": False}
    out = model.generate(ids, **beams)
    assert out.shape == (4, 9)
    assert torch.equal(out, model.generate(ids, **beams, use_cache=False))
    samples = []
    for cached in (True, False):
        torch.manual_seed(5)
        samples.append(model.generate(ids, **settings, do_sample=True, num_return_sequences=3, use_cache=cached))
    assert samples[0].shape == (6, 9)
    assert torch.equal(*samples)
    # Beams start from a state of two rows and do not modify it.
    state = model(ids[:, :3]).get(CACHE)
    assert torch.equal(model.generate(ids, **{CACHE: state}, **beams), out)
    assert state.batch_size == 2


def test_generate_from_embeddings_and_after_the_end():
    model, ids = build(), tokens(2, 4)
    settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    whole = model.generate(ids, **settings)
    got = model.generate(inputs_embeds=model.get_input_embeddings()(ids), **settings)
    assert torch.equal(got, whole[:, 4:])
    state = model(ids).get(CACHE)
    assert_raises(ValueError, "only new tokens", model.generate, ids, **{CACHE: state}, **settings)
    assert_raises(ValueError, "model_kwargs", model.generate, ids, token_typo_ids=ids, **settings)


def test_cache_of_a_state():
    model = build()
    _, state = model.to_halflife()(tokens(2, 5))
    cache = HalflifeCache(state)
    assert (cache.get_seq_length(), len(cache), cache.batch_size) == (5, 2, 2)
    other = cache.copy()
    other.batch_repeat_interleave(2)
    other.reorder_cache(torch.tensor([3, 0]))
    assert cache.state is state
    assert torch.equal(other.state[0]["memory"], state[0]["memory"].flip(0))


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)], ids=str)
def test_without_tokens(shape):
    out = build()(torch.zeros(shape, dtype=torch.long), output_hidden_states=True)
    assert (out.logits.shape[:2], out.hidden_states[0].shape[:2], out[CACHE].seen) == (shape, shape, 0)


def test_the_module_is_imported_when_asked_for():
    assert halflife.hf.HalflifeForCausalLM is HalflifeForCausalLM
    with pytest.raises(AttributeError, match="no attribute 'hff'"):
        halflife.hff
