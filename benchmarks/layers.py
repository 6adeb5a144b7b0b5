"""Speed of the layer of each architecture on this machine: `python benchmarks/layers.py [--write docs/benchmarks.md]`.

The script measures one sequence mixer of hidden size 768 (no MLP) in float32, with compiled kernels and without. It
reports tokens/s of a forward and backward pass at T 2048, the time of decoding one token, and the bytes of the state
after 2048 tokens. The floor of a decoded token is the bytes of weights and state at the rate of a copy.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from functools import partial
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import timing  # noqa: E402

from halflife import layers  # noqa: E402
from halflife.models import preset  # noqa: E402
from halflife.models.states import size as size_of  # noqa: E402

HIDDEN, LENGTH = 768, 2048
MARK = "<!-- layers -->"
SHOWN = (
    "mamba2", "mamba3", "rwkv7", "gated_deltanet", "gla", "simple", "llama", "echo", "simple+delta", "mamba2+post",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="also write the table here, after the line " + MARK)
    parser.add_argument("--presets", nargs="+", default=SHOWN)
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    text = "\n".join(table(arguments.presets))
    print(text)
    if arguments.write:
        timing.write_section(arguments.write, MARK, text)


def table(names: list[str]) -> list[str]:
    """Markdown lines with one row a preset."""
    mixers = {name: _mixer(name) for name in dict.fromkeys(("mamba2", *names))}
    x = torch.randn(1, LENGTH, HIDDEN, requires_grad=True)
    with torch.no_grad():
        states = {name: mixer(x)[1] for name, mixer in mixers.items()}
    # All with kernels, then all without: the second run of one layer would find its weights in the cache.
    cells = [(name, native) for native in (True, False) for name in mixers]
    training = timing.medians({(n, native): partial(_train, mixers[n], x, native) for n, native in cells}, 60)
    decoding = timing.medians(
        {(n, native): timing.decoding(partial(_step, mixers[n], x, native), states[n]) for n, native in cells}, 10
    )
    copy = timing.copy_rate()
    lines = [
        "## Layers",
        "",
        timing.command(),
        "",
        f"One layer, d {HIDDEN}, T {LENGTH}, float32, {torch.get_num_threads()} threads. In brackets: the same without",
        "the compiled kernels. The floor is the bytes of weights and state at the rate of a copy of 256 MB, which",
        f"reads and writes {copy / 1e9:.0f} GB/s here. The layers take turns, so that their weights come from memory.",
        "",
        "| preset | parameters | forward + backward tokens/s | decoding µs a token | floor µs | state kB |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, mixer in mixers.items():
        parameters = sum(p.numel() for p in mixer.parameters())
        size = size_of((states[name],))
        (fast, slow), (step, before) = ((each[name, True], each[name, False]) for each in (training, decoding))
        lines.append(
            f"| {name} | {parameters:,} | {LENGTH / fast:,.0f} ({LENGTH / slow:,.0f}) "
            f"| {1e6 * step:,.0f} ({1e6 * before:,.0f}) "
            f"| {1e6 * (4 * parameters + 2 * size) / copy:,.0f} | {size / 1000:,.1f} |"
        )
    return lines


def _train(mixer: layers.Mixer, x: torch.Tensor, native: bool) -> None:
    with contextlib.nullcontext() if native else timing.without_kernels():
        mixer(x)[0].sum().backward()


def _step(mixer: layers.Mixer, x: torch.Tensor, native: bool, state: layers.State) -> layers.State:
    with contextlib.nullcontext() if native else timing.without_kernels(), torch.no_grad():
        return mixer(x[:, :1], state)[1]


def _mixer(name: str) -> layers.Mixer:
    config = preset(name, hidden_size=HIDDEN, num_layers=2)
    torch.manual_seed(0)
    return layers.build(config.mixer, hidden_size=HIDDEN, layer_idx=0, num_layers=2, **config.mixer_options)


if __name__ == "__main__":
    main()
