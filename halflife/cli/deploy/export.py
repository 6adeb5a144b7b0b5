"""`halflife export`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional


@dataclass(frozen=True)
class Export:
    """Write a trained model as ONNX graphs, and check them against the model with onnxruntime.

    step.onnx reads one token, and prompt.onnx a piece of --prompt-tokens tokens. Both take token ids and the tensors of
    the state, and return logits and the new state. initial_state.safetensors is the state before the first token, and
    graphs.json names the inputs and outputs. A prompt is read in pieces, and the rest of it token by token. Models with
    softmax attention need --max-length, the size of its cache.

    examples:
      halflife export my-checkpoint --onnx my-graphs
      halflife export my-checkpoint --onnx my-graphs --prompt-tokens 64 --batch 8
      halflife export my-llama --onnx my-graphs --max-length 2048
    """

    checkpoint: Positional[Path]
    """The folder of the model."""
    onnx: Path
    """The folder to write."""
    prompt_tokens: int = 16
    """Tokens of a piece of the prompt graph."""
    batch: int = 1
    """Sequences that each graph reads at once."""
    max_length: int | None = None
    """The most tokens of a sequence, which softmax attention without a window needs; the other models have no limit."""

    def run(self) -> None:
        from halflife.cli.checkpoint import load_model
        from halflife.export.onnx import INITIAL, write_onnx
        from halflife.files import check_new_folder

        if self.prompt_tokens < 2 or self.batch < 1:
            raise ValueError(f"need prompt_tokens ≥ 2 and batch ≥ 1; got {self.prompt_tokens} and {self.batch}")
        check_new_folder(self.onnx)
        model = load_model(self.checkpoint).float().eval()
        for graph in write_onnx(model, self.onnx, self.prompt_tokens, self.batch, max_length=self.max_length):
            tokens = f"{graph.tokens} token{'s' if graph.tokens > 1 else ''}"
            print(
                f"{graph.path}: {tokens} ({graph.form}), {graph.path.stat().st_size:,} bytes, "
                f"differs from the model by {graph.difference:.1e} of the largest entry"
            )
        print(f"{self.onnx / INITIAL}: the state before the first token")
