"""The server under load: `python benchmarks/serve.py [--write docs/how-to/serve.md]`.

The script writes an untrained model of bytes, starts `halflife serve` on 127.0.0.1 as a process of its own, and sends
requests with the client of openai. It reports requests a second and latencies at 1, 8 and 32 clients, what happens
when clients leave, and the memory of the server over thousands of requests.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles

import httpx2
import torch
from openai import APITimeoutError, AsyncOpenAI

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import timing  # noqa: E402

from halflife import LanguageModel, preset  # noqa: E402
from halflife.models import checkpoint  # noqa: E402

MARK = "<!-- serve -->"
CLIENTS = (1, 8, 32)
PROMPT = "It is a truth universally acknowledged, that a single man in possession of a good fortune"  # 89 tokens
TOKENS = 32  # written by a request
CACHE_MB = 8  # of states of earlier prompts while memory is measured; it is full after 400 requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="also write the tables here, after the line " + MARK)
    parser.add_argument("--seconds", type=float, default=15.0, help="to measure for, each number of clients")
    parser.add_argument("--requests", type=int, default=10_000, help="over which memory is measured")
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--num-layers", type=int, default=4)
    arguments = parser.parse_args()
    lines = list(measure(arguments))
    print("\n".join(lines))
    if arguments.write:
        timing.write_section(arguments.write, MARK, "\n".join(lines))


def measure(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield the lines of the report."""
    yield timing.command()
    yield ""
    sizes = {"hidden_size": arguments.hidden_size, "num_layers": arguments.num_layers}
    with server(**sizes) as (process, url, parameters):
        load = {clients: asyncio.run(at_once(url, clients, arguments.seconds)) for clients in CLIENTS}
        left = asyncio.run(leaving(url))
    yield f"`mamba2`, {parameters / 1e6:.1f} M parameters, float32, one thread. A request has {len(PROMPT)} tokens of"
    yield f"prompt, all different, and writes {TOKENS}. The clients run on the same machine."
    yield ""
    yield "| clients | requests/s | tokens written/s | median | 95 % within |"
    yield "|---:|---:|---:|---:|---:|"
    for clients, (times, seconds) in load.items():
        rate, late = len(times) / seconds, quantiles(times, n=20)[-1]
        yield f"| {clients} | {rate:.1f} | {rate * TOKENS:.0f} | {median(times):.2f} s | {late:.2f} s |"
    yield ""
    yield left
    yield ""
    with server("--cache-mb", str(CACHE_MB), hidden_size=16, num_layers=1) as (process, url, parameters):
        yield asyncio.run(memory(process, url, arguments.requests))


@contextmanager
def server(*options: str, **sizes: int) -> Iterator[tuple[subprocess.Popen, str, int]]:
    """Start a server of an untrained model, yield (process, address, parameters), and end it with SIGTERM."""
    torch.manual_seed(0)
    model = LanguageModel(preset("mamba2", vocab_size=256, **sizes))
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(model, Path(folder) / "model", "bytes")
        command = [sys.executable, "-m", "halflife.cli", "serve", str(Path(folder) / "model"), "--port", "0", *options]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            line = ""
            while "listening on" not in line:
                line = process.stdout.readline()
                assert line, "the server ended before it listened"
            yield process, line.split()[-1], model.num_parameters()
        finally:
            process.terminate()
            code = process.wait(60)
        assert code == 143, f"the server ended with {code}"


async def at_once(url: str, clients: int, seconds: float) -> tuple[list[float], float]:
    """Return the seconds of each request, and those of all, of clients that ask one request after another."""
    times: list[float] = []
    end = time.monotonic() + seconds

    async def ask(openai: AsyncOpenAI, name: int) -> None:
        count = 0
        while time.monotonic() < end:
            began, count = time.monotonic(), count + 1
            prompt = f"{name:02} {count:06}{PROMPT[9:]}"  # all differ from the first tokens on
            answer = await openai.completions.create(model="model", prompt=prompt, max_tokens=TOKENS)
            assert answer.usage is not None
            assert answer.usage.completion_tokens == TOKENS
            times.append(time.monotonic() - began)

    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as openai:
        await openai.completions.create(model="model", prompt="warm", max_tokens=2)
        began = time.monotonic()
        await asyncio.gather(*(ask(openai, name) for name in range(clients)))
        return times, time.monotonic() - began


