"""What int8 weights cost and save on this CPU: `python benchmarks/int8.py [--write docs/how-to/export.md]`.

The script trains a model of bytes on nine tenths of Python's standard library, and measures its loss on the last tenth
with float32 and with int8 weights. It times decoding steps and prompts of this model, and of a larger untrained one.
"""

from __future__ import annotations

import argparse
import copy
import math
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import timing  # noqa: E402

from halflife import LanguageModel, preset  # noqa: E402
from halflife.export.int8 import quantize  # noqa: E402
from halflife.models import checkpoint  # noqa: E402

MARK = "<!-- int8 -->"
PIECE_TOKENS = 1024  # that the model reads at once
PROMPT = 128  # tokens
HELD_OUT = 65_536  # bytes of the text that the loss is measured on
LARGE = {"hidden_size": 768, "num_layers": 12}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="also write the table here, after the line " + MARK)
    parser.add_argument("--model", default="mamba2")
    parser.add_argument("--tokens", default="2M", help="bytes that the small model is trained on")
    parser.add_argument("--hidden-size", default="256")
    parser.add_argument("--num-layers", default="4")
    parser.add_argument("--quick", action="store_true", help="a tiny model alone, to see that all runs")
    arguments = parser.parse_args()
    if arguments.quick and arguments.write:
        parser.error("--quick only sees that all runs; its numbers are not to be written")
    if arguments.quick:
        arguments.tokens, arguments.hidden_size, arguments.num_layers = "4K", "32", "1"
    lines = list(report(arguments))
    print("\n".join(lines))
    if arguments.write:
        timing.write_section(arguments.write, MARK, "\n".join(lines))


def report(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield the lines of the report."""
    with tempfile.TemporaryDirectory() as folder:
        test = split_library(Path(folder))
        model = train(Path(folder), arguments)
    yield f"{timing.command()}, one thread. `{arguments.model}` models of bytes. The first one is trained on"
    yield f"{arguments.tokens} bytes of the standard library of Python. Its loss is that on {len(test) - 1:,} bytes of"
    yield "other files of it. The second one is not trained."
    yield ""
    yield f"| parameters | weights | bytes of weights | a step | a prompt of {PROMPT} tokens | bits per byte |"
    yield "|---:|---|---:|---:|---:|---:|"
    yield from rows(model, test)
    if not arguments.quick:
        torch.manual_seed(0)
        yield from rows(LanguageModel(preset(arguments.model, vocab_size=256, **LARGE)).eval(), None)


def split_library(folder: Path) -> np.ndarray:
    """Write the text for training into `folder`, and return the ids of the text for the loss."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    (folder / "train.txt").write_bytes(b"".join(file.read_bytes() for i, file in enumerate(files) if i % 10))
    test = b"".join(file.read_bytes() for file in files[::10])
    return np.frombuffer(test[: HELD_OUT + 1], dtype=np.uint8).astype(np.int64)


def train(folder: Path, arguments: argparse.Namespace) -> LanguageModel:
    """Train the small model with `halflife train`, and return it."""
    options = {
        "data": folder / "train.txt", "tokens": arguments.tokens, "context": 256, "batch-size": 8, "lr": 2e-3,
        "hidden-size": arguments.hidden_size, "num-layers": arguments.num_layers, "output": folder / "model",
    }  # fmt: skip
    command = [sys.executable, "-m", "halflife.cli", "train", arguments.model, "--quiet"]
    subprocess.run([*command, *(f"--{k}={v}" for k, v in options.items())], check=True, stdout=sys.stderr)
    return checkpoint.load(folder / "model").float().eval()


@torch.no_grad()
def rows(model: LanguageModel, test: np.ndarray | None) -> Iterator[str]:
    """Yield the rows of the table for a model; its loss is measured if there is a text."""
    small = copy.deepcopy(model)
    quantize(small)
    models = {"float32": model, "int8": small}
    token, prompt = torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, PROMPT, dtype=torch.long)
    states = {name: one(token)[1] for name, one in models.items()}
    steps = timing.medians({name: lambda name=name: models[name](token, states[name]) for name in models})
    prompts = timing.medians({name: lambda name=name: models[name](prompt) for name in models})
    for name, one in models.items():
        loss = "" if test is None else f"{bits_per_byte(one, test, len(test) - 1):.4f}"
        size = f"{weight_bytes(one) / 1e6:.1f} MB"
        times = f"{1e3 * steps[name]:.1f} ms | {1e3 * prompts[name]:.0f} ms"
        yield f"| {model.num_parameters():,} | {name} | {size} | {times} | {loss} |"


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of all parameters and buffers."""
    tensors = {id(x): x.nbytes for x in (*model.parameters(), *model.buffers())}
    return sum(tensors.values())


@torch.no_grad()
def bits_per_byte(model: LanguageModel, ids: np.ndarray, count: int) -> float:
    """Return the bits per byte of a text, which the model reads in pieces.

    Args:
        ids: token ids `[T]`; the first one is not predicted.
        count: bytes of the text that the other ids stand for.
    """
    tokens, state, nats = torch.from_numpy(ids), None, 0.0
    for start in range(0, len(tokens) - 1, PIECE_TOKENS):
        target = tokens[start + 1 : start + PIECE_TOKENS + 1]
        logits, state = model(tokens[start : start + len(target)].unsqueeze(0), state)
        nats += float(F.cross_entropy(logits[0].float(), target, reduction="sum"))
    return nats / math.log(2) / count


if __name__ == "__main__":
    main()
