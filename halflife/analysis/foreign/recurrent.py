"""Models of transformers whose whole memory is matrices that fade, with the states that forecasts split and age."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from halflife.analysis.foreign.model import ForeignModel, cache_argument, recurrent_cache, runnable_kernels
from halflife.layers import State
from halflife.models import ModelState


class RecurrentModel(ForeignModel):
    """A model of transformers with states as our models have them, in float32.

    The state of a layer is `{"memory": [B, H, K, V], "conv": …, "position": [B]}`. The weights of `foreign` become
    float32. A layer with another memory, such as the cache of softmax attention, is a ValueError.
    """

    def __init__(self, foreign: ForeignModel) -> None:
        super().__init__(foreign.model.float(), foreign.config.name, foreign.window)
        for layer, block in enumerate(self.blocks):
            if not block.mixer.is_matrix:
                kinds = " + ".join(block.mixer.kinds) or "no mixer"
                raise ValueError(
                    f"no forecast for {self.config.name}: layer {layer} is {kinds}; a forecast needs in every layer a "
                    "matrix in the cache of transformers that fades and that tokens write to linearly, as in Gated "
                    "DeltaNet, Kimi delta attention or Mamba-2, and nothing beside it"
                )
        if self.model.get_output_embeddings() is None:
            raise ValueError(f"no forecast for {self.config.name}: it has no head that predicts tokens")

    @torch.no_grad()
    def advance(self, ids: Tensor, state: ModelState | None) -> tuple[Tensor, ModelState]:
        """Read tokens `[B, T]` after a state. Return the last layer's output `[B, T, D]` and the next state."""
        cache, seen = self._cache(state), 0 if state is None else int(state[0]["position"][0])
        output: list[Tensor] = []
        with self.decoder.register_forward_hook(lambda module, given, result: output.append(result[0])):
            cache = self.read(ids.to(self.embedding.weight.device), cache, seen)
        return output[0], self._state(cache, len(ids), seen + ids.shape[1])

    @torch.no_grad()
    def __call__(self, ids: Tensor, state: ModelState) -> tuple[Tensor, ModelState]:
        """Return the logits `[B, T, vocabulary]`, and the next state."""
        hidden, after = self.advance(ids, state)
        return self.model.get_output_embeddings()(hidden), after

    def read_from(
        self, ids: Tensor, state: ModelState, starts: Sequence[Sequence[State]]
    ) -> tuple[ModelState, list[list[State]]]:
        """Run each mixer again from other states over the same inputs, see `halflife.analysis.capture.read_from`."""
        caches = [self._cache(start) for start in starts]

        def after(module: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
            name = cache_argument(module)
            with runnable_kernels(self.decoder):
                for cache in caches:
                    module.forward(*inputs, **{**options, name: cache})

        with ExitStack() as hooks:
            for block in self.blocks:
                assert block.mixer.decay is not None
                hooks.enter_context(block.mixer.decay.mixer.register_forward_hook(after, with_kwargs=True))
            _, end = self.advance(ids, state)
        seen = int(end[0]["position"][0])
        return end, [list(self._state(cache, len(ids), seen)) for cache in caches]

    def _cache(self, state: Sequence[State] | None) -> Any:
        """The cache of transformers with copies of a state."""
        cache = recurrent_cache(self.decoder.config)
        for layer, part in enumerate(state or ()):
            cache.update_conv_state(part["conv"], layer, conv_kernel_size=part["conv"].shape[-1])
            cache.update_recurrent_state(self._turned(part["memory"], layer).float(), layer)
        return cache

    def _state(self, cache: Any, batch: int, seen: int) -> ModelState:
        """Copies of what a cache holds."""
        position = torch.full((batch,), seen)
        return tuple(
            {
                "memory": self._turned(cache.get_recurrent_state(layer, state_idx=0), layer).clone(),
                "conv": cache.get_conv_state(layer, state_idx=0).clone(),
                "position": position,
            }
            for layer in range(len(self.blocks))
        )

    def _turned(self, memory: Tensor, layer: int) -> Tensor:
        """Swap rows and columns of the states of a mixer whose rows are values."""
        decay = self.blocks[layer].mixer.decay
        return memory.transpose(-1, -2) if decay is not None and decay.key_axis == -1 else memory