async def leaving(url: str, clients: int = 32) -> str:
    """Let every second client leave in the middle of its answer, and check that the others miss nothing."""

    async def stay(openai: AsyncOpenAI) -> str:
        answer = await openai.completions.create(model="model", prompt=PROMPT, max_tokens=64, temperature=0)
        return answer.choices[0].text

    async def leave(openai: AsyncOpenAI, i: int) -> None:
        if i % 4 == 1:  # without a stream
            try:
                await openai.completions.create(model="model", prompt=PROMPT, max_tokens=4000, timeout=0.5)
            except APITimeoutError:
                return
        else:
            stream = await openai.completions.create(model="model", prompt=PROMPT, max_tokens=4000, stream=True)
            async for _ in stream:
                await stream.close()
                return
        raise AssertionError("a client that left got its answer")

    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as openai:
        alone = await stay(openai)
        answers = await asyncio.gather(*(leave(openai, i) if i % 2 else stay(openai) for i in range(clients)))
    right = answers.count(alone)
    assert right == clients // 2, f"{right} of {clients // 2} answers are right"
    numbers = await metrics(url, until="rows_active")
    assert numbers["halflife_jobs_cancelled_total"] == clients // 2, numbers
    return (
        f"Of {clients} clients at once, {clients // 2} left before their answer was complete. The other {right} got "
        f"the answer that one client alone gets, {int(numbers['halflife_jobs_cancelled_total'])} requests were "
        f"cancelled, and no row was left in use."
    )


async def metrics(url: str, until: str) -> dict[str, float]:
    """Return the server's numbers, as soon as the gauge `until` is 0."""
    async with httpx2.AsyncClient() as client:
        for _ in range(200):
            text = (await client.get(url.removesuffix("/v1") + "/metrics")).text
            pairs = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
            numbers = {name: float(value) for name, value in pairs}
            if not numbers[f"halflife_{until}"]:
                return numbers
            await asyncio.sleep(0.1)
    raise AssertionError(f"{until} does not fall to 0: {numbers}")


async def memory(process: subprocess.Popen, url: str, requests: int, clients: int = 16) -> str:
    """Send requests of a tiny model; every tenth client leaves. Report the server's memory on the way."""
    todo, sizes, failed = iter(range(requests)), [], 0
    limits = httpx2.Limits(max_connections=clients)

    async def ask(client: httpx2.AsyncClient) -> None:
        nonlocal failed
        for i in todo:
            body = {"prompt": f"{i:06} " + "x" * (i % 90), "max_tokens": 4}
            try:
                answer = await client.post(f"{url}/completions", json=body, timeout=0.001 if i % 10 == 9 else 60)
                failed += answer.status_code != 200
            except httpx2.TimeoutException:
                failed += i % 10 != 9
            if (i + 1) % max(1, requests // 10) == 0:
                sizes.append(resident(process.pid))

    async with httpx2.AsyncClient(limits=limits) as client:
        await asyncio.gather(*(ask(client) for _ in range(clients)))
    numbers = await metrics(url, until="rows_active")
    shown = ", ".join(f"{size:.0f}" for size in sizes)
    assert not failed, f"{failed} requests failed"
    return (
        f"Resident memory of the server over {requests:,} requests of a tiny model, every tenth with a client that "
        f"left, in MB after each tenth of them: {shown}. No request failed. The states of earlier prompts took "
        f"{numbers['halflife_prefix_bytes'] / 1e6:.0f} of the {CACHE_MB} MB that they might take."
    )


def resident(pid: int) -> float:
    """Return the megabytes of memory that a process holds (Linux)."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 / 1e6


if __name__ == "__main__":
    main()
