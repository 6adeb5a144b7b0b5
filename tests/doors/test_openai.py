"""The server takes OpenAI's requests: each field of the client's own types, null, neutral and at its edges."""

from typing import get_type_hints

import pytest
import torch
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from halflife import LanguageModel, preset
from halflife.data.tokenizers import HuggingFaceTokenizer
from halflife.models.text import draw, probabilities
from halflife.serve.app import build
from halflife.serve.engine import Engine
from halflife.serve.schema import Chat, Completion, StreamOptions

pytestmark = pytest.mark.slow
completion_create_params = pytest.importorskip("openai.types.completion_create_params")  # only `make slow` installs it
chat_params = pytest.importorskip("openai.types.chat.completion_create_params")
chat_stream_options = pytest.importorskip("openai.types.chat.chat_completion_stream_options_param")

PATHS = {"/v1/completions": Completion, "/v1/chat/completions": Chat}
TYPES = {
    "/v1/completions": completion_create_params.CompletionCreateParamsNonStreaming,
    "/v1/chat/completions": chat_params.CompletionCreateParamsNonStreaming,
}
NEEDED = {
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
}
# Values that ask for what is so anyway, of fields whose other values may be refused.
NEUTRAL = {
    "best_of": 1, "echo": False, "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "n": 1, "stop": [],
    "stream": False, "suffix": "", "temperature": 1, "top_p": 1, "seed": 0, "user": "me", "max_tokens": 1,
    "metadata": {"a": "b"}, "stream_options": {}, "max_completion_tokens": 1, "modalities": ["text"], "tools": [],
    "parallel_tool_calls": True, "prompt_cache_key": "k", "prompt_cache_retention": "24h", "reasoning_effort": "none",
    "response_format": {"type": "text"}, "safety_identifier": "s", "service_tier": "auto", "store": False,
    "tool_choice": "none", "functions": [], "function_call": "none", "verbosity": "medium",
}  # fmt: skip
CHANGING = {"prompt", "max_tokens", "max_completion_tokens", "temperature"}  # these change the answer to `NEUTRAL`'s
NUMBERS = [-(2**63), -1, -0.0, 0, 1e-320, 1e-50, 0.3, 1, 2, 100, 2**31, 2**63 - 1, 2**63, 1e300]
EDGES = [*NUMBERS, True, False, "", "x", [], {}, [""], ["a"], [1], [-1], [[1], [-1]], {"1": 5}, {"type": "json_object"}]


@pytest.fixture(scope="module")
def client():
    words = {byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE({**words, "<|end|>": 256}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    wrapped = PreTrainedTokenizerFast(tokenizer_object=core, chat_template=template, eos_token="<|end|>")
    torch.manual_seed(0)
    model = LanguageModel(preset("mamba2", hidden_size=16, num_layers=1, num_heads=2, vocab_size=257)).eval()
    with TestClient(build(Engine(model, HuggingFaceTokenizer(wrapped, "bpe")), "tiny")) as client:
        yield client


def post(client, path, **body):
    short = {} if {"max_tokens", "max_completion_tokens"} & body.keys() else {"max_tokens": 2}
    return client.post(path, json={"model": "tiny", **NEEDED[path], **short, **body})


FIELDS = [(path, name) for path, form in TYPES.items() for name in get_type_hints(form)]


def test_every_field_of_the_clients_requests_is_known():
    for path, form in TYPES.items():
        assert get_type_hints(form).keys() <= PATHS[path].model_fields.keys()
    options = chat_stream_options.ChatCompletionStreamOptionsParam
    assert get_type_hints(options).keys() == StreamOptions.model_fields.keys()


@pytest.mark.parametrize(("path", "name"), FIELDS)
def test_null_and_neutral_values_are_taken(client, path, name):
    """Null means the default, also of fields that OpenAI's null does not mean anything for."""
    plain = post(client, path, temperature=0).json()["choices"]
    for value in [*([] if name == "messages" else [None]), *(NEUTRAL[key] for key in NEUTRAL if key == name)]:
        found = post(client, path, **{"temperature": 0, name: value})
        assert found.status_code == 200, (value, found.text)
        if name not in CHANGING:
            assert found.json()["choices"] == plain


@pytest.mark.parametrize(("path", "name"), FIELDS)
def test_other_values_are_taken_or_refused_by_name(client, path, name):
    for value in EDGES:
        found = post(client, path, **{name: value})
        assert found.status_code in ((200, 400) if name != "model" else (200, 400, 404)), (value, found.text)
        if found.status_code != 200:
            message = found.json()["error"]["message"]
            assert name.removeprefix("max_completion_") in message or "token ids" in message, (value, message)


@pytest.mark.parametrize(("body", "message"), [
    ({"prompt": [-1]}, "token ids must lie between 0 and 256; got -1"),
    ({"prompt": [3, 257]}, "token ids must lie between 0 and 256; got 257"),
    ({"prompt": [[3], [4, -7]]}, "token ids must lie between 0 and 256; got -7"),
    ({"prompt": [1.5]}, "prompt.0: Input should be a valid integer"),
    ({"prompt": 5}, "prompt: Input should be a valid string; or Input should be a valid list"),
    ({"stop": [1]}, "stop.0: Input should be a valid string"),
    ({"best_of": 3, "n": 2}, "best_of must be n, 2"),
    ({"suffix": "end"}, "suffix: Input should be ''"),
    ({"logit_bias": {"3": 1}}, "logit_bias"),
])  # fmt: skip
def test_what_is_refused_has_a_true_message(client, body, message):
    found = post(client, "/v1/completions", **body)
    assert found.status_code == 400
    assert message in found.json()["error"]["message"]


def test_a_content_part_that_is_no_text_is_named(client):
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    found = post(client, "/v1/chat/completions", messages=[{"role": "user", "content": [image]}])
    assert found.status_code == 400
    assert found.json()["error"]["param"].startswith("messages.0.content.0")


def test_without_a_prompt_a_text_begins_after_an_end(client):
    body = {"temperature": 0, "max_tokens": 5}
    assert (
        post(client, "/v1/completions", prompt=None, **body).json()["choices"]
        == post(client, "/v1/completions", prompt=[256], **body).json()["choices"]
    )


logits = st.one_of(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=9),
    st.lists(st.sampled_from([0.0, -1.0, 3e38, -3e38, 1e-45]), min_size=1, max_size=9),
)


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(
    logits,
    st.floats(0, 100),
    st.one_of(st.none(), st.integers(1, 12)),
    st.one_of(st.none(), st.floats(0, 1), st.sampled_from([0.0, 1e-50, 5e-324, 1e-45])),
    st.integers(0, 2**62),
)
def test_sampling_never_fails_for_a_legal_value(values, temperature, top_k, top_p, seed):
    generator = torch.Generator().manual_seed(seed)
    token = draw(torch.tensor(values), temperature, top_k, top_p, generator)
    assert 0 <= token < len(values)
    if temperature == 0:
        assert values[token] == max(values)
    elif top_k == 1 or (top_p is not None and top_p <= 1e-45):
        p = probabilities(torch.tensor(values), temperature)
        assert p[token] == p.max()


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_requests_with_legal_values_are_answered(client, data):
    body = data.draw(st.fixed_dictionaries({}, optional={
        "temperature": st.floats(0, 2), "top_p": st.floats(0, 1), "n": st.integers(1, 3),
        "seed": st.integers(-(2**63), 2**63 - 1), "logprobs": st.integers(0, 5),
        "stop": st.text(min_size=1, max_size=3),
    }))  # fmt: skip
    found = post(client, "/v1/completions", **body)
    assert found.status_code == 200, (body, found.text)
