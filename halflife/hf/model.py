"""A `LanguageModel` inside a causal language model of transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint as activations
from transformers import GenerationMixin, PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from halflife import layers
from halflife.hf.cache import HalflifeCache
from halflife.hf.config import HalflifeConfig
from halflife.layers import State
from halflife.models import LanguageModel, checkpoint
from halflife.models import loss as large
from halflife.models.lm import ModelState
from halflife.tasks import IGNORED


class HalflifeForCausalLM(PreTrainedModel, GenerationMixin):
    """A causal language model of transformers around a `LanguageModel` (`.model`).

    The `LanguageModel` initialises its parameters, keeps some of them in float32, and ties its head. A tied head has no
    parameter, so transformers has nothing to tie (`_tied_weights_keys`).
    """

    config_class = HalflifeConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    accepts_loss_kwargs = True  # the loss uses num_items_in_batch
    _is_stateful = True
    _no_split_modules = ["Block"]  # noqa: RUF012 (as the base class declares it)
    # Layers pass tensors to later layers in the dict `shared`. A copy by accelerate would lose what they write to it.
    _skip_keys_device_placement = ["shared"]  # noqa: RUF012

    def __init__(self, config: HalflifeConfig) -> None:
        super().__init__(config)
        self.gradient_checkpointing = False
        self.model = LanguageModel(config.model_config())
        if not self.model.embedding.weight.is_meta:
            for module in self.modules():  # `post_init` would initialise every module without this mark again
                setattr(module, "_is_hf_initialized", True)  # noqa: B010 (no attribute of nn.Module)
        self.post_init()

    @classmethod
    def of(cls, model: LanguageModel) -> HalflifeForCausalLM:
        """Wrap `model`; the wrapper shares its parameters."""
        with torch.device("meta"):
            wrapped = cls(HalflifeConfig(model=model.config, dtype=model.embedding.weight.dtype))
        wrapped.model, wrapped.training = model, model.training
        return wrapped

    @classmethod
    def from_halflife(cls, folder: str | Path, device: torch.device | str = "cpu") -> HalflifeForCausalLM:
        """Load the model that `halflife.models.checkpoint.save` wrote into a folder, in evaluation mode."""
        return cls.of(checkpoint.load(folder, device)).eval()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise the parameters that the checkpoint did not contain, each by its module's law."""
        loaded = [x for x in module.parameters() if getattr(x, "_is_hf_initialized", False)]
        if len(loaded) == len(list(module.parameters())):
            return
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        elif not isinstance(module, LanguageModel) and callable(reset := getattr(module, "reset_parameters", None)):
            values = [x.clone() for x in loaded]  # `reset_parameters` also draws the loaded ones
            reset()
            for x, value in zip(loaded, values, strict=True):
                x.copy_(value)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.model.embedding

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.model.embedding = value

    def get_output_embeddings(self) -> nn.Embedding | nn.Linear:
        """Return the head, which is the embedding if the two are tied."""
        return self.model.embedding if self.model.head is None else self.model.head

    def set_output_embeddings(self, new_embeddings: Any) -> None:
        if self.model.head is not None:
            self.model.head = new_embeddings
        elif new_embeddings is not self.model.embedding:
            raise ValueError("the head of this model is its embedding: set that, or build it with tie_embeddings=False")

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        embedding = super().resize_token_embeddings(*args, **kwargs)
        self.model.config = self.config.model_config()
        return embedding

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Callable[..., Any] | None = None,
        every_n_layers: int = 1,
    ) -> None:
        if enable and getattr(gradient_checkpointing_func, "keywords", {}).get("use_reentrant"):
            raise ValueError(
                "gradient checkpointing needs use_reentrant=False: the reentrant kind loses the gradients of tensors "
                "that one layer passes to another"
            )
        self.gradient_checkpointing = enable
        self._gradient_checkpointing_func = gradient_checkpointing_func or activations.checkpoint
        self._every_n_layers = every_n_layers

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        past_key_values: HalflifeCache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        cu_seqlens: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        shift_labels: Tensor | None = None,
    ) -> CausalLMOutputWithPast:
        """Return the logits, and the loss if labels are given.

        In training mode with labels, `logits` is None if the batch has more than `halflife.models.loss.LOGITS` of them
        (64 MiB of float32). The loss is then computed without all logits at once.

        Args:
            input_ids: token ids `[B, T]`.
            attention_mask: `[B, T]`, or `[B, seen + T]` if earlier tokens were read; 0 at padding, which has no effect.
            inputs_embeds: embeddings `[B, T, D]` instead of input_ids.
            labels: the ids of the input, `[B, T]`, which this method shifts. −100 is ignored; use it for the first
                token of each packed sequence. The loss is the mean over the others, or their sum over
                `num_items_in_batch`.
            past_key_values: cache that the previous call returned. It is not modified.
            use_cache: whether to return the state. By default `config.use_cache`, but False in training mode.
            logits_to_keep: number of last positions whose logits are returned (0 means all), or their indices.
            output_hidden_states: whether to return the input of each block and the output of the last norm, which are
                layers + 1 tensors `[B, T, D]`.
            output_attentions: must be false, because a recurrence has no attention weights.
            cu_seqlens: boundaries `[N + 1]` of N sequences packed along T (then B = 1).
            num_items_in_batch: divisor of the loss, see labels.
            shift_labels: labels that are shifted already.

        Raises:
            ValueError: the inputs do not fit together.
        """
        if output_attentions:
            raise ValueError("output_attentions: a recurrence has no attention weights")
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        if tokens is None or (input_ids is not None and inputs_embeds is not None):
            raise ValueError("give either input_ids or inputs_embeds")
        trace: list[Tensor] | None = [] if self._option(output_hidden_states, "output_hidden_states") else None
        hidden, state = self._hidden(tokens, past_key_values, attention_mask, cu_seqlens, trace)
        positions = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        scored = labels is not None or shift_labels is not None
        if scored and positions == slice(0, None) and self._leaves_out_logits(hidden):
            logits, loss = None, self._large_loss(hidden, labels, shift_labels, num_items_in_batch)
        else:
            logits, loss = self._head(hidden[:, positions]), None
        if logits is not None and scored:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size,
                num_items_in_batch=num_items_in_batch, shift_labels=shift_labels,
            )  # fmt: skip
        cache = None
        if self._option(use_cache, "use_cache") and not (use_cache is None and self.training):
            seen = 0 if past_key_values is None else past_key_values.seen
            cache = HalflifeCache(state, seen + tokens.shape[1] if cu_seqlens is None else None)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=cache,  # pyright: ignore[reportArgumentType]
            hidden_states=None if trace is None else tuple(trace),
        )  # fmt: skip

    def _option(self, given: bool | None, name: str) -> bool:
        return bool(getattr(self.config, name) if given is None else given)

    def _hidden(
        self,
        tokens: Tensor,
        past: HalflifeCache | None,
        attention_mask: Tensor | None,
        cu_seqlens: Tensor | None,
        trace: list[Tensor] | None,
    ) -> tuple[Tensor, ModelState]:
        """Return the hidden states `[B, T, D]` and the new state; append the inputs of the blocks to `trace`."""
        shape, index = tokens.shape[:2], None
        if attention_mask is not None:
            rows, length = shape
            seen = 0 if past is None else past.seen
            if attention_mask.shape not in ((rows, length), (rows, seen + length)):
                raise ValueError(
                    f"attention_mask must be [B, T] = {(rows, length)} or [B, seen + T] = {(rows, seen + length)}; "
                    f"got {tuple(attention_mask.shape)}"
                )
            mask = attention_mask[:, attention_mask.shape[1] - length :]
            if not mask.all():
                if cu_seqlens is not None:
                    raise ValueError("give cu_seqlens (packed) or attention_mask (padded), not both")
                tokens, cu_seqlens, index = layers.unpad(tokens, mask)

        def padded(x: Tensor) -> Tensor:
            return x if index is None else layers.repad(x, index, *shape)

        recomputed = self._recomputed()

        def call(block: nn.Module, x: Tensor, *inputs: Any, **shared: Any) -> tuple[Tensor, State]:
            if trace is not None:
                trace.append(padded(x))
            if id(block) in recomputed:
                return self._gradient_checkpointing_func(block, x, *inputs, **shared)
            return block(x, *inputs, **shared)

        hidden, state = self.model.hidden(tokens, past.state if past is not None else None, cu_seqlens, call=call)
        if trace is not None:
            trace.append(padded(hidden))
        return padded(hidden), state

    def _recomputed(self) -> set[int]:
        """Return the ids of the blocks whose activations the backward pass computes again."""
        active = self.gradient_checkpointing and self.training
        return {id(block) for block in self.model.blocks[:: self._every_n_layers]} if active else set()

    def _leaves_out_logits(self, hidden: Tensor) -> bool:
        """Whether the batch has too many logits to hold in training. A loss function of the user's needs them all."""
        many = hidden.shape[:2].numel() * self.config.vocab_size > large.LOGITS
        return many and self.training and self.loss_function is ForCausalLMLoss

    def _large_loss(
        self, hidden: Tensor, labels: Tensor | None, shift_labels: Tensor | None, items: Tensor | int | None
    ) -> Tensor:
        """Return what `ForCausalLMLoss` returns."""
        if shift_labels is None:
            assert labels is not None
            shift_labels = nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
        weight = self.get_output_embeddings().weight
        hidden, target = hidden.to(weight.device).flatten(0, 1), shift_labels.to(weight.device).flatten()
        scored = target != IGNORED
        chosen = hidden[scored]
        if items is not None and not len(chosen):
            return chosen.sum()  # a micro-batch without labels adds 0 to the sum over all
        loss = large.mean_loss(chosen, weight, target[scored])
        return loss if items is None else loss * (scored.sum() / items)

    def _head(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden.to(self.get_output_embeddings().weight.device))

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # the first forward pass makes the cache

    def _expand_inputs_for_generation(
        self, expand_size: int = 1, is_encoder_decoder: bool = False, input_ids: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor | None, dict[str, Any]]:
        past = kwargs.get("past_key_values")
        if past is not None and expand_size > 1 and input_ids is not None and past.batch_size == len(input_ids):
            past = kwargs["past_key_values"] = past.copy()
            past.batch_repeat_interleave(expand_size)
        expand = super()._expand_inputs_for_generation  # pyright: ignore[reportAttributeAccessIssue]
        return expand(expand_size=expand_size, is_encoder_decoder=is_encoder_decoder, input_ids=input_ids, **kwargs)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        if next_sequence_length is not None and next_sequence_length < 1:
            raise ValueError(
                f"the state has read {kwargs['past_key_values'].seen} tokens, and the input has {input_ids.shape[1]}: "
                "give the whole sequence, or only new tokens and an attention_mask that also covers the earlier ones"
            )
        mask = kwargs.get("attention_mask")
        if kwargs.get("past_key_values") is None and mask is not None and not mask[:, -1:].all():
            raise ValueError(
                "the rows are padded on the right, where generate continues them; pad on the left "
                "(tokenizer.padding_side = 'left')"
            )
        prepare = super().prepare_inputs_for_generation  # pyright: ignore[reportAttributeAccessIssue]
        return prepare(input_ids, next_sequence_length, inputs_embeds=inputs_embeds, **kwargs)
