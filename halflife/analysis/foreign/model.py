"""A model of transformers with the interface by which the analyses read ours."""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import FunctionType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from halflife.analysis.foreign.families import MIXERS, MixerDecay

WINDOW_TOKENS = 512  # tokens that a model reads in one call
LAYER_LISTS = ("layers", "blocks", "h")  # names under which transformers keeps the layers of a decoder
# Names of the argument for what a model remembers; transformers has `cache` since 5.24.
CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params", "state")
CHOOSER = "hub_kernels"  # the module of transformers that chooses between a package's kernel and PyTorch
# Classes of modules that mix tokens. What they are named after tells softmax attention from recurrent mixers.
ATTENTION = re.compile("Attention$")
OTHER_MIXER = re.compile(
    "Mixer$|MambaLayer$|DeltaNet$|DeltaAttention$|LightningAttention$|RecurrentBlock$|ShortConv$|LSTMLayer$"
)


@dataclass(frozen=True)
class ForeignConfig:
    """The part of a model's configuration that the analyses ask for: its label, and the number of its tokens."""

    name: str
    vocab_size: int


@dataclass(frozen=True)
class ForeignMixer:
    """The modules of one layer that mix tokens."""

    kinds: tuple[str, ...]  # what each of them is, such as "Mamba-2" or "softmax attention"; empty without any
    decay: MixerDecay | None

    @property
    def is_matrix(self) -> bool:
        """Whether the layer's whole memory is a matrix per head in the cache, which tokens write to linearly."""
        return self.decay is not None and self.decay.key_axis is not None and len(self.kinds) == 1


@dataclass(frozen=True)
class ForeignBlock:
    """One layer."""

    mixer: ForeignMixer


class ForeignModel:
    """A language model of transformers whose decays are observed while it reads, in evaluation mode from here on.

    `blocks` has one entry for each layer of its decoder. In one call it reads `window` tokens, at least 4, and its
    state is carried between calls.
    """

    def __init__(self, model: Any, name: str, window: int = WINDOW_TOKENS) -> None:
        if window < 4:
            raise ValueError(f"a window has at least 4 tokens; got {window}")
        self.model, self.window = model.eval(), window
        decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
        layers = next((getattr(decoder, name) for name in LAYER_LISTS if hasattr(decoder, name)), None)
        if layers is None:
            raise ValueError(f"{type(model).__name__} has no list of layers ({', '.join(LAYER_LISTS)})")
        self.decoder = decoder
        self.config = ForeignConfig(name, model.config.get_text_config().vocab_size)
        self.blocks = [ForeignBlock(_mixer(layer, i)) for i, layer in enumerate(layers)]

    @property
    def embedding(self) -> nn.Embedding:
        """The module that embeds tokens."""
        return self.decoder.get_input_embeddings()

    @torch.no_grad()
    def hidden(self, ids: Tensor, *, progress: Callable[[int], object] | None = None) -> None:
        """Read ids `[B, T]` from the start of a text, window after window, and forget it; `progress` counts tokens."""
        with ExitStack() as hooks:
            for block in self.blocks:
                hooks.enter_context(block.mixer.decay.observed() if block.mixer.decay else nullcontext())
            cache, seen = self.new_cache(), 0
            for part in windows(ids, self.window):
                cache = self.read(part, cache, seen)
                seen += part.shape[1]
                if progress is not None:
                    progress(part.numel())

    @torch.no_grad()
    def read(self, ids: Tensor, cache: Any, seen: int) -> Any:
        """Read tokens `[B, T]` after `seen` others, and return what the model remembers after them."""
        known = inspect.signature(self.decoder.forward).parameters
        name = cache_argument(self.decoder)
        options: dict[str, Any] = {name: cache}
        if hasattr(cache, "seen"):
            cache.seen = seen
        if "position_ids" in known:  # some decoders count from 0 in every call otherwise
            options["position_ids"] = torch.arange(seen, seen + ids.shape[1], device=ids.device).expand_as(ids)
        with runnable_kernels(self.decoder):
            output = self.decoder(input_ids=ids, use_cache=True, **options)
        after = output.get(name)
        return cache if after is None else after

    def new_cache(self) -> Any:
        """Return what the model remembers before its first token. None lets the decoder create it.

        RecurrentGemma does not return the cache that it creates, so it gets one.
        """
        if all(block.mixer.is_matrix for block in self.blocks):
            return recurrent_cache(self.decoder.config)
        if not hasattr(self.decoder, "_setup_cache"):
            return None
        from transformers import DynamicCache

        return DynamicCache(config=self.decoder.config)


