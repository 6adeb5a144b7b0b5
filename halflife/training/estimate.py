"""What a training run will need, from its configuration alone: parameters, memory and floating-point operations.

Nothing is trained. The blocks of a model have equal shapes, so models of two and three layers are counted and the rest
is extrapolated. They are built from fake tensors, which have shapes and no values. Spectral Koopman attention reads
values, so one layer of it is built in memory. The ops are those of this machine's CPU. Kernels of a GPU save other
tensors for the backward pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any
from weakref import ref

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from halflife.models import LanguageModel, ModelConfig
from halflife.models.lm import on_meta
from halflife.ops.backends import native
from halflife.training.config import TrainConfig

SHORT, LONG = 128, 256  # tokens of the two counts that are extrapolated linearly
PEAKS = 1024, 2048  # those of peaks, at which small tensors do not take another way
BYTES_PER_PARAMETER = 16  # bytes a parameter: float32 weight, gradient, and AdamW's two moments


@dataclass(frozen=True)
class Line:
    """A quantity that is linear in the number of tokens, from its values at two numbers of them."""

    short: float
    long: float
    ends: tuple[int, int] = (SHORT, LONG)

    def at(self, tokens: float) -> float:
        """The value at a number of tokens."""
        first, last = self.ends
        return self.short + (self.long - self.short) * (tokens - first) / (last - first)

    def plus(self, other: Line, times: float) -> Line:
        return Line(self.short + times * other.short, self.long + times * other.long, self.ends)


@dataclass(frozen=True)
class Costs:
    """The costs of one forward pass."""

    # floating-point operations a token, on sequences of a length. They grow with the length for softmax attention
    # alone. Elementwise operations and recomputed activations are not counted.
    operations: Line
    saved: Line  # bytes that a number of tokens saves for the backward pass, in sequences of `LONG` tokens at most
    state: Line  # bytes of the state of a sequence after a number of tokens

    def training_operations(self, length: int) -> float:
        """Operations a token in training on sequences of a length, three times those of the forward pass."""
        return 3 * self.operations.at(length)

    def plus(self, other: Costs, times: float) -> Costs:
        names = ("operations", "saved", "state")
        return Costs(*(getattr(self, name).plus(getattr(other, name), times) for name in names))


@dataclass(frozen=True)
class Estimate:
    """What a run will need."""

    model: str  # name of the model
    parameters: int  # number of its parameters
    # steps, tokens: of the training
    steps: int
    tokens: int
    state_bytes: int  # weights, gradients and AdamW's moments
    rows: int  # sequences that are held at once
    activation_bytes: int  # what the forward pass of these sequences saves, without gradient checkpointing
    operations: float  # floating-point operations of the training


def estimate(config: TrainConfig, sequences: Mapping[int, float], rows: int | None = None) -> Estimate:
    """Estimate what a run needs.

    Args:
        sequences: length in tokens → how many sequences of this length the training reads.
        rows: sequences of a micro-batch; None for whole batches.
    """
    parameters = on_meta(config.model).num_parameters()
    costs = model_costs(dataclasses.replace(config.model, name=""), config.bf16)
    rows = rows or config.batch_size
    return Estimate(
        model=config.model.name,
        parameters=parameters,
        steps=config.steps,
        tokens=round(sum(length * count for length, count in sequences.items())),
        state_bytes=BYTES_PER_PARAMETER * parameters,
        rows=rows,
        activation_bytes=round(costs.saved.at(rows * max(sequences))),
        operations=sum(costs.training_operations(length) * length * n for length, n in sequences.items()),
    )


def model_costs(config: ModelConfig, bf16: bool = False) -> Costs:
    """The costs of a forward pass of a model, or of one under bfloat16 autocast."""
    return _of_layers(config.to_json(), bf16, _count)


def peak_memory(config: ModelConfig, bf16: bool = False) -> Line:
    """Bytes that a forward and a backward pass hold at most, beside the weights and without the loss."""
    return _of_layers(config.to_json(), bf16, _count_peak)


@lru_cache(maxsize=256)
def _of_layers(config_json: str, bf16: bool, count: Callable[[ModelConfig, bool], Any]) -> Any:
    """What `count` gives for a model, from its values for two and three layers, and for two with one of a hybrid."""
    config = ModelConfig.from_json(config_json)
    plain = dataclasses.replace(config, hybrid={}, more_hybrids=[])
    two, three = (count(dataclasses.replace(plain, num_layers=layers), bf16) for layers in (2, 3))
    total = two.plus(three.plus(two, -1), config.num_layers - 2)
    for kind in config.hybrids:
        # The counter does not know the kernel of spectral Koopman attention.
        options = {**kind["options"], **({"backend": "chunked"} if kind["mixer"] == "ska" else {})}
        mixed = dataclasses.replace(plain, num_layers=2, hybrid={**kind, "options": options, "layers": [1]})
        total = total.plus(count(mixed, bf16).plus(two, -1), len(kind["layers"]))
    return total


def _count(config: ModelConfig, bf16: bool) -> Costs:
    operations, saved, state = zip(
        *(_faked(_count_pass, config, tokens, bf16) for tokens in (SHORT, LONG)), strict=True
    )
    return Costs(Line(operations[0] / SHORT, operations[1] / LONG), Line(*saved), Line(*state))


def _count_peak(config: ModelConfig, bf16: bool) -> Line:
    short, long = (_faked(_peak_of_pass, config, tokens, bf16) for tokens in PEAKS)
    return Line(short, long, PEAKS)


def _faked(count: Callable[..., Any], *given: Any) -> Any:
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    try:
        return count(*given, fake=True)
    except (DataDependentOutputException, DynamicOutputShapeException):
        return count(*given, fake=False)


def _peak_of_pass(config: ModelConfig, tokens: int, bf16: bool, fake: bool) -> float:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() if fake else nullcontext(), torch.random.fork_rng(devices=[]):
        model, ids = LanguageModel(config).eval(), torch.zeros(1, tokens, dtype=torch.long)
        counter = LiveBytes([ids, *model.parameters(), *model.buffers()])
        with counter, torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            hidden = model.hidden(ids)[0]
            hidden.backward(torch.empty_like(hidden))
    return float(counter.most)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that live inside it, `live` now and `most` at once, without tensors `beside`."""

    def __init__(self, beside: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.live = self.most = 0
        self._seen: dict[Any, Any] = {x.untyped_storage()._cdata: None for x in beside}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and (storage := x.untyped_storage())._cdata not in self._seen:
                self.live += storage.nbytes()
                self._seen[storage._cdata] = ref(storage, partial(self._freed, storage._cdata, storage.nbytes()))
        self.most = max(self.most, self.live)
        return out

    def _freed(self, key: Any, size: int, _: Any) -> None:
        self.live -= size
        self._seen.pop(key)


def _count_pass(config: ModelConfig, tokens: int, bf16: bool, fake: bool) -> tuple[float, float, float]:
    """Operations of a forward pass on one sequence, the bytes that it saves for the backward pass, and its state's."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() if fake else nullcontext(), torch.random.fork_rng(devices=[]):
        model = LanguageModel(config).eval()  # training mode would count resets
        ids = torch.zeros(1, tokens, dtype=torch.long)
        formulas = {**native.formulas(), torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention}
        with (
            recording_saved() as saved,
            FlopCounterMode(display=False, custom_mapping=formulas) as counter,
            torch.autocast("cpu", torch.bfloat16, enabled=bf16),
        ):
            hidden, state = model.hidden(ids)
            kept = dict(saved)
            model.logits(hidden)  # the loss computes logits in pieces, and saves none
        for tensor in (*model.parameters(), *model.buffers()):
            kept.pop(tensor.untyped_storage()._cdata, None)
    states = sum(x.nbytes for layer in state for x in layer.values())
    return float(counter.get_total_flops()), float(sum(kept.values())), float(states)


@contextmanager
def recording_saved() -> Iterator[dict[Any, int]]:
    """Give the bytes of the storages that autograd saves in the context, by storage."""
    saved: dict[Any, int] = {}

    def save(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        saved[storage._cdata] = storage.nbytes()
        return x

    with saved_tensors_hooks(save, lambda x: x):
        yield saved


def _attention(query: Any, key: Any, value: Any, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """The operations of torch's fused attention on CPUs, which its counter does not know."""
    return sdpa_flop_count(query, key, value)
