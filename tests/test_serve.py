"""The server in this process: its numbers, streams, stop strings, sessions, limits, and clients that leave."""

import asyncio
import json
import threading
import time
from queue import Queue

import pytest
import torch
from fastapi.testclient import TestClient
from helpers import add_noise, assert_raises, cases

from halflife import LanguageModel, Session, preset
from halflife.data.tokenizers import ByteTokenizer, HuggingFaceTokenizer, load_tokenizer
from halflife.models import graphs
from halflife.models.states import size, stack
from halflife.models.text import TextStream
from halflife.serve.app import Limits, build
from halflife.serve.engine import Engine, last_hidden
from halflife.serve.jobs import Done, Failed, Full, Job, Piece, Settings, Stopping
from halflife.serve.pages import Pages
from halflife.serve.prefixes import PrefixCache
from halflife.serve.sessions import Busy
from halflife.serve.sessions import Session as Session_

BYTES = load_tokenizer("bytes")
PROMPTS = [[7], [1, 2, 3], list(range(40, 63)), [5] * 18]
SYSTEM = list(range(60, 94))  # a beginning that prompts share


def tiny(name="mamba2", **options):
    """Build a model of bytes in float64, so that equal results are equal tokens. It writes printable characters."""
    sizes = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 256, "train_length": 16}
    model = add_noise(LanguageModel(preset(name, **{**sizes, **options})).eval(), 0.3).double()
    with torch.no_grad():
        model.embedding.weight[:32] = model.embedding.weight[127:] = 0
    return model


def engine(model, **options):
    return Engine(model, BYTES, **{"piece": 16, "cache_bytes": 1 << 20, **options})


def submit(engine, prompt, begin=None, **settings):
    """Submit a job and return its events, a list that grows."""
    events = []
    engine.submit(Job(prompt, Settings(**{"max_tokens": 4, "temperature": 0, **settings}), events.append, begin))
    return events


def run(engine, *jobs):
    """Turn the engine until all jobs have ended."""
    while not all(events and isinstance(events[-1], Done | Failed) for events in jobs):
        engine.turn()
    return jobs


def tokens(events, choice=0):
    return [w.token for e in events if isinstance(e, Piece) and e.choice == choice for w in e.tokens]


def text(events):
    return "".join(e.text for e in events if isinstance(e, Piece))


def alone(model, prompt, count=4, **settings):
    return list(Session(model).feed(prompt).sample(count, **{"temperature": 0, **settings}))


def test_graphs_of_tokens_serve_each_number_of_rows(monkeypatch):
    """With faked graphs (see test_session.py): jobs that come and end at different turns, and several continuations."""
    monkeypatch.setattr(graphs, "capture", lambda function: function)
    monkeypatch.setattr(graphs.TokenGraphs, "_possible", lambda self: True)
    model = tiny()
    shared = engine(model)
    shared._hidden = graphs.TokenGraphs(model, last_hidden)
    prompts = ([1, 2, 3], 3), ([7, 8], 6), ([5], 5)
    jobs = []
    for prompt, count in prompts:
        jobs.append(submit(shared, prompt, max_tokens=count, n=2))
        shared.turn()
    run(shared, *jobs)
    for job, (prompt, count) in zip(jobs, prompts, strict=True):
        expected = alone(model, prompt, count)
        assert [tokens(job, choice) for choice in (0, 1)] == [expected, expected]
    assert {rows for rows, *_ in shared._hidden._graphs} == {2, 4}


def test_a_step_reads_the_tokens_of_all_rows_at_once(monkeypatch):
    shared, reads, tolist = engine(tiny()), [], torch.Tensor.tolist
    for prompt in ([1], [2], [3]):
        submit(shared, prompt, max_tokens=9)
    shared.turn()
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: reads.append(x.shape) or tolist(x))
    shared.turn()
    assert reads == [(3,)]


SLOW = ("rwkv7", "mamba2+ska", "simple+tpe", "gated_deltanet+gate_rank")


