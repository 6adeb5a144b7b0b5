"""Speed of the layer of each architecture on this machine: `python benchmarks/layers.py [--write docs/benchmarks.md]`.

The script measures one sequence mixer of hidden size 384 (no MLP) in float32. It reports tokens/s of a forward and
backward pass at T 2048, tokens/s of decoding one token at a time, and the bytes of the state after 2048 tokens.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import timing  # noqa: E402

from halflife import layers  # noqa: E402
from halflife.models import PRESETS, preset  # noqa: E402

HIDDEN, LENGTH = 384, 2048
MARK = "<!-- layers -->"
EXTRA = ("simple+scalar", "simple+delta", "simple+dplr", "mamba2+post")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="also write the table here, after the line " + MARK)
    parser.add_argument("--presets", nargs="+", default=(*PRESETS, *EXTRA))
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    text = "\n".join(table(arguments.presets))
    print(text)
    if arguments.write:
        head, _, rest = arguments.write.read_text().partition(MARK)
        after = rest.partition("<!-- ")
        arguments.write.write_text(f"{head}{MARK}\n\n{text}\n\n{''.join(after[1:])}")


def table(names: list[str]) -> list[str]:
    """Markdown lines with one row a preset."""
    mixers = {name: _mixer(name) for name in dict.fromkeys(("mamba2", *names))}
    x = torch.randn(1, LENGTH, HIDDEN, requires_grad=True)
    training = timing.medians(
        {name: lambda mixer=mixer: mixer(x)[0].sum().backward() for name, mixer in mixers.items()}, 3 * len(mixers)
    )
    with torch.no_grad():
        states = {name: mixer(x)[1] for name, mixer in mixers.items()}
        decoding = timing.medians(
            {name: lambda m=mixer, s=states[name]: m(x[:, :1], s) for name, mixer in mixers.items()}, 4
        )
    lines = [
        f"One layer, d {HIDDEN}, T {LENGTH}, float32, {torch.get_num_threads()} threads.",
        "",
        "| preset | parameters | forward + backward tokens/s | × mamba2 | decode tokens/s | state kB |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, mixer in mixers.items():
        parameters = sum(p.numel() for p in mixer.parameters())
        size = sum(part.nbytes for part in states[name].values()) / 1000
        lines.append(
            f"| {name} | {parameters:,} | {LENGTH / training[name]:,.0f} "
            f"| {training['mamba2'] / training[name]:.2f} | {1 / decoding[name]:,.0f} | {size:,.1f} |"
        )
    return lines


def _mixer(name: str) -> layers.Mixer:
    config = preset(name, hidden_size=HIDDEN, num_layers=2)
    torch.manual_seed(0)
    return layers.build(config.mixer, hidden_size=HIDDEN, layer_idx=0, num_layers=2, **config.mixer_options)


if __name__ == "__main__":
    main()
