"""The class that lm-evaluation-harness builds for `--model halflife`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lm_eval.api.model import TemplateLM

from halflife.cli.checkpoint import load_model, load_tokenizer, special_tokens
from halflife.cli.options import check_device, default_device
from halflife.evaluation.harness import Adapter

AUTO = 64  # texts
HARNESS_DEVICE = "cuda:0"


class HalflifeLM(Adapter, TemplateLM):
    """A model in a folder, for the harness.

    Args:
        pretrained: the folder, as for `halflife eval`.
        batch_size: most texts at once. The harness gives the text of --batch_size. "auto" is `max_batch_size`, and half
            of it as often as memory is short.
        max_batch_size: what "auto" begins with; None means 64, as for the harness's own models.
        max_length: largest number of tokens of one text; longer texts lose their beginning. None truncates nothing.
        device: the device. None means the GPU if there is one, else the CPU. So does "cuda:0", which the harness gives
            where a user names none.
        add_bos_token: whether the tokenizer adds its special tokens (BOS) to a text. None means its default; for what
            `halflife train` trained, whose documents have none, it means False.
        prefix_token_id: the token that precedes the first token of a text. None means BOS, else the end token; for what
            `halflife train` trained, the end token.

    Raises:
        ValueError: an argument has an impossible value or is unknown, or the folder holds no model and tokenizer.
    """

    def __init__(
        self, pretrained: Any, batch_size: Any = 8, max_length: int | None = None, device: str | None = None,
        max_batch_size: int | None = None, add_bos_token: bool | None = None, prefix_token_id: int | None = None,
        **others: Any,
    ) -> None:  # fmt: skip
        if others:
            names = "pretrained, max_length, add_bos_token and prefix_token_id"
            raise ValueError(f"--model_args of halflife are {names}; got {', '.join(others)}")
        size = max_batch_size or AUTO if str(batch_size).partition(":")[0] == "auto" else batch_size
        if not str(size).isdecimal() or int(size) < 1 or (max_length is not None and max_length < 1):
            raise ValueError(f"batch_size and max_length must be at least 1; got {batch_size} and {max_length}")
        device = None if device == HARNESS_DEVICE and not torch.cuda.is_available() else device
        check_device(device)
        folder = Path(str(pretrained))
        model = load_model(folder).to(default_device(device)).eval()
        tokenizer = load_tokenizer(folder, model.config.vocab_size)
        special = special_tokens(folder, tokenizer)
        if add_bos_token is not None:
            special["add_bos_token"] = add_bos_token
        if prefix_token_id is not None:
            special["prefix_token_id"] = prefix_token_id
        super().__init__(model, tokenizer, int(size), max_length, False, **special)