@pytest.mark.parametrize("name", ["mamba2", "llama", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_requests_that_share_steps_get_what_each_would_get_alone(name):
    """Prompts of several lengths are read in pieces, in one call, and join the batch at different times."""
    model = tiny(name, num_layers=2 if "+ska" in name else 1)
    shared = engine(model)
    first = submit(shared, PROMPTS[0])
    shared.turn()
    jobs = run(shared, first, *(submit(shared, prompt) for prompt in PROMPTS[1:]))
    for prompt, events in zip(PROMPTS, jobs, strict=True):
        assert tokens(events) == alone(model, prompt)
        assert events[-1].read == len(prompt)
    if name != "llama":
        assert shared.counts.steps < 8  # alone, four prompts need 12


def test_prompts_of_all_lengths_are_read_in_calls_of_few_shapes(monkeypatch):
    """Libraries store kernels for every shape, so the shapes bound the memory of the server."""
    model = tiny()
    shared, shapes, hidden = engine(model, piece=512, cache_bytes=0), set(), model.hidden
    monkeypatch.setattr(model, "hidden", lambda ids, *rest: shapes.add(tuple(ids.shape)) or hidden(ids, *rest))
    run(shared, *(submit(shared, [3] * length, max_tokens=0) for length in range(1, 200, 7)))
    assert shared.counts.prompt_tokens == sum(range(1, 200, 7))
    assert {rows for rows, _ in shapes} <= {1, 2, 4, 8, 16, 32}
    assert {length for _, length in shapes} <= {*range(16), 16, 32, 48, 64, 128}


def test_random_continuations_depend_on_their_seeds_alone():
    model = tiny()
    shared = engine(model)
    jobs = run(shared, *(submit(shared, [9], temperature=1.0, top_p=0.8, seed=seed, n=2) for seed in (3, 4)))
    draws = [tokens(events, choice) for events in jobs for choice in (0, 1)]
    expected = [
        alone(model, [9], temperature=1.0, top_p=0.8, generator=torch.Generator().manual_seed(seed))
        for seed in (3, 4, 4, 5)
    ]
    assert draws == expected
    assert draws[0] != draws[1]


def test_a_prefix_that_was_read_is_not_read_again_and_changes_no_number():
    model = tiny()
    shared = engine(model)
    for i, reused in enumerate((0, 0, 32, 32)):  # the second prompt makes the state, at a multiple of 16 tokens
        prompt = [*SYSTEM, 200 + i, 7]
        (events,) = run(shared, submit(shared, prompt, logprobs=1))
        (fresh,) = run(cold := engine(model, cache_bytes=0), submit(cold, prompt, logprobs=1))
        assert events[-1].reused == reused
        assert tokens(events) == tokens(fresh) == alone(model, prompt)
        for got, expected in zip(events[:-1], fresh[:-1], strict=True):
            assert got.tokens[0].logprob == pytest.approx(expected.tokens[0].logprob, abs=1e-12)
    answered = [*prompt, *tokens(events)]
    (events,) = run(shared, submit(shared, [*answered, 50]))
    assert events[-1].reused == len(answered) - 1  # a chat goes on from the end of the answer
    assert tokens(events) == alone(model, [*answered, 50])


def test_the_states_of_prefixes_stay_within_their_bytes(monkeypatch):
    model = tiny()
    state = Session(model).feed([1]).state
    monkeypatch.setattr("halflife.serve.prefixes.SHORTEST_PREFIX", 2)
    cache = PrefixCache(3 * (size(state) + 128))
    for i in range(9):
        cache.add([i, i], state, torch.zeros(16, dtype=torch.float64))
    assert len(cache) == 3
    assert cache.bytes <= cache.capacity
    assert cache.find([8, 8, 1])[0].length == 2
    assert cache.find([0, 0, 1])[0] is None
    cache.add([9, 9], stack([state] * 4), torch.zeros(16, dtype=torch.float64))  # it alone is too large
    assert len(cache) == 3
    assert cache.find([9, 9, 1])[0] is None


def test_a_long_prompt_does_not_stop_the_others():
    shared = engine(tiny(), cache_bytes=0)
    long = submit(shared, [3] * 100)
    short = submit(shared, [4])
    run(shared, short)
    assert not long
    run(shared, long)


def test_a_job_that_is_cancelled_leaves_and_others_go_on():
    model = tiny()
    shared = engine(model)
    gone = submit(shared, [1], max_tokens=10**6)
    stays = submit(shared, [2, 3])
    shared.turn()
    (job,) = (job for job in shared._jobs() if job.tokens == [1])
    job.cancelled = True
    run(shared, stays, gone)
    assert isinstance(gone[-1], Failed)
    assert tokens(stays) == alone(model, [2, 3])
    assert (shared.active, shared.counts.cancelled) == (0, 1)


@pytest.mark.parametrize("part", ["hidden", "logits"])
def test_an_error_of_the_model_ends_its_jobs_and_not_the_engine(part, monkeypatch):
    model = tiny()
    shared = engine(model)
    with monkeypatch.context() as broken:
        broken.setattr(model, part, lambda *_: 1 / 0)
        (events,) = run(shared, submit(shared, [1]))
    assert "ZeroDivisionError" in events[-1].message
    (events,) = run(shared, submit(shared, [1]))
    assert tokens(events) == alone(model, [1])


@pytest.mark.parametrize("count", [1, 2])
def test_a_prompt_that_the_tokenizer_cannot_write_ends_its_job_alone(count):
    class Narrow(ByteTokenizer):
        def decode(self, ids):
            assert 200 not in list(ids)
            return super().decode(ids)

    model = tiny()
    shared, bad = Engine(model, Narrow(), piece=16), []
    good = submit(shared, [2, 3], max_tokens=6)
    shared.turn()
    shared.submit(Job([1, 200], Settings(max_tokens=4, n=count), bad.append))
    run(shared, bad, good)
    assert "AssertionError" in bad[-1].message
    assert tokens(good) == alone(model, [2, 3], 6)
    assert (shared.active, shared.counts.failed) == (0, 1)


def test_a_job_that_ends_early_keeps_no_state():
    shared = engine(tiny("llama"))
    job = shared.submit(Job([1] * 100, Settings(max_tokens=4), lambda event: None))
    shared.turn()
    assert job.state is not None
    job.cancelled = True
    shared.turn()
    assert (job.state, job.hidden) == (None, None)


def test_a_fault_of_the_engine_ends_its_jobs_and_not_its_thread(model, monkeypatch):
    shared = engine(model)
    with monkeypatch.context() as broken:
        broken.setattr(shared, "turn", lambda: 1 / 0)
        events = submit(shared, [1])
        shared.start()
        while not events:
            time.sleep(0.01)
    assert "ZeroDivisionError" in events[-1].message
    assert shared.call(lambda: "alive").result(5) == "alive"
    shared.close()
    assert_raises(Stopping, "stopping", shared.call, int)


@pytest.mark.parametrize("temperature", [0, 1])
def test_logits_that_are_not_finite_end_their_row_alone(temperature):
    model = tiny(tie_embeddings=False)
    with torch.no_grad():
        model.embedding.weight[200] = torch.nan
    shared = engine(model)
    bad, good = run(shared, *(submit(shared, prompt, temperature=temperature, seed=1) for prompt in ([1, 200], [1, 2])))
    assert "the logits of the model are not finite" in bad[-1].message
    (expected,) = run(shared, submit(shared, [1, 2], temperature=temperature, seed=1))
    assert tokens(good) == tokens(expected)
    assert len(tokens(good)) == 4


def test_the_queue_is_bounded_and_closing_ends_what_waits():
    shared = engine(tiny(), max_waiting=2)
    jobs = [submit(shared, [1]) for _ in range(2)]
    with pytest.raises(Full):
        submit(shared, [1])
    assert_raises(ValueError, "n must be at most 32", submit, shared, [1], n=33)
    shared.close()
    shared.start()._thread.join()
    assert all("stopping" in events[-1].message for events in jobs)


@cases(
    "pieces, stops, expected",
    (["ab", "c\n", "\nd"], ["\n\n"], ["ab", "c", ""]),  # across tokens, in the middle of them
    (["a\n", "b\n\n"], ["\n\n"], ["a", "\nb"]),  # what looked like a beginning is released
    (["xSTxSTO", "P"], ["STOP", "OP"], ["xSTx", ""]),  # the earliest end of two
    (["abc"], [], ["abc"]),
)
def test_stop_strings_end_the_text_wherever_tokens_end(pieces, stops, expected):
    stream = TextStream(lambda tokens: "".join(pieces[i] for i in tokens), stops=stops)
    assert [stream.push([i]) for i in range(len(pieces))] == expected
    assert stream.stopped == bool(stops)
    assert stream.released == sum(map(len, expected))


def test_a_long_stop_string_is_compared_as_far_as_there_is_text():
    class Counted(str):
        cuts = 0

        def __getitem__(self, part):
            Counted.cuts += 1
            return super().__getitem__(part)

    stream = TextStream(BYTES.decode, stops=[Counted("b" * 1_000_000)])
    assert [stream.push([byte]) for byte in b"abba"] == ["a", "", "", "bba"]
    assert Counted.cuts < 20


def test_characters_wait_for_their_last_byte():
    stream = TextStream(BYTES.decode)
    assert [stream.push([byte]) for byte in "é€".encode()] == ["", "é", "", "", "€"]
    assert [stream.push([0xE2]), stream.push([0x82], final=True)] == ["", "\N{REPLACEMENT CHARACTER}"]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return tiny()


@pytest.fixture
def client(model):
    with TestClient(build(engine(model), "tiny", Limits(max_input=300, max_tokens=50, max_sessions=3))) as client:
        yield client


def complete(client, status=200, path="/v1/completions", **body):
    response = client.post(path, json={"prompt": "hello", "max_tokens": 6, "temperature": 0, **body})
    assert response.status_code == status, response.text
    return response.json()


def test_completions_have_the_form_of_openai(client, model):
    expected = bytes(alone(model, list(b"hello"), 6)).decode()
    answer = complete(client, prompt=["hello", "you"], n=2, logprobs=3)
    assert [(c["index"], c["finish_reason"]) for c in answer["choices"]] == [(i, "length") for i in range(4)]
    assert answer["choices"][0]["text"] == answer["choices"][1]["text"] == expected
    assert answer["usage"]["prompt_tokens"] == 8
    assert answer["usage"]["completion_tokens"] == 24
    found = answer["choices"][0]["logprobs"]
    logits = Session(model).feed("hello").next_logits.log_softmax(-1)
    assert found["tokens"] == list(expected)
    assert found["text_offset"] == list(range(6))
    assert found["token_logprobs"][0] == pytest.approx(float(logits.max()), abs=1e-6)
    assert list(found["top_logprobs"][0].values()) == pytest.approx(logits.topk(3).values.tolist(), abs=1e-6)


def test_a_stream_is_the_answer_in_pieces(client):
    whole = complete(client, logprobs=0)["choices"][0]
    body = {"prompt": "hello", "max_tokens": 6, "temperature": 0, "stream": True, "logprobs": 0}
    with client.stream("POST", "/v1/completions", json={**body, "stream_options": {"include_usage": True}}) as stream:
        lines = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    *parts, end = map(json.loads, lines)
    assert end["usage"]["completion_tokens"] == 6
    choices = [part["choices"][0] for part in parts]
    assert len(choices) > 3
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    assert [token for choice in choices for token in choice["logprobs"]["tokens"]] == whole["logprobs"]["tokens"]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]


def test_a_stop_string_ends_the_answer_and_its_tokens(client):
    whole = complete(client, max_tokens=12)["choices"][0]["text"]
    stop = whole[4:6]
    choice = complete(client, max_tokens=12, stop=["\0", stop], logprobs=0)["choices"][0]
    assert choice["text"] == whole[: whole.index(stop)]
    assert choice["finish_reason"] == "stop"
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]


