"""Training steps with compiled blocks beside eager ones: `python benchmarks/compiled.py [MODEL]`."""

import sys
import time

import torch
from timing import medians

from halflife.models import LanguageModel, preset
from halflife.models.compiled import compiled_blocks
from halflife.models.loss import mean_loss


def main():
    torch.set_num_threads(1)
    name = sys.argv[1] if len(sys.argv) > 1 else "mamba2+post"
    torch.manual_seed(0)
    models = [LanguageModel(preset(name, vocab_size=256, hidden_size=128, num_layers=4)) for _ in range(2)]
    ids = torch.randint(256, (1, 4097))

    def step(model):
        hidden, _ = model.hidden(ids[:, :-1])
        mean_loss(hidden.flatten(0, 1), model.head_or_weight, ids[:, 1:].flatten()).backward()
        model.zero_grad()

    with compiled_blocks(models[1]) as graphs:
        start = time.perf_counter()
        step(models[1])
        first = time.perf_counter() - start
        seconds = medians({"eager": lambda: step(models[0]), "compiled": lambda: step(models[1])}, 20.0)
        print(f"{name}: the first step takes {first:.0f} s, for {graphs()} graphs of 4 blocks")
    for kind, value in seconds.items():
        print(f"{kind}: {4096 / value:,.0f} tokens/s")


if __name__ == "__main__":
    main()
