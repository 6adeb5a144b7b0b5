"""The parts of a `LanguageModel` as transformers' base model: token ids → hidden states."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.generic import can_return_tuple

from halflife import layers
from halflife.extras import install_anywhere
from halflife.files import write_text
from halflife.hf import quantization, weight_decay
from halflife.hf.block import HalflifeBlock, as_kind, run
from halflife.hf.cache import CACHE, HalflifeCache
from halflife.hf.config import AUTO_FILE, HalflifeConfig
from halflife.hf.sequences import boundaries, check_others
from halflife.models import LanguageModel
from halflife.models.lm import Backbone, ModelState
from halflife.packing import Packing
from halflife.precision import wide_classes


class HalflifePreTrainedModel(PreTrainedModel):
    """What all models of this package share."""

    config_class = HalflifeConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _can_compile_fullgraph = True
    _no_split_modules = ["HalflifeBlock"]  # noqa: RUF012 (as the base class declares it)
    # Layers pass tensors to later layers in the dict `shared`. A copy by accelerate would lose what they write to it.
    _skip_keys_device_placement = ["shared"]  # noqa: RUF012
    _keep_in_fp32_modules = quantization.KEPT  # read by quantisation alone, see `_get_dtype_plan`
    _keys_to_ignore_on_load_unexpected = [r"^(lm_)?head\."]  # noqa: RUF012 (base models have no head)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        weight_decay.watch(self)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        loaded = super().from_pretrained(*args, **kwargs)
        quantization.mind_cpu_kernels(loaded[0] if isinstance(loaded, tuple) else loaded)
        return loaded

    def _get_dtype_plan(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        # Linear maps compute in the dtype of their inputs, and a `Float32Module` keeps its own parameters in float32.
        return {}

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Save as transformers does. With `config.auto_map = halflife.hf.AUTO_MAP`, a file beside imports this package.

        Programs that never import `halflife.hf` can then open the folder with `trust_remote_code=True`.
        """
        # The names in files are those of the model: Trainer and accelerate load them without any conversion, and
        # leave out a head of another name.
        super().save_pretrained(save_directory, *args, **{"save_original_format": False, **kwargs})
        if self.config.auto_map:
            names = sorted(path.partition(".")[2] for path in self.config.auto_map.values())
            text = f"# {install_anywhere('train')}\nfrom halflife.hf import {', '.join(names)}  # noqa: F401\n"
            write_text(Path(save_directory) / f"{AUTO_FILE}.py", text)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise the parameters that the checkpoint did not contain, each by its module's law."""
        loaded = [x for x in module.parameters() if getattr(x, "_is_hf_initialized", False)]
        if len(loaded) == len(list(module.parameters())):
            return
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        elif not isinstance(module, PreTrainedModel) and callable(reset := getattr(module, "reset_parameters", None)):
            values = [x.clone() for x in loaded]  # `reset_parameters` also draws the loaded ones
            reset()
            for x, value in zip(loaded, values, strict=True):
                x.copy_(value)


