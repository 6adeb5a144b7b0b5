"""The files and Python calls that a token passes in one block: `python benchmarks/journey.py [preset] [--list]`.

It counts the functions of halflife alone, in one training step (forward and backward) and in decoding one token.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT)]

from halflife import LanguageModel, preset  # noqa: E402
from halflife.packing import Packing  # noqa: E402

PACKAGE = ROOT / "halflife"
TOKENS = 64


def calls(run: Callable[[], Any]) -> Counter[tuple[str, str]]:
    """(file, function) → the number of its calls in `run()`."""
    counted: Counter[tuple[str, str]] = Counter()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            counted[str(Path(frame.f_code.co_filename).relative_to(PACKAGE)), frame.f_code.co_qualname] += 1

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return counted


def journey(name: str) -> dict[str, Counter[tuple[str, str]]]:
    """The calls of the first block of a preset, in a training step and in decoding a token after a text."""
    torch.manual_seed(0)
    block = LanguageModel(preset(name, hidden_size=128, num_layers=1, vocab_size=8)).blocks[0]
    x, tokens, token = torch.randn(1, TOKENS, 128), Packing(1, TOKENS), Packing(1, 1)

    def step() -> None:
        block(x, None, tokens, {})[0].sum().backward()

    step()  # the first call loads the kernels
    state = block(x, None, tokens, {})[1]

    @torch.no_grad()
    def decode() -> None:
        block(x[:, :1], state, token, {})

    trained = calls(step)
    block.eval()
    decode()
    return {"training step": trained, "decoded token": calls(decode)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("preset", nargs="?", default="mamba2+post+gate_rank")
    parser.add_argument("--list", action="store_true", help="every function with the number of its calls")
    arguments = parser.parse_args()
    for title, counted in journey(arguments.preset).items():
        print(f"{title}: {len({file for file, _ in counted})} files, {counted.total()} calls")
        for (file, function), number in sorted(counted.items()) if arguments.list else ():
            print(f"    {number:4} {file} {function}")


if __name__ == "__main__":
    main()
