"""The class that lm-evaluation-harness builds for `--model halflife`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lm_eval.api.model import TemplateLM

from halflife.cli.checkpoint import load_model, load_tokenizer
from halflife.cli.options import check_device, default_device
from halflife.evaluation.harness import Adapter


class HalflifeLM(Adapter, TemplateLM):
    """A model in a folder, for the harness.

    Args:
        pretrained: the folder, as for `halflife eval`.
        batch_size: texts at once. The harness gives the text of --batch_size.
        max_length: largest number of tokens of one text; longer texts lose their beginning. None truncates nothing.
        device: the device. None means the GPU if there is one, else the CPU.

    Raises:
        ValueError: an argument has an impossible value or is unknown, or the folder holds no model and tokenizer.
    """

    def __init__(
        self, pretrained: Any, batch_size: Any = 8, max_length: int | None = None, device: str | None = None,
        **others: Any,
    ) -> None:  # fmt: skip
        if others:
            raise ValueError(f"--model_args of halflife are pretrained and max_length; got {', '.join(others)}")
        if not str(batch_size).isdecimal() or int(batch_size) < 1 or (max_length is not None and max_length < 1):
            raise ValueError(f"batch_size and max_length must be at least 1; got {batch_size} and {max_length}")
        check_device(device)
        folder = Path(str(pretrained))
        model = load_model(folder).to(default_device(device)).eval()
        super().__init__(model, load_tokenizer(folder, model.config.vocab_size), int(batch_size), max_length, False)
