"""Speed of training and decoding: the work that is timed, and fair ways to time it.

A model is any module with `logits, state = model(ids, state)`, also of another library.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halflife.models import LanguageModel, param_groups, preset
from halflife.ops.linear import fast_linears


def interleaved(
    candidates: Mapping[str, Callable[[], object]], *, rounds: int = 3, seconds: float = 0.0
) -> dict[str, float]:
    """The median seconds of each candidate over rounds in which each runs once, so that a slow phase affects them all.

    Args:
        candidates: name → function to time. If its first call does extra work, call it once before.
        rounds, seconds: least number of rounds, and further ones start until this time has passed.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1; got {rounds}")
    times: dict[str, list[float]] = {name: [] for name in candidates}
    began, done = time.perf_counter(), 0
    while done < rounds or time.perf_counter() - began < seconds:
        for name, run in candidates.items():
            start = now()
            run()
            times[name].append(now() - start)
        done += 1
    return {name: median(values) for name, values in times.items()}


def now() -> float:
    """Return the time in seconds, after the accelerator has finished its work."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


def train_step(
    model: nn.Module, *, bf16: bool = False, loss: Callable[[Tensor], Tensor] | None = None
) -> Callable[[Tensor], Tensor]:
    """Return a function that does one training step: forward, backward, AdamW.

    Args:
        model: the model, which is put into training mode and trained.
        bf16: whether to use mixed precision.
        loss: the loss of `ids [B, T]`; None for the mean cross-entropy of the model's logits.

    Returns:
        `loss = step(ids)` for `ids [B, T]`. The first call also allocates AdamW's moments.
    """
    optimizer = torch.optim.AdamW(param_groups(model.train(), 0.1, 1e-4), lr=1e-4)

    def cross_entropy(ids: Tensor) -> Tensor:
        return F.cross_entropy(model(ids)[0][:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())

    def step(ids: Tensor) -> Tensor:
        with fast_linears(model), torch.autocast(ids.device.type, torch.bfloat16, enabled=bf16):
            value = (loss or cross_entropy)(ids)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    return step


def forward_pass(model: nn.Module, *, bf16: bool = False) -> Callable[[Tensor], Tensor]:
    """Return a function that gives the logits of `ids [B, T]` without a gradient; the model is in evaluation mode."""
    model.eval()

    @torch.no_grad()
    def read(ids: Tensor) -> Tensor:
        with fast_linears(model), torch.autocast(ids.device.type, torch.bfloat16, enabled=bf16):
            return model(ids)[0]

    return read


def measure_steps(
    models: Sequence[str],
    lengths: Sequence[int],
    *,
    tokens: int = 8192,
    hidden_size: int = 256,
    num_layers: int = 4,
    num_heads: int | None = None,
    vocab_size: int = 256,
    device: str = "cpu",
    bf16: bool = False,
    rounds: int = 3,
    seconds: float = 0.0,
    forward: bool = False,
) -> dict[str, Any]:
    """Measure the time of a training step of whole models at some lengths (GateRank, Figure 5), or of a forward pass.

    Args:
        models, hidden_size, num_layers, num_heads, vocab_size: presets and their sizes, as in `preset`.
        lengths: tokens of a sequence, in any order.
        tokens: tokens of a step; a step has one sequence at least.
        bf16: whether to use mixed precision.
        rounds, seconds: as in `interleaved`, for each length.
        forward: whether to time a forward pass alone, without gradients (PoST, §5.2).

    Returns:
        The settings, "timed", which is "training step" or "forward pass", and "models", `[{"model", "parameters",
        "seconds": [one a length], "tokens_per_second": […]}]`. The numbers are None where a step needs too much memory.
    """
    if not models or len(set(models)) != len(models):
        raise ValueError(f"name at least one model, each once; got {', '.join(models) or 'none'}")
    if not lengths or min(lengths) < 2 or tokens < 1:
        raise ValueError("name at least one length in tokens, at least 2: --lengths 1024 4096; and tokens of 1 or more")
    sizes: dict[str, Any] = {"hidden_size": hidden_size, "num_layers": num_layers, "vocab_size": vocab_size}
    built = {name: LanguageModel(preset(name, num_heads=num_heads, **sizes)).to(device) for name in models}
    timed = forward_pass if forward else train_step
    steps = {name: timed(model, bf16=bf16) for name, model in built.items()}
    lengths = sorted(set(lengths))
    times: dict[str, list[float | None]] = {name: [] for name in models}
    for length in lengths:
        ids = torch.randint(vocab_size, (max(1, tokens // length), length), device=device)
        fitting = {name: partial(step, ids) for name, step in steps.items() if _fits(partial(step, ids))}
        measured = interleaved(fitting, rounds=rounds, seconds=seconds) if fitting else {}
        for name in models:
            times[name].append(measured.get(name))
    if not any(seconds for measured in times.values() for seconds in measured):
        raise ValueError(
            f"no step fits into the memory of {device_name(device)}; "
            "take fewer tokens, shorter lengths or smaller models"
        )
    read = [max(1, tokens // length) * length for length in lengths]
    return {
        **sizes, "num_heads": num_heads, "device": device_name(device), "dtype": "bfloat16" if bf16 else "float32",
        "timed": "forward pass" if forward else "training step", "tokens": tokens, "lengths": lengths,
        "models": [
            {
                "model": name, "parameters": built[name].num_parameters(), "seconds": times[name],
                "tokens_per_second": [x and count / x for x, count in zip(times[name], read, strict=True)],
            }
            for name in models
        ],
    }  # fmt: skip


def _fits(run: Callable[[], object]) -> bool:
    """Run a step once, which also compiles kernels; return whether an accelerator had enough memory for it."""
    try:
        run()
    except torch.OutOfMemoryError:
        torch.accelerator.empty_cache()
        return False
    return True


def device_name(device: str) -> str:
    """The name of a device: that of the GPU, or the CPU with its threads."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device}, {torch.get_num_threads()} threads" if device == "cpu" else device


class Decoder:
    """Greedy decoding after a context, one token a call, to measure the cost of a token.

    Args:
        model: the model, which is put into evaluation mode.

    Attributes:
        state: state of the model after all tokens so far.
        token: the likeliest next token, `[B, 1]`, which the next call reads.
        position: number of tokens read.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model.eval()
        self.state: Any = None
        self.token: Tensor | None = None
        self.position = 0

    @torch.no_grad()
    def read(self, ids: Tensor) -> Decoder:
        """Read `ids [B, T]`, T ≥ 1, in one pass, and return the decoder."""
        with fast_linears(self.model) if ids.shape[1] > 1 else nullcontext():
            logits, self.state = self.model(ids, self.state)
        self.token, self.position = logits[:, -1:].argmax(-1), self.position + ids.shape[1]
        return self

    def __call__(self) -> None:
        """Decode one token after a context, which must have been read."""
        if self.token is None:
            raise ValueError("the decoder has read nothing yet: let it read a context first")
        self.read(self.token)