def cache_argument(module: nn.Module) -> str:
    """The name under which the forward pass of a module takes what it remembers.

    Raises:
        ValueError: it takes none of `CACHE_ARGUMENTS`.
    """
    known = inspect.signature(module.forward).parameters
    for name in CACHE_ARGUMENTS:
        if name in known:
            return name
    raise ValueError(
        f"{type(module).__name__} of the installed transformers takes what it remembers under none of the names "
        f"{', '.join(CACHE_ARGUMENTS)}"
    )


def windows(ids: Tensor, most: int) -> tuple[Tensor, ...]:
    """Split a text `[B, T]` into windows of nearly equal lengths, at most `most`. None has a single token if T ≥ 2.

    A cached single token takes another path through a layer of transformers, where Mamba-2 ignores its step limits.
    """
    return ids.tensor_split(max(1, math.ceil(ids.shape[1] / most)), 1)


def _mixer(layer: nn.Module, index: int) -> ForeignMixer:
    mixers = list(_mixers(layer))
    decays = [MIXERS[type(module).__name__](module) for module in mixers if type(module).__name__ in MIXERS]
    if len(decays) > 1:
        raise ValueError(f"layer {index} has {len(decays)} mixers with a decay; the analyses read one of a layer")
    return ForeignMixer(tuple(dict.fromkeys(_kind(module) for module in mixers)), decays[0] if decays else None)


def _mixers(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules that mix tokens."""
    name = type(module).__name__
    if name in MIXERS or ATTENTION.search(name) or OTHER_MIXER.search(name):
        yield module
        return
    for child in module.children():
        yield from _mixers(child)


def _kind(module: nn.Module) -> str:
    name = type(module).__name__
    if name in MIXERS:
        return MIXERS[name].family
    if OTHER_MIXER.search(name):
        return f"{name}, whose decay is not read"
    return "softmax attention" if getattr(module, "sliding_window", None) is None else "sliding-window attention"


def recurrent_cache(config: Any) -> Any:
    """Return an empty cache for a decoder of recurrent layers alone.

    Some decoders build an attention mask even if no layer uses it. They ask the cache how many tokens it has seen. A
    cache without attention layers refuses to say, and here the attribute `seen` answers.
    """
    from transformers import DynamicCache

    class RecurrentCache(DynamicCache):
        seen = 0

        def get_seq_length(self, layer_idx: int = 0) -> int:
            return self.seen

        def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
            return self.seen + query_length, 0

    return RecurrentCache(config=config)


@contextmanager
def runnable_kernels(model: nn.Module) -> Iterator[None]:
    """Let a model on a CPU compute in PyTorch while the context is open.

    transformers takes the kernels of fla-core, mamba-ssm and causal-conv1d wherever these packages are installed. They
    need a GPU. Each function that chooses a kernel wraps one in PyTorch, which replaces it here.
    """
    with ExitStack() as patches:
        if next(model.parameters()).device.type == "cpu":
            for module in {sys.modules[type(part).__module__] for part in model.modules()}:
                for name, value in list(vars(module).items()):
                    wraps = isinstance(value, FunctionType) and hasattr(value, "__wrapped__")
                    if wraps and CHOOSER in value.__code__.co_filename:
                        patches.enter_context(patch.object(module, name, value.__wrapped__))
        yield