def test_sessions_go_on_fork_and_stay_as_large_as_they_are(client, model):
    def post(name, what, **body):
        answer = client.post(f"/v1/sessions/{name}/{what}", json=body or None)
        assert answer.status_code == 200, answer.text
        return answer.json()

    opened = client.post("/v1/sessions", json={"input": "hello"}).json()
    name, reference = opened["id"], Session(model).feed("hello")
    assert opened["position"] == 5
    for _ in range(2):
        expected = "".join(reference.write(6, temperature=0))
        assert post(name, "generate", max_tokens=6, temperature=0)["choices"][0]["text"] == expected
        other = post(name, "fork")
        assert post(name, "append", input=", and then")["position"] == reference.feed(", and then").position
        assert client.delete(f"/v1/sessions/{other['id']}").json()["deleted"]
    assert client.get(f"/v1/sessions/{name}").json()["state_bytes"] == opened["state_bytes"] > 0
    assert client.get(f"/v1/sessions/{other['id']}").status_code == 404
    for _ in range(2):
        post(name, "fork")
    refused = client.post("/v1/sessions", json={})
    assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
    assert refused.json()["error"]["code"] == "too_many_sessions"


def bpe():
    """A tokenizer with a template for chats: bytes, and a token between turns."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE({**words, "<|turn|>": 256}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    template = "{% for m in messages %}<|turn|>{{ m.role }}: {{ m.content }}{% endfor %}<|turn|>"
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=inner, chat_template=template, additional_special_tokens=["<|turn|>"]
    )
    return HuggingFaceTokenizer(wrapped, "bpe")


def test_a_chat_is_what_the_template_makes_of_it():
    """The template's special tokens are single ids, and the answer is the continuation of the template's text."""
    tokenizer = bpe()
    asked = [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]
    prompt = [256, *tokenizer.encode("user: hi").tolist(), 256]
    model = tiny(vocab_size=257)
    expected = alone(model, prompt, 5)
    with TestClient(build(Engine(model, tokenizer), "tiny")) as client:
        body = {"messages": asked, "max_completion_tokens": 5, "temperature": 0, "logprobs": True, "top_logprobs": 2}
        answer = client.post("/v1/chat/completions", json=body).json()
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": tokenizer.decode(expected)}
        assert answer["usage"]["prompt_tokens"] == len(prompt)
        tokens = answer["choices"][0]["logprobs"]["content"]
        assert len(tokens) == 5
        assert tokens[0]["top_logprobs"][0]["logprob"] == tokens[0]["logprob"]  # the likeliest was taken
        with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as stream:
            events = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
        deltas = [event["choices"][0]["delta"] for event in events]
        assert deltas[0]["role"] == "assistant"
        assert "".join(delta.get("content", "") for delta in deltas) == tokenizer.decode(expected)
        bad = "{{ raise_exception('no roles') }}"
        for wrong, template, message in (
            ({"messages": []}, None, "messages"), ({"logprobs": False}, None, "top_logprobs needs logprobs"),
            ({}, bad, "the chat template refuses these messages: no roles"),
        ):  # fmt: skip
            tokenizer.tokenizer.chat_template = template or tokenizer.tokenizer.chat_template
            refused = client.post("/v1/chat/completions", json={**body, **wrong})
            assert refused.status_code == 400
            assert message in refused.json()["error"]["message"]


@cases(
    "status, message, body",
    (400, "the prompt is empty", {"prompt": ""}),
    (400, "best_of", {"best_of": 2}),
    (400, "frequency_penalty", {"frequency_penalty": 1}),
    (400, "max_tokens must be at most 50", {"max_tokens": 51}),
    (400, "at most 300 tokens; got 301", {"prompt": "x" * 301}),
    (400, "between 0 and 255", {"prompt": [256]}),
    (400, "not empty", {"stop": [""]}),
    (400, "n must be at most 32", {"n": 33}),
    (400, "at most 32 prompts; got 33", {"prompt": ["x"] * 33}),
    (404, "there is no model 'gpt'", {"model": "gpt"}),
    (400, "no chat template", {"path": "/v1/chat/completions", "messages": [{"role": "user", "content": "x"}]}),
    (404, "no session 'x'", {"path": "/v1/sessions/x/generate"}),
    (413, "bytes", {"prompt": "x" * (9 << 20)}),
    (404, "Not Found", {"path": "/v2"}),
)
def test_what_is_wrong_or_too_much_is_refused_in_the_form_of_openai(client, status, message, body):
    chat = {} if "messages" not in body and "x/generate" not in body.get("path", "") else {"prompt": None}
    sent = {k: v for k, v in {"prompt": "hello", **body, **chat}.items() if v is not None and k != "path"}
    response = client.post(body.get("path", "/v1/completions"), json=sent)
    assert response.status_code == status
    assert message in response.json()["error"]["message"]


def test_pages_are_answered_and_the_lens_reads_between_turns(model):
    def look(ids):
        if ids[0] == ord("x"):
            raise ValueError("no lens")
        return {"read": ids}

    with TestClient(build(engine(model), "tiny", pages=Pages({"/": "<p>talk"}, look))) as client:
        assert client.get("/").text == "<p>talk"
        assert client.get("/v1/models/tiny").json()["id"] == "tiny"
        assert client.post("/v1/look", json={"input": "ab"}).json() == {"read": [97, 98]}
        for text, message in (("x", "no lens"), ("", "1 to 1,024 tokens; got 0")):
            assert client.post("/v1/look", json={"input": text}).json()["error"]["message"].endswith(message)


def test_a_full_queue_is_429_and_a_stopping_server_503(model):
    server = engine(model, max_rows=1, max_waiting=1)
    with TestClient(build(server, "tiny")) as client:
        server.max_waiting = 0
        refused = client.post("/v1/completions", json={"prompt": "x"})
        assert (refused.status_code, refused.headers["Retry-After"]) == (429, "1")
        server.close()
        refused = client.post("/v1/completions", json={"prompt": "x"})
        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
        assert client.get("/health").status_code == 503


def test_the_key_guards_the_api_alone(model):
    with TestClient(build(engine(model), "tiny", api_key="k")) as client:
        assert client.get("/v1/models").status_code == 401
        assert client.get("/v1/models", headers={"Authorization": "Bearer j"}).status_code == 401
        found = client.get("/v1/models", headers={"Authorization": "Bearer k"}).json()
        assert [entry["id"] for entry in found["data"]] == ["tiny"]
        assert client.get("/health").json() == {"status": "ok"}
        counts = client.get("/metrics").text
    assert 'halflife_requests_total{path="other",status="401"} 2' in counts
    assert "\nhalflife_rows_active 0\n" in counts


def post(application, path, receive, send):
    """A POST of JSON whose client is the two functions, which can leave."""
    scope = {
        "type": "http", "method": "POST", "path": path, "query_string": b"",
        "headers": [(b"content-type", b"application/json")], "asgi": {"version": "3.0", "spec_version": "2.3"},
    }  # fmt: skip
    asyncio.run(asyncio.wait_for(application(scope, receive, send), 30))


@pytest.mark.parametrize("stream", [False, True])
def test_the_request_of_a_client_that_leaves_is_cancelled(model, stream):
    """The client leaves after the first step, or after the first event."""
    server, started = engine(model), asyncio.Event()
    body = json.dumps({"prompt": "hello", "max_tokens": 10**5, "temperature": 0, "stream": stream}).encode()
    application = build(server, "tiny", Limits(max_tokens=10**6))
    server.start()
    waiting = [{"type": "http.request", "body": body}]

    async def receive():
        if waiting:
            return waiting.pop()
        if stream:
            await started.wait()
        while not server.counts.written_tokens:
            await asyncio.sleep(0.001)
        return {"type": "http.disconnect"}

    async def send(message):
        started.set()

    post(application, "/v1/completions", receive, send)
    for _ in range(1000):
        if not server.active:
            break
        threading.Event().wait(0.01)
    assert (server.active, server.counts.cancelled) == (0, 1)
    assert server.counts.written_tokens < 10**4
    server.close()


def test_a_client_that_leaves_leaves_no_session(model):
    """Nobody knows its name, so nobody could delete it."""
    server = engine(model)
    application = build(server, "tiny", Limits())
    server.start()
    body = json.dumps({"input": "hello " * 200}).encode()
    messages = [{"type": "http.disconnect"}, {"type": "http.request", "body": body}]

    async def receive():
        return messages.pop()

    async def send(message):
        pass

    post(application, "/v1/sessions", receive, send)
    assert "halflife_sessions 0\n" in TestClient(application).get("/metrics").text
    server.close()


def test_a_session_that_is_read_is_busy():
    session = Session_("x")
    session.take()
    with pytest.raises(Busy):
        session.check_free()
    session.release(None)
    session.check_free()


def test_threads_may_submit_at_once(model):
    server, answers = engine(model).start(), Queue()
    settings = Settings(max_tokens=3, temperature=0)
    for i in range(20):
        threading.Thread(target=lambda i=i: server.submit(Job([i], settings, answers.put))).start()
    ends = 0
    while ends < 20:
        ends += isinstance(answers.get(timeout=30), Done)
    server.close()
    assert not server.alive
