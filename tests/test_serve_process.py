"""`halflife serve` as a process on a free port, with the client of openai."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import typing
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from helpers import add_noise, assert_raises

from halflife import LanguageModel, Session, preset
from halflife.cli import main
from halflife.models import checkpoint

in_proc = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the memory is read from /proc")
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 256, "train_length": 16}
    model = add_noise(LanguageModel(preset("mamba2", **sizes)), 0.3)
    with torch.no_grad():  # it writes printable characters
        model.embedding.weight[:32] = model.embedding.weight[127:] = 0
    path = tmp_path_factory.mktemp("serve") / "tiny"
    checkpoint.save(model, path, "bytes")
    return path


@pytest.fixture
def server(folder):
    """A server, as (process, address)."""
    options = ("--port", "0", "--max-tokens", "100000", "--cache-mb", "2")
    command = [sys.executable, "-m", "halflife.cli", "serve", str(folder), *options]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            lines = iter(process.stdout.readline, "")
            yield process, next(line.split()[-1] for line in lines if "listening on" in line)
        finally:
            process.kill()


@pytest.fixture
def client(server):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=server[1], api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def expected(folder):
    """The likeliest text after "hello"."""
    return "".join(Session(checkpoint.load(folder).eval()).feed("hello").write(12, temperature=0))


def metrics(url):
    with urllib.request.urlopen(url.removesuffix("/v1") + "/metrics") as answer:
        pairs = (line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}


def wait_for(condition, seconds=30):
    for _ in range(100 * seconds):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it does not happen")


def test_the_command_answers_until_it_is_ended(folder):
    """In this process, with the server's own end by SIGTERM."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    answers = []

    def visit():
        for _ in range(1000):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models") as answer:
                    answers.append(json.load(answer))
                break
            except urllib.error.URLError:
                time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    before, visitor = signal.getsignal(signal.SIGTERM), threading.Thread(target=visit)
    visitor.start()
    try:
        with pytest.raises(SystemExit) as ended:
            main(["serve", str(folder), "--port", str(port), "--name", "tiny"])
    finally:
        visitor.join()
        signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 143
    assert [model["id"] for model in answers[0]["data"]] == ["tiny"]


def resident(process):
    return int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * 4096 / 1e6


def ask(client, **body):
    return client.completions.create(**{"model": "tiny", "prompt": "hello", "max_tokens": 12, "temperature": 0, **body})


@pytest.mark.slow
def test_a_client_gets_texts_streams_stops_and_log_probabilities(client, expected):
    assert [model.id for model in client.models.list()] == ["tiny"]
    choice = ask(client, logprobs=2).choices[0]
    assert (choice.text, choice.finish_reason) == (expected, "length")
    assert len(choice.logprobs.token_logprobs) == 12
    assert max(choice.logprobs.top_logprobs[0].values()) == choice.logprobs.token_logprobs[0] < 0
    assert "".join(part.choices[0].text for part in ask(client, stream=True)) == expected
    stopped = ask(client, stop=[expected[4:6]]).choices[0]
    assert (stopped.text, stopped.finish_reason) == (expected[: expected.index(expected[4:6])], "stop")


@pytest.mark.slow
def test_null_reaches_the_server_as_the_default(client, expected):
    """Each nullable argument of the client's method is null, one by one and all together."""
    from openai.types.completion_create_params import CompletionCreateParamsNonStreaming as Parameters

    hints = typing.get_type_hints(Parameters)
    null = {name: None for name, hint in hints.items() if type(None) in typing.get_args(hint) and name != "prompt"}
    assert {"best_of", "logit_bias", "suffix", "top_p"} <= null.keys()
    answered = {"max_tokens": 12, "temperature": 0}
    for some in ({**null, **answered}, *({**answered, name: None} for name in null.keys() - answered)):
        assert ask(client, **some).choices[0].text == expected
    assert ask(client, best_of=1, logit_bias={}, suffix="", top_p=1e-50).choices[0].text == expected
    assert ask(client, max_tokens=None).usage.completion_tokens == 16
    assert ask(client, temperature=1, top_p=1e-50, seed=-1).choices[0].text == expected


@pytest.mark.slow
def test_errors_reach_the_client_as_its_own_classes(client):
    import openai

    assert_raises(openai.BadRequestError, "max_tokens must be at most", ask, client, max_tokens=10**6)
    assert_raises(openai.NotFoundError, "there is no model", ask, client, model="gpt")


@pytest.mark.slow
def test_requests_of_clients_that_leave_are_cancelled(server, client, expected):
    stream = ask(client, max_tokens=100_000, stream=True)
    next(iter(stream))
    stream.close()
    wait_for(lambda: metrics(server[1])["halflife_jobs_cancelled_total"] == 1)
    assert metrics(server[1])["halflife_rows_active"] == 0
    assert ask(client).choices[0].text == expected


def post(url, path, **body):
    headers = {"content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url + path, json.dumps(body).encode(), headers)) as answer:
        return json.load(answer)


@pytest.mark.slow
def test_a_session_goes_on_over_requests(server, expected):
    url = f"{server[1]}/sessions"
    opened = post(url, "", input="hel")
    read = post(url, f"/{opened['id']}/append", input="lo")
    fork = post(url, f"/{opened['id']}/fork")
    for name in (opened["id"], fork["id"]):
        answer = post(url, f"/{name}/generate", max_tokens=12, temperature=0)
        assert answer["choices"][0]["text"] == expected
    assert read["state_bytes"] == fork["state_bytes"] == opened["state_bytes"]


@pytest.mark.slow
@in_proc
def test_a_session_of_a_million_tokens_has_the_bytes_of_a_short_one(server):
    process, url = server[0], f"{server[1]}/sessions"
    name = post(url, "", input="x" * 100_000)["id"]
    states, sizes = [], []
    for _ in range(9):
        states.append(post(url, f"/{name}/append", input="word " * 20_000))
        sizes.append(resident(process))
    assert [state["position"] for state in states] == [100_000 * i for i in range(2, 11)]
    assert len({state["state_bytes"] for state in states}) == 1
    assert sizes[-1] - sizes[0] < 10
    assert len(post(url, f"/{name}/generate", max_tokens=5)["choices"][0]["text"]) > 0


@pytest.mark.slow
def test_sigterm_completes_the_answers_that_have_begun(server, client):
    process, _ = server
    stream = iter(ask(client, max_tokens=300, stream=True))
    text = next(stream).choices[0].text
    process.send_signal(signal.SIGTERM)
    text += "".join(part.choices[0].text for part in stream)
    assert len(text) == 300
    assert process.wait(30) == 143
    assert process.stderr.read() == ""


@pytest.mark.slow
@in_proc
def test_the_memory_stays_over_prompts_of_many_lengths(server, client):
    """If prompts are read in calls of any length, the last 600 requests take more than 100 MB."""
    sizes = []
    for lengths in (range(1, 300), range(300, 900)):
        with ThreadPoolExecutor(8) as pool:
            prompts = [f"{i:03} " + "x" * (i * 7 % 300) for i in lengths]
            assert len(list(pool.map(lambda prompt: ask(client, prompt=prompt, max_tokens=1), prompts))) == len(lengths)
        sizes.append(resident(server[0]))
    assert sizes[1] - sizes[0] < 15
