"""Streaming of 100,000 tokens, one at a time: `python benchmarks/streaming.py [--write docs/benchmarks.md]`.

Small models sample tokens through `halflife.Session` and through `generate()` of transformers. For every 10,000 tokens
the script measures the time a token and the memory of the process. Softmax attention runs on fewer tokens. Each model
has a separate process with one thread.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import timing  # noqa: E402

from halflife import LanguageModel, Session, preset  # noqa: E402
from halflife.evaluation.throughput import now  # noqa: E402

SIZES: dict[str, Any] = {"hidden_size": 128, "num_layers": 2, "vocab_size": 256}
MODELS = ("gated_deltanet+gate_rank", "echo", "mamba2+post", "rwkv7")
GENERATE = "generate() "  # before a model's name: through transformers
STRETCHES = 10
MARK = "<!-- streaming -->"


@dataclass(frozen=True)
class Stretch:
    """Measurements of consecutive tokens of a stream.

    Attributes:
        tokens: tokens of the stream up to the end of this stretch.
        seconds: median time of a token in this stretch.
        resident: bytes of memory that the process holds at the end of this stretch.
    """

    tokens: int
    seconds: float
    resident: int


class Pace:
    """Measures the time and the memory of a stream. Call `tick` after each token.

    After every `every` tokens, a stretch is complete and in `stretches`.
    """

    def __init__(self, every: int) -> None:
        if every < 1:
            raise ValueError(f"a stretch has at least 1 token; got every={every}")
        self.every = every
        self.stretches: list[Stretch] = []
        self._times: list[float] = []
        self._last = now()

    def tick(self) -> None:
        """Record that a token is done."""
        self._times.append(now() - self._last)
        if len(self._times) == self.every:
            tokens = self.every * (len(self.stretches) + 1)
            self.stretches.append(Stretch(tokens, median(self._times), timing.resident_memory()))
            self._times.clear()
        self._last = now()  # excludes the time that this method takes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="also write the tables here, after the line " + MARK)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--softmax-tokens", type=int, default=10_000, help="of softmax attention")
    parser.add_argument("--processes", type=int, default=2, help="at a time")
    parser.add_argument("--quick", action="store_true", help="few tokens, to see that all runs")
    parser.add_argument("--stream", metavar="MODEL", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.quick and arguments.write:
        parser.error("--quick only sees that all runs; its numbers are not to be written")
    if arguments.quick:
        arguments.tokens = arguments.softmax_tokens = 200
    if min(arguments.tokens, arguments.softmax_tokens) < STRETCHES:
        parser.error(f"the streams are cut into {STRETCHES} stretches, so they need as many tokens")
    if arguments.stream:
        torch.set_num_threads(1)
        print(json.dumps([vars(stretch) for stretch in stream(arguments.stream, arguments.tokens)]))
        return
    text = "\n".join(report(arguments))
    print(text)
    if arguments.write:
        timing.write_section(arguments.write, MARK, text)


def report(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield the Markdown lines of the tables."""
    lengths: dict[str, int] = dict.fromkeys((GENERATE + "mamba2+post", *MODELS), arguments.tokens)
    lengths["llama"] = arguments.softmax_tokens
    with ThreadPoolExecutor(arguments.processes) as pool:
        found = dict(zip(lengths, pool.map(_process, lengths, lengths.values()), strict=True))
    softmax = {"llama": found.pop("llama")}
    yield "## Streaming"
    yield ""
    yield timing.command()
    yield ""
    yield f"Hidden size {SIZES['hidden_size']}, {SIZES['num_layers']} layers, float32, one thread, torch"
    yield f"{torch.__version__}. A row is the stretch of tokens that ends at its number. A cell has the median ms a"
    yield "token in this stretch, and in brackets the MB of the process at its end."
    yield ""
    yield from table(found)
    yield ""
    yield from table(softmax)


def table(found: dict[str, list[Stretch]]) -> Iterator[str]:
    """Yield a row for the first, a middle and the last stretch, and the ratio of the last to the first, by model."""
    yield f"| tokens | {' | '.join(found)} |"
    yield "|---:|" + "---:|" * len(found)
    every = list(zip(*found.values(), strict=True))
    for row in (every[0], every[len(every) // 2], every[-1]):
        cells = (f"{1e3 * stretch.seconds:.2f} ({stretch.resident / 1e6:,.1f})" for stretch in row)
        yield f"| {row[0].tokens:,} | {' | '.join(cells)} |"
    ends = [(stretches[0], stretches[-1]) for stretches in found.values()]
    cells = (f"{b.seconds / a.seconds:.2f} × ({(b.resident - a.resident) / 1e6:+,.1f})" for a, b in ends)
    yield f"| last against first | {' | '.join(cells)} |"


def _process(name: str, tokens: int) -> list[Stretch]:
    """Run `stream` in a fresh process."""
    command = [sys.executable, __file__, "--stream", name, "--tokens", str(tokens)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"streaming {name} failed:\n{done.stderr}")
    return [Stretch(**stretch) for stretch in json.loads(done.stdout.splitlines()[-1])]


# ------------------------------------------------------------------------------------------------ streams


def stream(name: str, tokens: int) -> list[Stretch]:
    """Measure the pace of a model over `tokens` tokens."""
    torch.manual_seed(0)
    model = LanguageModel(preset(name.removeprefix(GENERATE), **SIZES)).eval()
    return (_generate if name.startswith(GENERATE) else _session)(model, tokens)


def _session(model: LanguageModel, tokens: int) -> list[Stretch]:
    session = Session(model).feed([0])
    pace = Pace(tokens // STRETCHES)
    for _ in session.sample(tokens):
        pace.tick()
    return pace.stretches


def _generate(model: LanguageModel, tokens: int) -> list[Stretch]:
    from transformers.generation.streamers import BaseStreamer

    from halflife.hf import HalflifeForCausalLM

    class Ticks(BaseStreamer):
        """Gets the prompt first, and then each token."""

        def __init__(self) -> None:
            self.pace: Pace | None = None

        def put(self, value) -> None:
            if self.pace is None:
                self.pace = Pace(tokens // STRETCHES)
            else:
                self.pace.tick()

        def end(self) -> None:
            pass

    ticks = Ticks()
    prompt = torch.zeros(1, 1, dtype=torch.long)
    wrapped: Any = HalflifeForCausalLM.of(model).eval()
    wrapped.generate(prompt, streamer=ticks, max_new_tokens=tokens, do_sample=True)
    assert ticks.pace is not None
    return ticks.pace.stretches


if __name__ == "__main__":
    main()
