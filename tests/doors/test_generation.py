"""`generate` of transformers does with these models what it does with any other, or refuses by name."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from combinations import SIZES
from helpers import add_noise, assert_close, assert_raises
from pairwise import slow_beyond
from transformers import AutoTokenizer, CompileConfig, DynamicCache, LlamaConfig, LlamaForCausalLM, TextIteratorStreamer

from halflife.data.byte_tokenizer import ByteTokenizer
from halflife.hf import HalflifeCache, HalflifeConfig, HalflifeForCausalLM
from halflife.hf.cache import CACHE
from halflife.models import PRESETS

NAMES = [*(name for name in PRESETS if name != "echo_paper"), "mamba2+gate_rank", "mamba2+ska", "mamba2+tpe"]
SMALL = {**SIZES, "hidden_size": 16, "num_heads": 2}
GREEDY = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
TOLERANCE = 1.2e-12  # float64, as in test_hf.py
FLOAT32 = 1.2e-7  # `generate` rounds logits to float32

few = pytest.mark.parametrize("name", slow_beyond(["mamba2"], NAMES))


def build(name="mamba2", **options):
    model = HalflifeForCausalLM(HalflifeConfig.from_preset(name, **{**SMALL, **options})).eval().double()
    return add_noise(model, 0.2)


def tokens(*shape):
    return torch.randint(1, SMALL["vocab_size"], shape)


def nearly(model):
    """A model that often agrees with `model`."""
    return add_noise(copy.deepcopy(model), 0.05)


def passes(model):
    """Return a list to which every forward pass of `model` appends the number of its tokens, and the hook."""
    lengths = []

    def append(_, __, given, ___):
        lengths.append(given["input_ids"].shape[1])

    return lengths, model.register_forward_hook(append, with_kwargs=True)


@pytest.mark.parametrize("name", slow_beyond(["mamba2", "echo"], NAMES))
def test_assisted_decoding_is_greedy_decoding(name):
    model, ids = build(name), tokens(1, 5)
    ids = torch.cat([torch.zeros(1, 2, dtype=torch.long), ids, ids], 1)  # padding, and words that occur twice
    settings = {**GREEDY, "attention_mask": (ids > 0).long(), "return_dict_in_generate": True, "output_logits": True}
    expected = model.generate(ids, **settings)
    for options in ({"assistant_model": nearly(model)}, {"prompt_lookup_num_tokens": 3}):
        lengths, hook = passes(model)
        got = model.generate(ids, **settings, **options)
        assert torch.equal(got.sequences, expected.sequences)
        assert_close(torch.stack(got.logits), torch.stack(expected.logits), FLOAT32)
        assert 1 < max(lengths) < 12  # tokens were drafted, and the prompt was read before
        hook.remove()
        a, b = got.get(CACHE), expected.get(CACHE)
        assert a.seen == b.seen == 19
        more = tokens(1, 2)
        assert_close(model(more, **{CACHE: a}).logits, model(more, **{CACHE: b}).logits, TOLERANCE)


@pytest.mark.parametrize("name", slow_beyond(["rwkv7", "llama"], NAMES))
def test_a_cropped_cache_is_that_of_the_shorter_text(name):
    """The state is restored for every number of tokens, after passes of one token and of many, with padding."""
    model, ids, more = build(name), tokens(2, 9), tokens(2, 3)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :2] = 0

    def read(*lengths):
        cache, start = HalflifeCache(), 0
        cache.activate_past_recording()
        for length in lengths:
            part = slice(start, start + length)
            cache = model(ids[:, part], attention_mask=mask[:, part], **{CACHE: cache}).get(CACHE)
            start += length
        return cache

    for stop in (1, 4, 6, 8):
        expected = model(torch.cat([ids[:, :stop], more], 1), attention_mask=pad(mask[:, :stop], 3)).logits[:, stop:]
        for cache in (read(9), read(4, 5), read(6, 1, 1, 1)):
            cache.crop(0)
            cache.crop(stop - 9)
            assert cache.get_seq_length() == stop
            out = model(more, **{CACHE: cache})
            assert_close(out.logits, expected, TOLERANCE)
            again = out.get(CACHE)
            again.crop(-2)  # and once more
            again.batch_select_indices(torch.tensor([1, 0]))
            got = model(more[:, 1:].flip(0), **{CACHE: again}).logits
            assert_close(got.flip(0), expected[:, 1:], TOLERANCE)


def test_crop_says_what_it_needs():
    model, ids = build(), tokens(1, 5)
    cache = model(ids).get(CACHE)
    assert_raises(RuntimeError, "activate_past_recording", cache.crop, -1)
    cache.activate_past_recording()
    later = model(ids, **{CACHE: cache}).get(CACHE)
    assert_raises(RuntimeError, "before 5 tokens were not kept", later.copy().crop, -6)
    assert_raises(RuntimeError, "negative number of tokens.*got 1 while", later.crop, 1)
    later.crop(-5)
    assert_close(model(ids, **{CACHE: later}).logits, model(ids, **{CACHE: cache}).logits, TOLERANCE)


def test_an_assistant_of_another_kind():
    """Other sizes, other architectures, another library's, and another tokenizer."""
    tokenizer = ByteTokenizer(end_of_document=True)
    model = build(vocab_size=257)
    ids = torch.tensor([tokenizer.encode("one two three, one two ").tolist()])
    llama = LlamaForCausalLM(
        LlamaConfig(vocab_size=257, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    )
    expected = model.generate(ids, **GREEDY)
    for assistant in (build("rwkv7", vocab_size=257, num_layers=3), llama):
        assert torch.equal(model.generate(ids, **GREEDY, assistant_model=assistant), expected)
    prompt = torch.cat([ids, ids], 1)
    assert torch.equal(llama.generate(prompt, **GREEDY, assistant_model=model), llama.generate(prompt, **GREEDY))
    both = {"tokenizer": theirs(tokenizer), "assistant_tokenizer": theirs(ByteTokenizer())}
    got = model.generate(ids, **GREEDY, assistant_model=build(vocab_size=300), **both)
    assert torch.equal(got, expected)
    torch.manual_seed(0)
    assert model.generate(ids, **{**GREEDY, "do_sample": True}, assistant_model=llama).shape == expected.shape


def test_assisted_decoding_goes_on_from_a_state():
    """The ids may be all tokens or only the new ones, and the caller's state does not change."""
    model, ids = build(), torch.cat([(part := tokens(1, 6)), part], 1)
    expected = model.generate(ids, **GREEDY)
    cache = model(ids[:, :4]).get(CACHE)
    state, mask = cache.state, torch.ones(1, 12)
    for given in (ids, ids[:, 4:]):
        for options in ({}, {"output_hidden_states": True}, {"prefill_chunk_size": 2}):
            settings = {**GREEDY, **options, "prompt_lookup_num_tokens": 2, "attention_mask": mask}
            out = model.generate(given, **{CACHE: cache}, **settings, return_dict_in_generate=True)
            assert torch.equal(out.sequences, expected[:, 12 - given.shape[1] :])
    embeddings = model.get_input_embeddings()(ids)
    assert torch.equal(model.generate(inputs_embeds=embeddings, **GREEDY, prompt_lookup_num_tokens=2), expected[:, 12:])
    assert cache.state is state
    assert_raises(RuntimeError, "activate_past_recording", cache.crop, -1)
    lookup = {"prompt_lookup_num_tokens": 2}
    for columns, message, options in ((4, "only new", {}), (4, "only new", lookup), (7, "7 columns", lookup)):
        settings = {**GREEDY, **options, "attention_mask": torch.ones(1, columns)}
        assert_raises(ValueError, message, model.generate, ids[:, :4], **{CACHE: cache}, **settings)


@few
def test_what_generate_returns(name):
    """Scores, logits, hidden states and the state are what one forward pass over all tokens gives."""
    model, ids = build(name), tokens(2, 5)
    shown = dict.fromkeys(("return_dict_in_generate", "output_hidden_states", "output_logits", "output_scores"), True)
    for options in ({}, {"do_sample": True, "num_return_sequences": 2, "top_k": 5}, {"use_cache": False}):
        out = model.generate(ids, **{**GREEDY, **shown, **options})
        whole = model(out.sequences[:, :-1], output_hidden_states=True)
        assert_close(torch.stack(out.logits, 1).double(), whole.logits[:, 4:], FLOAT32)
        if "top_k" not in options:
            assert all(torch.equal(a, b) for a, b in zip(out.scores, out.logits, strict=True))
        if options.get("use_cache") is None:
            for i, hidden in enumerate(whole.hidden_states):
                assert_close(torch.cat([step[i] for step in out.hidden_states], 1), hidden, TOLERANCE)
            assert_same_state(out.get(CACHE), whole.get(CACHE))
        else:
            assert out.get(CACHE) is None
    repeated = torch.cat([ids[:1], ids[:1]], 1)
    plain, assisted = (
        model.generate(repeated, **GREEDY, **shown, **options) for options in ({}, {"prompt_lookup_num_tokens": 2})
    )
    assert [[x.shape for x in step] for step in plain.hidden_states] == [
        [x.shape for x in step] for step in assisted.hidden_states
    ]
    for a, b in zip(plain.hidden_states, assisted.hidden_states, strict=True):
        assert_close(torch.stack(b).flatten(0, 2), torch.stack(a).flatten(0, 2), TOLERANCE)


@few
def test_a_prompt_is_read_in_pieces(name):
    """Rows whose padding fills whole pieces are included."""
    model, ids = build(name), tokens(3, 11)
    mask = torch.ones(3, 11, dtype=torch.long)
    mask[0, :7], mask[1, :2] = 0, 0
    expected = model.generate(ids, attention_mask=mask, **GREEDY)
    for size in (1, 3, 20):
        for options in ({}, {"num_beams": 1, "cache_implementation": "static"}):
            got = model.generate(ids, attention_mask=mask, **GREEDY, prefill_chunk_size=size, **options)
            assert torch.equal(got, expected)


@few
def test_padding_is_on_either_side(name):
    """A row goes on after its last token, whatever stands beside it; hidden states stay at their columns."""
    model, short, long = build(name), tokens(1, 4), tokens(1, 7)
    padding = torch.zeros(1, 3, dtype=torch.long)
    shown = {**GREEDY, "return_dict_in_generate": True, "output_hidden_states": True, "output_logits": True}
    ways = ({}, {"prefill_chunk_size": 3}, {"use_cache": False}, {"num_beams": 2})
    for row, tried in (
        ([short, padding], ways[:1]), ([padding[:, :1], short, padding[:, :2]], ways), ([padding, short], ways[:1])
    ):  # fmt: skip
        ids = torch.cat([torch.cat(row, 1), long])
        mask = (ids > 0).long()
        for options in tried:
            expected = [model.generate(one, **{**shown, **options}) for one in (short, long)]
            out = model.generate(ids, attention_mask=mask, **{**shown, **options})
            assert torch.equal(out.sequences[:, :7], ids)
            for i, one in enumerate(expected):
                assert torch.equal(out.sequences[i, 7:], one.sequences[0, -8:])
            if not options:
                hidden = model(ids, attention_mask=mask, output_hidden_states=True).hidden_states
                for a, b in zip(out.hidden_states[0], hidden, strict=True):
                    assert_close(a[mask.bool()], b[mask.bool()], TOLERANCE)
    state = model(long[:, :3].expand(2, -1)).get(CACHE)
    ids = torch.cat([torch.cat([long[:, :3], short, padding], 1), torch.cat([long[:, :3], long], 1)])
    expected = [model.generate(torch.cat([long[:, :3], one], 1), **GREEDY)[0, -8:] for one in (short, long)]
    for given in (ids, ids[:, 3:]):
        got = model.generate(given, attention_mask=(ids > 0).long(), **{CACHE: state}, **GREEDY)
        assert torch.equal(got[:, -8:], torch.stack(expected))
    embeddings = model.get_input_embeddings()(ids)
    got = model.generate(inputs_embeds=embeddings, attention_mask=(ids > 0).long(), **GREEDY)
    assert torch.equal(got, torch.stack(expected))
    mask = torch.tensor([[1] * 10, [0] * 10])
    assert_raises(ValueError, "no token to continue", model.generate, ids, attention_mask=mask, **GREEDY)
    lookup = {**GREEDY, "prompt_lookup_num_tokens": 2}
    assert_raises(ValueError, "leave the padding out", model.generate, ids[:1], attention_mask=ids[:1] > 0, **lookup)


@few
def test_stopping_strings_streamers_and_beams(name):
    tokenizer = theirs(ByteTokenizer(end_of_document=True))
    model = build(name, vocab_size=257)
    ids = tokenizer(["some text"], return_tensors="pt").input_ids
    settings = {**GREEDY, "suppress_tokens": [*range(33), *range(127, 257)]}
    out = model.generate(ids, **settings)
    stopped = model.generate(ids, **settings, stop_strings=[tokenizer.decode(out[0, 10:12])], tokenizer=tokenizer)
    assert stopped.shape[1] <= 12
    assert torch.equal(stopped, out[:, : stopped.shape[1]])
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    model.generate(ids, **settings, streamer=streamer)
    assert "".join(streamer) == tokenizer.decode(out[0, 9:])
    beams = {**GREEDY, "num_beams": 3, "num_return_sequences": 3}
    assert torch.equal(model.generate(ids, **beams), model.generate(ids, **beams, use_cache=False))


def test_kinds_of_cache():
    model, ids = build(), tokens(2, 5)
    for options in ({}, {"num_beams": 2}, {"do_sample": True, "top_k": 1}):
        expected = model.generate(ids, **{**GREEDY, **options}, use_cache=False)
        for kind in (None, "dynamic", "static") if not options else (None, "static"):
            given = {} if kind is None else {"cache_implementation": kind}
            assert torch.equal(model.generate(ids, **{**GREEDY, **options}, **given), expected)


def test_what_cannot_be_is_refused_by_name():
    model, ids = build(), tokens(1, 5)
    for kind in ("offloaded", "quantized", "offloaded_static"):
        message = f"cache_implementation='{kind}'.*'static'"
        assert_raises(ValueError, message, model.generate, ids, **GREEDY, cache_implementation=kind)
    assert_raises(ValueError, "halflife serve", model.generate, ids, **GREEDY, cache_implementation="paged")
    assert_raises(ValueError, "halflife serve", model.generate_batch, [[1, 2]])
    assert_raises(ValueError, "assistant_early_exit", model.generate, ids, **GREEDY, assistant_early_exit=1)
    assert_raises(ValueError, "use_mtp", model.generate, ids, **GREEDY, use_mtp=True)
    for options in ({}, {"num_beams": 2}, {"use_cache": False}, {"prompt_lookup_num_tokens": 2}):
        assert_raises(
            TypeError, "must be the HalflifeCache .* got DynamicCache", model.generate, ids, **GREEDY,
            **{CACHE: DynamicCache()}, **options,
        )  # fmt: skip
    assert_raises(
        ValueError, "decodes in another way", build("echo_paper").generate, ids, **GREEDY, prompt_lookup_num_tokens=2
    )


GROWING = ("llama", "fox")
COMPILED = [name for name in NAMES if "ska" not in name and "echo" not in name and name not in GROWING]


def compare_compiled():
    """Print what differs for each model with a static cache, as JSON. This runs in another process."""
    found = {name: compiled(name, "eager") for name in COMPILED}
    print(json.dumps({**found, "inductor": compiled("mamba2", "inductor")}))


def compiled(name, backend):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, ids = build(name).float(), tokens(2, 7)
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[0, :3] = 0
    config = CompileConfig(fullgraph=True, backend=backend, mode=None)
    config._compile_all_devices = True
    settings = {**GREEDY, "attention_mask": mask}
    expected = model.generate(ids, **settings)
    try:
        got = model.generate(ids, **settings, cache_implementation="static", compile_config=config)
    except Exception as error:
        return repr(error)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return "" if torch.equal(got, expected) and graphs == 1 else f"{graphs} graphs: {got} instead of {expected}"


@pytest.fixture(scope="module")
def errors():
    """Models are compiled as users run them, without pytest's shape checks, which no compiler can trace."""
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", "import test_generation; test_generation.compare_compiled()"], cwd=here,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(here.parent), str(here.parents[1])])},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", [*COMPILED, "inductor"])
def test_a_static_cache_compiles_to_one_graph(name, errors):
    """Every step runs one graph without breaks (`docs/native.md` says why SKA cannot), also after padding."""
    assert errors[name] == ""


def pad(mask, count):
    return torch.nn.functional.pad(mask, (0, count), value=1)


def assert_same_state(one, other):
    assert one.seen == other.seen
    for a, b in zip(one.state, other.state, strict=True):
        assert_close({key: x.double() for key, x in a.items()}, {key: x.double() for key, x in b.items()}, TOLERANCE)


def theirs(tokenizer):
    """The tokenizer as one of transformers."""
    with TemporaryDirectory() as folder:
        tokenizer.save(folder)
        return AutoTokenizer.from_pretrained(folder)