class HalflifeModel(HalflifePreTrainedModel, Backbone):
    """The base model: token ids → normalised hidden states, without a head.

    Args:
        network: a `LanguageModel` whose parts it takes; None builds one.
    """

    def __init__(self, config: HalflifeConfig, network: LanguageModel | None = None) -> None:
        super().__init__(config)
        network = LanguageModel(config.model_config()) if network is None else network
        self.embedding, self.embedding_norm = network.embedding, network.embedding_norm
        self.embedding_dropout, self.tpe = network.embedding_dropout, network.tpe
        self.blocks = nn.ModuleList(as_kind(block, HalflifeBlock) for block in network.blocks)  # pyright: ignore[reportArgumentType]
        self.norm = network.norm
        if not self.embedding.weight.is_meta:
            for module in self.modules():  # `post_init` would initialise every module without this mark again
                setattr(module, "_is_hf_initialized", True)  # noqa: B010 (no attribute of nn.Module)
        # FSDP wraps these classes by default. A unit has parameters of one dtype, so those that stay float32 are apart.
        self._no_split_modules = ["HalflifeBlock", *wide_classes(self)]
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embedding

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.embedding = value

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        cu_seqlens: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        seq_idx: Tensor | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Return the hidden states after the last norm.

        Several sequences may be packed into a row. Any of cu_seqlens, cu_seq_lens_q, seq_idx and position_ids says
        where each begins, as collators of transformers and TRL have it.

        Args:
            input_ids: token ids `[B, T]`.
            attention_mask: `[B, T]`, or `[B, seen + T]` if earlier tokens were read; 0 at padding, which has no effect.
            position_ids: `[B, T]`, which rise by one within a sequence; where they do not rise, another one begins.
            cache, past_key_values: the `HalflifeCache` that the previous call returned. It is not modified.
            inputs_embeds: embeddings `[B, T, D]` instead of input_ids.
            use_cache: whether to return the state. By default `config.use_cache`, but False in training mode.
            output_hidden_states: whether to return the input of each block and the output of the last norm, which are
                layers + 1 tensors `[B, T, D]`.
            output_attentions: must be false, because a recurrence has no attention weights.
            cu_seqlens, cu_seq_lens_q, cu_seq_lens_k: boundaries `[N + 1]` of N sequences packed along T (then B = 1).
            seq_idx: `[B, T]`, the number of the sequence of each token.
            **kwargs: arguments of transformers that change nothing here (`sequences.IGNORED`).

        Raises:
            TypeError: another keyword argument, or a cache of another kind.
            ValueError: the inputs do not fit together.
        """
        check_others(kwargs)
        if self._option(output_attentions, "output_attentions"):
            raise ValueError("output_attentions: a recurrence has no attention weights")
        past = HalflifeCache.check(past_key_values, cache)
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        if tokens is None or (input_ids is not None and inputs_embeds is not None):
            raise ValueError("give either input_ids or inputs_embeds")
        mask = self._padding(attention_mask, tokens, past)
        packed = {"cu_seqlens": cu_seqlens, "cu_seq_lens_q": cu_seq_lens_q, "cu_seq_lens_k": cu_seq_lens_k}
        rows = (tokens.shape[0], tokens.shape[1])
        bounds = boundaries(rows, mask, {**packed, "seq_idx": seq_idx, "position_ids": position_ids})
        trace: list[Tensor] | None = [] if self._option(output_hidden_states, "output_hidden_states") else None
        before = None if past is None else self.state_of(past)
        hidden, state = self._run(tokens, before, mask, bounds, trace)
        after = None
        if self._option(use_cache, "use_cache") and not (use_cache is None and self.training):
            past = HalflifeCache() if past is None else past
            after = HalflifeCache(state) if bounds is not None else past.after(state, (tokens, mask), before)
        return BaseModelOutputWithPast(
            last_hidden_state=hidden,  # pyright: ignore[reportArgumentType]
            hidden_states=None if trace is None else tuple(trace),  # pyright: ignore[reportArgumentType]
            **{CACHE: after},  # pyright: ignore[reportArgumentType]
        )

    def _option(self, given: bool | None, name: str) -> bool:
        return bool(getattr(self.config, name) if given is None else given)

    def _padding(self, attention_mask: Tensor | None, tokens: Tensor, past: HalflifeCache | None) -> Tensor | None:
        """The mask `[B, T]` of the tokens, or None if it has no padding."""
        if attention_mask is None:
            return None
        rows, length = tokens.shape[:2]
        # The columns that were read are a number on the device, so they are asked for only where they matter.
        seen = 0 if past is None or attention_mask.shape == (rows, length) else past.seen
        if attention_mask.shape not in ((rows, length), (rows, seen + length)):
            raise ValueError(
                f"attention_mask must be [B, T] = {(rows, length)} or [B, seen + T] = {(rows, seen + length)}; "
                f"got {tuple(attention_mask.shape)}"
            )
        mask = attention_mask[:, attention_mask.shape[1] - length :].bool()
        return None if mask.all() else mask

    def state_of(self, cache: HalflifeCache) -> ModelState | None:
        """Return the state after all tokens of a cache, also after its `crop`; None if it has none."""
        state = cache.state
        for tokens, mask in cache.unread:
            _, state = self._run(tokens, state, mask, None, None)
        return state

    def _run(
        self,
        tokens: Tensor,
        state: ModelState | None,
        mask: Tensor | None,
        bounds: Tensor | None,
        trace: list[Tensor] | None,
    ) -> tuple[Tensor, ModelState]:
        """Return the hidden states `[B, T, D]` and the new state; append the inputs of the blocks to `trace`."""
        shape, index = tokens.shape[:2], None
        if self.context_parallel is not None and (mask is not None or bounds is not None):
            raise ValueError("pieces on several processes are rows here; `LanguageModel` takes packed and padded ones")
        if mask is not None:
            tokens, lengths, index = layers.unpad(tokens, mask)
            bounds = lengths if bounds is None else bounds
        elif bounds is not None:
            tokens = tokens.flatten(0, 1).unsqueeze(0)

        def rows(x: Tensor) -> Tensor:
            return x.view(*shape, x.shape[-1]) if index is None else layers.repad(x, index, *shape)

        def call(block: nn.Module, x: Tensor, before: Any, packing: Packing, shared: Any) -> Any:
            if trace is not None:  # what is returned stands on the graph of the output
                trace.append(rows(x))
                flat = trace[-1].flatten(0, 1)
                x = trace[-1].view(x.shape) if index is None else flat.index_select(0, index).unsqueeze(0)
            return run(block, x, before, packing, shared)

        hidden, new = self.hidden(tokens, state, bounds, call=call)
        hidden = rows(hidden)
        if trace is not None:
            trace.append(hidden)
        return hidden, new
