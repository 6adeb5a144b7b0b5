"""`halflife throughput`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional


@dataclass(frozen=True)
class Throughput:
    """Measure the time of a training step of whole models by length, on the CPU or a GPU, and plot it.

    A step is forward, backward and AdamW, or the forward pass alone with `--forward`. The models take turns, and the
    median is shown. If `llama` is among the models, "faster from" is the shortest measured length from which on a model
    is faster than softmax attention.
    Files: throughput.png, throughput.svg, throughput.json, throughput.csv.

    examples:
      halflife throughput mamba2 mamba2+gate_rank gated_deltanet gated_deltanet+gate_rank llama --lengths 512 2048 8192
      halflife throughput mamba2 mamba2+gate_rank llama --device cuda --bf16 --lengths 2048 8192 32768 --tokens 32768
    """

    models: Positional[tuple[str, ...]] = ("mamba2", "gated_deltanet", "llama")
    """Presets, base[+modifier…]. `halflife list` shows them."""
    lengths: tuple[int, ...] = (256, 1024, 4096)
    """Lengths of a sequence, in tokens."""
    tokens: int = 8192
    """Tokens of a step, or one sequence if that is longer."""
    hidden_size: int = 256
    """Model width D."""
    num_layers: int = 4
    """Layers."""
    num_heads: int | None = None
    """Heads of a layer. Default: the choice of each architecture."""
    vocab_size: int = 256
    """Vocabulary."""
    forward: bool = False
    """Time the forward pass alone, without gradients."""
    bf16: bool = False
    """Mixed precision."""
    device: str | None = None
    """The device. Default: the GPU if there is one, else the CPU."""
    rounds: int = 3
    """Least number of steps of each model and length."""
    seconds: float = 0.0
    """Measure each length for at least this time."""
    output: Path | None = None
    """The folder to write. Default: runs/<time>-throughput."""

    def run(self) -> None:
        from halflife.cli.options import default_device, new_folder, say
        from halflife.evaluation.throughput import measure_steps
        from halflife.files import writable
        from halflife.report.figures.matplotlib_renderer import save
        from halflife.report.figures.memory import step_times
        from halflife.report.table import show
        from halflife.report.tables.memory import throughput_tables, write_throughput
        from halflife.training.speed import keep_freed_memory

        device = default_device(self.device)
        if device == "cpu":
            keep_freed_memory()  # as `halflife train` does
        say(f"timing steps of {', '.join(self.models)} on {device}, in turns")
        output = self.output or new_folder("throughput")
        with writable(output):
            result = measure_steps(
                self.models, self.lengths, tokens=self.tokens, hidden_size=self.hidden_size, num_layers=self.num_layers,
                num_heads=self.num_heads, vocab_size=self.vocab_size, device=device, bf16=self.bf16,
                rounds=self.rounds, seconds=self.seconds, forward=self.forward,
            )  # fmt: skip
        show(*throughput_tables(result))
        files = [*write_throughput(result, output), *save(step_times(result), output)]
        print(f"written to {output}: {', '.join(file.name for file in files)}")
