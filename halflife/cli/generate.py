"""`halflife generate`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional


@dataclass(frozen=True)
class Generate:
    """Continue a text with a trained model, and print it token by token.

    The checkpoint is a folder of halflife (config.json, model.safetensors) or of transformers' save_pretrained. The
    tokenizer in that folder encodes the text; a model with a vocabulary of bytes needs none.

    examples:
      halflife generate my-checkpoint "Once upon a time"
      halflife generate my-checkpoint "ROMEO:" --max-new-tokens 400 --temperature 0.8 --top-k 40 --seed 1
      halflife generate my-checkpoint "ROMEO:" --greedy
      halflife generate my-checkpoint "ROMEO:" --quantize int8 --device cpu
    """

    checkpoint: Positional[Path]
    """The folder of the model."""
    prompt: Positional[str]
    """The text to continue."""
    max_new_tokens: int = 200
    """Most tokens to write. The end token of a tokenizer ends the text earlier."""
    temperature: float = 1.0
    """Divides the logits: below 1 it favours likely tokens, above 1 unlikely ones."""
    top_k: int | None = None
    """Draw from the top_k likeliest tokens."""
    top_p: float | None = None
    """Draw from the likeliest tokens whose probabilities sum to top_p."""
    seed: int | None = None
    """Seed of the random numbers. Default: a new text every time."""
    greedy: bool = False
    """Always take the likeliest token."""
    quantize: Literal["none", "int8"] = "none"
    """int8 stores the weights of linear maps in a quarter of the bytes, on a CPU."""
    device: str | None = None
    """The device. Default: the GPU if there is one, else the CPU."""

    def run(self) -> None:
        import torch

        from halflife.cli.checkpoint import load_model, load_tokenizer
        from halflife.cli.options import default_device
        from halflife.models.session import Session

        if self.max_new_tokens < 1 or self.temperature <= 0:
            raise ValueError(
                f"need max_new_tokens ≥ 1 and temperature > 0; got {self.max_new_tokens} and {self.temperature}"
            )
        model = load_model(self.checkpoint, self.quantize).to(default_device(self.device)).eval()
        tokenizer = load_tokenizer(self.checkpoint, model.config.vocab_size)
        session = Session(model, encode=lambda text: tokenizer.encode(text).tolist(), decode=tokenizer.decode)
        stop = () if tokenizer.eos is None else (tokenizer.eos,)
        if not session.feed(self.prompt).position:
            raise ValueError("the prompt is empty: the model continues a text of at least one token")
        generator = torch.Generator(model.embedding.weight.device)
        generator.seed() if self.seed is None else generator.manual_seed(self.seed)
        pieces = session.write(
            self.max_new_tokens, stop=stop, temperature=0.0 if self.greedy else self.temperature,
            top_k=self.top_k, top_p=self.top_p, generator=generator,
        )  # fmt: skip
        print(self.prompt, end="", flush=True)
        for piece in pieces:
            print(piece, end="", flush=True)
        print()
