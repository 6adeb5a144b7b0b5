"""A `LanguageModel` as a causal language model of transformers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from halflife.hf.block import as_kind
from halflife.hf.cache import CACHE
from halflife.hf.config import HalflifeConfig
from halflife.hf.generation import HalflifeGenerationMixin
from halflife.hf.model import HalflifeModel, HalflifePreTrainedModel
from halflife.models import LanguageModel, checkpoint
from halflife.models import loss as large
from halflife.models.lm import Block, on_meta
from halflife.tasks import IGNORED


class HalflifeForCausalLM(HalflifePreTrainedModel, HalflifeGenerationMixin):
    """A `HalflifeModel` (`.model`) with a head (`.lm_head`).

    Args:
        network: a `LanguageModel` whose parts it takes; None builds one.
    """

    accepts_loss_kwargs = True  # the loss uses num_items_in_batch
    _tied_weights_keys = {"lm_head.weight": "model.embedding.weight"}  # noqa: RUF012 (as the base class declares it)

    def __init__(self, config: HalflifeConfig, network: LanguageModel | None = None) -> None:
        super().__init__(config)
        network = LanguageModel(config.model_config()) if network is None else network
        self.model = HalflifeModel(config, network)
        if network.head is None:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, device="meta")
            self.lm_head.weight = self.model.embedding.weight
        else:
            self.lm_head = network.head
        setattr(self.lm_head, "_is_hf_initialized", not self.lm_head.weight.is_meta)  # noqa: B010
        self.post_init()

    def mark_tied_weights_as_initialized(self, loading_info: Any) -> None:
        """As transformers, but a tied weight that the checkpoint has under neither name stays missing, and is drawn.

        Embedding and head share one parameter from the start, so a mark on the head's would be one on the embedding's.
        """
        missing = {*loading_info.missing_keys}
        super().mark_tied_weights_as_initialized(loading_info)
        for head, embedding in self.all_tied_weights_keys.items():
            if head in missing and embedding in missing:
                loading_info.missing_keys.add(embedding)
                self.get_parameter(embedding)._is_hf_initialized = False  # pyright: ignore[reportAttributeAccessIssue]

    @classmethod
    def of(cls, model: LanguageModel) -> HalflifeForCausalLM:
        """Wrap `model`; the wrapper shares its parameters."""
        wrapped = cls(HalflifeConfig(model=model.config, dtype=model.embedding.weight.dtype), model)
        return wrapped.train(model.training)

    @classmethod
    def from_halflife(cls, folder: str | Path, device: torch.device | str = "cpu") -> HalflifeForCausalLM:
        """Load the model in a folder of `halflife.models.checkpoint.save`, in evaluation mode."""
        model = checkpoint.load(folder, device)
        return cls(HalflifeConfig.from_pretrained(folder), model).eval()

    def to_halflife(self) -> LanguageModel:
        """Return a `LanguageModel` that shares the parameters, for the other tools of this library."""
        # An adapter around a tied head, or another head in its place, computes other logits than the embedding.
        tied = type(self.lm_head) is nn.Linear and self.lm_head.weight is self.model.embedding.weight
        model = on_meta(dataclasses.replace(self.config.model_config(), tie_embeddings=tied))
        for name in ("embedding", "embedding_norm", "tpe", "norm"):
            setattr(model, name, getattr(self.model, name))
        model.blocks = nn.ModuleList(as_kind(block, Block) for block in self.model.blocks)  # pyright: ignore
        model.head = None if tied else self.lm_head
        return model.train(self.training)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return the logits, and the loss if labels are given.

        With `config.chunked_loss`, a training step computes the loss without all logits at once, and `logits` is None.

        Args:
            input_ids, attention_mask, position_ids, cache, past_key_values, inputs_embeds, use_cache: as in
                `HalflifeModel`.
            labels: the ids of the input, `[B, T]`, which this method shifts. −100 is ignored; use it for the first
                token of each packed sequence. The loss is the mean over the others, or their sum over
                `num_items_in_batch`.
            logits_to_keep: number of last positions whose logits are returned (0 means all), or their indices.
            num_items_in_batch: divisor of the loss, see labels.
            **kwargs: `shift_labels`, labels that are shifted already; others as in `HalflifeModel`.

        Raises:
            TypeError: an unknown keyword argument, or a cache of another kind.
            ValueError: the inputs do not fit together.
        """
        shifted = kwargs.pop("shift_labels", None)
        out = self.model(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids,
            past_key_values=past_key_values, cache=cache, inputs_embeds=inputs_embeds, use_cache=use_cache, **kwargs,
        )  # fmt: skip
        hidden, logits, loss = out.last_hidden_state, None, None
        scored = labels is not None or shifted is not None
        if scored and self.training and self.config.chunked_loss:
            loss = self._chunked_loss(hidden, labels, shifted, num_items_in_batch)
        else:
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(hidden[:, kept])
            if scored:
                loss = self.loss_function(
                    logits=logits, labels=labels, vocab_size=self.config.vocab_size,
                    num_items_in_batch=num_items_in_batch, shift_labels=shifted,
                )  # fmt: skip
        return CausalLMOutputWithPast(
            loss=loss,  # pyright: ignore[reportArgumentType]
            logits=logits,  # pyright: ignore[reportArgumentType]
            hidden_states=out.hidden_states, **{CACHE: out.get(CACHE)},
        )  # fmt: skip

    def _chunked_loss(
        self, hidden: Tensor, labels: Tensor | None, shifted: Tensor | None, items: Tensor | int | None
    ) -> Tensor:
        if self.loss_function is not ForCausalLMLoss:
            raise ValueError("config.chunked_loss is for the loss of transformers, and this model has another one")
        if shifted is None:
            assert labels is not None
            shifted = nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
        target = shifted.to(hidden.device).flatten()
        loss, scored = large.mean_loss(hidden.flatten(0, 1), self.lm_head, target), (target != IGNORED).sum()
        items = items.to(scored.device) if isinstance(items, Tensor) else scored if items is None else items
        return loss * (scored / items)  # NaN for the mean of none, as there
