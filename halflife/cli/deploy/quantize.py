"""`halflife quantize`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional


@dataclass(frozen=True)
class Quantize:
    """Measure what int8 weights cost a trained model on your text, and what they save, on the CPU.

    The command prints bits per byte, bytes of weights and milliseconds of a decoding step, with float32 and with int8
    weights. It writes nothing: `generate` and `serve` quantise when they load a model, with --quantize int8.

    examples:
      halflife quantize my-checkpoint --text book.txt
    """

    checkpoint: Positional[Path]
    """The folder of the model."""
    text: Path
    """The text to measure the loss on."""
    tokens: int = 16_384
    """Most tokens of the text that are read."""

    def run(self) -> None:
        import copy

        from halflife.cli.checkpoint import load_model, load_tokenizer
        from halflife.export.int8 import bits_per_byte, quantize, step_seconds, weight_bytes
        from halflife.files import read_bytes

        if self.tokens < 2:
            raise ValueError(f"need tokens ≥ 2; got {self.tokens}")
        model = load_model(self.checkpoint).float().eval()
        tokenizer = load_tokenizer(self.checkpoint, model.config.vocab_size)
        ids = tokenizer.encode(read_bytes(self.text).decode("utf-8", "replace"))[: self.tokens]
        if len(ids) < 2:
            raise ValueError(f"{self.text} has {len(ids)} tokens, and a loss needs 2")
        count = len(tokenizer.decode(ids[1:]).encode())
        small = copy.deepcopy(model)
        maps = quantize(small)
        seconds = step_seconds([model, small])
        print(f"{maps} linear maps in int8; {len(ids):,} tokens of {self.text}")
        for name, one, step in zip(("float32", "int8"), (model, small), seconds, strict=True):
            loss, size = bits_per_byte(one, ids, count), weight_bytes(one)
            print(f"{name:8} {loss:.4f} bits per byte, {size:,} bytes of weights, {1e3 * step:.2f} ms a step")
