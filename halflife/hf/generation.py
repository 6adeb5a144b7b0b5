"""`generate` of transformers on a model with a state in the place of keys and values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin
from transformers.generation.configuration_utils import GenerationMode

from halflife.hf.cache import CACHE, HalflifeCache
from halflife.layers.attention import Attention
from halflife.layers.memory.log_linear import LogLinear
from halflife.layers.ska import SKA
from halflife.models.states import changed

# A state is small and does not grow, so "static" differs from "dynamic" only in that `generate` may compile the model.
CACHES = (None, "dynamic", "static")
GROWING = (Attention, LogLinear)  # layers whose state grows, so that no compiled step fits all lengths

_Mixin: Any = GenerationMixin  # its methods are typed for a `self` that is a model as well


class HalflifeGenerationMixin(_Mixin):
    """The steps of `generate` around forward passes. Transformers looks for "GenerationMixin" in the names of bases."""

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # `_prepare_cache_for_generation` makes another one

    def init_continuous_batching(self, *_: Any, **__: Any) -> Any:
        raise ValueError(
            "continuous batching of transformers stores keys and values in pages, and a recurrent model has none; "
            "`halflife serve` batches requests continuously"
        )

    def _validate_generation_mode(
        self, generation_mode: Any, generation_config: GenerationConfig, generation_mode_kwargs: dict[str, Any]
    ) -> None:
        for name in ("assistant_early_exit", "use_mtp", "speculation_type"):
            if getattr(generation_config, name, None):
                raise ValueError(f"{name}: these models have no heads that draft tokens; give an assistant_model")
        if generation_config.cache_implementation not in CACHES:
            raise ValueError(
                f"cache_implementation={generation_config.cache_implementation!r} is for keys and values that grow; a "
                f"state of constant size takes {', '.join(map(repr, CACHES))}"
            )
        if generation_mode == GenerationMode.ASSISTED_GENERATION:
            for module in self.modules():
                if isinstance(module, SKA) and module.decode_refresh != module.options["refresh"]:
                    raise ValueError(
                        "this model decodes in another way than it reads several tokens (decode_refresh="
                        f"{module.decode_refresh!r}), so assisted decoding would write another text"
                    )
        super()._validate_generation_mode(generation_mode, generation_config, generation_mode_kwargs)

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        past, kind = model_kwargs.get(CACHE), generation_config.cache_implementation
        HalflifeCache.check(past)
        if past is None and generation_config.use_cache is not False:
            static = kind == "static" and not any(isinstance(module, GROWING) for module in self.modules())
            model_kwargs[CACHE] = past = HalflifeCache(static=static)
            if generation_config.is_assistant:
                past.activate_past_recording()
            return
        if past is not None:  # the caller's object stays as it is
            model_kwargs[CACHE] = past.copy()
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)

    def _expand_inputs_for_generation(
        self, expand_size: int = 1, is_encoder_decoder: bool = False, input_ids: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor | None, dict[str, Any]]:
        past = kwargs.get(CACHE)
        if isinstance(past, HalflifeCache) and input_ids is not None and past.batch_size == len(input_ids):
            past = kwargs[CACHE] = past.copy()
            past.batch_repeat_interleave(expand_size)
        return super()._expand_inputs_for_generation(expand_size, is_encoder_decoder, input_ids, **kwargs)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        past = kwargs.get(CACHE)
        if next_sequence_length is None and past is not None and past.prompt is not None:
            next_sequence_length = input_ids.shape[1] - past.prompt
        _check_new(next_sequence_length, past, input_ids)
        inputs = super().prepare_inputs_for_generation(
            input_ids, next_sequence_length, inputs_embeds=inputs_embeds, **kwargs
        )
        mask, tokens = inputs.get("attention_mask"), inputs.get("inputs_embeds", inputs.get("input_ids"))
        if mask is not None:
            earlier = mask.shape[1] - tokens.shape[1]
            if past is None or earlier in (0, past.seen) or past.recording:  # else the model says that it does not fit
                mask = inputs["attention_mask"] = mask[:, earlier:]
                if mask.all():  # a compiled graph cannot ask that
                    del inputs["attention_mask"]
        return inputs

    def _update_model_kwargs_for_generation(self, outputs: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        past = outputs.get(CACHE)
        if past is not None and past.is_compileable:
            # CUDA graphs write their next results into the same memory, and other strides would be compiled again.
            past.state = changed(past.state, lambda x: x.clone(memory_format=torch.contiguous_format))
        return super()._update_model_kwargs_for_generation(outputs, *args, **kwargs)

    def _prefill(
        self, input_ids: Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args: Any,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        input_ids, model_kwargs, order = _padded_left(input_ids, model_kwargs)
        past = model_kwargs.get(CACHE)
        if generation_config.is_assistant and past is not None and not past.seen:  # so that `crop` never rereads it
            self._read(input_ids[:, :-1], input_ids.shape[1] - 1, generation_config, model_kwargs)
        outputs = super()._prefill(input_ids, generation_config, model_kwargs, *args, **kwargs)
        if order is not None and outputs.hidden_states is not None:
            back = order[:, -outputs.hidden_states[0].shape[1] :].argsort(1).unsqueeze(2)
            outputs.hidden_states = tuple(x.gather(1, back.expand_as(x)) for x in outputs.hidden_states)
        return outputs

    def _assisted_decoding(
        self, input_ids: Tensor, *, generation_config: GenerationConfig, inputs_tensor: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Verify all drafted tokens in one pass. If some are wrong, the next pass begins with the accepted ones."""
        mask = kwargs.get("attention_mask")
        if mask is not None and not mask[:, -1:].all():
            raise ValueError(
                "the row is padded on the right, where assisted decoding continues it; leave the padding out"
            )
        past = kwargs.get(CACHE)
        if past is not None:
            past.activate_past_recording()
            if "inputs_embeds" not in kwargs:
                if kwargs.get("attention_mask") is None:  # or the assistant takes drafted tokens for padding
                    columns = generation_config._mask_length or input_ids.shape[1]
                    kwargs["attention_mask"] = input_ids.new_ones((1, columns))
                new = _new_columns(input_ids, generation_config, kwargs)
                if not generation_config.output_hidden_states:  # else they would be missing
                    self._read(input_ids[:, :-1], new - 1, generation_config, kwargs)
                    new = 1
                kwargs[CACHE].prompt = input_ids.shape[1] - new
                kwargs["attention_mask"] = kwargs["attention_mask"][:, -input_ids.shape[1] :]
        out = super()._assisted_decoding(
            input_ids, generation_config=generation_config, inputs_tensor=inputs_tensor, **kwargs
        )
        if isinstance(out, Tensor):
            return out
        out[CACHE] = HalflifeCache(self.model.state_of(out[CACHE]), out[CACHE].seen)
        return out

    def _read(
        self, input_ids: Tensor, count: int, generation_config: GenerationConfig, model_kwargs: dict[str, Any]
    ) -> None:
        """Read the last `count` of the tokens, which the mask has one column more than."""
        past, size = model_kwargs[CACHE], generation_config.prefill_chunk_size or count
        given = {name: model_kwargs.get(name) for name in ("attention_mask", "position_ids")}
        for first in range(0, count, max(size, 1)):
            part = slice(first - count, min(first + size - count, 0) or None)
            others = {name: None if x is None else x[:, :-1][:, part] for name, x in given.items()}
            past = self.model(
                input_ids=input_ids[:, part], **others, use_cache=True, return_dict=True, **{CACHE: past}
            ).get(CACHE)
        model_kwargs[CACHE] = past


def _new_columns(input_ids: Tensor, generation_config: GenerationConfig, model_kwargs: dict[str, Any]) -> int:
    """Return the number of ids that the state has not read; the ids may be all or only the new ones."""
    past, mask, length = model_kwargs[CACHE], model_kwargs.get("attention_mask"), input_ids.shape[1]
    columns = getattr(generation_config, "_mask_length", length) if mask is None else mask.shape[1]
    if columns not in (length, past.seen + length):
        raise ValueError(
            f"attention_mask has {columns} columns; it must cover the {length} ids, or the {past.seen} tokens that the "
            "state has read and these"
        )
    new = length - past.seen if columns == length else length
    _check_new(new, past, input_ids)
    return new


def _check_new(count: int | None, past: HalflifeCache | None, input_ids: Tensor) -> None:
    if count is not None and count < 1:
        seen = 0 if past is None else past.seen
        raise ValueError(
            f"the state has read {seen} tokens, and the input has {input_ids.shape[1]}: give the whole sequence, or "
            "only new tokens and an attention_mask that also covers the earlier ones"
        )


def _padded_left(input_ids: Tensor, model_kwargs: dict[str, Any]) -> tuple[Tensor, dict[str, Any], Tensor | None]:
    """The inputs with the padding of each row moved to its left, and the order of their columns, None if nothing moved.

    `generate` reads the logits of the last column.
    """
    mask = model_kwargs.get("attention_mask")
    if mask is None or mask[:, -1:].all():
        return input_ids, model_kwargs, None
    past, embeds, width = model_kwargs.get(CACHE), model_kwargs.get("inputs_embeds"), mask.shape[1]
    seen = 0 if past is None else past.seen
    given = input_ids.shape[1] if embeds is None else embeds.shape[1]
    fixed = seen if width == given else width - given  # columns of the mask that were read before
    if not mask[:, fixed:].any(1).all():
        raise ValueError("a row has no token to continue: its attention_mask is 0 everywhere")
    order = mask[:, fixed:].bool().int().argsort(dim=1, stable=True) + fixed
    order = torch.cat([torch.arange(fixed, device=order.device).expand(len(order), -1), order], 1)

    def moved(x: Tensor) -> Tensor:
        """The tensor `[B, L, …]` whose last columns are those of the mask."""
        index = order[:, width - x.shape[1] :] - (width - x.shape[1])
        index = index.view(*index.shape, *[1] * (x.ndim - 2))
        return x.expand(len(order), *x.shape[1:]).gather(1, index.expand(-1, -1, *x.shape[2:]))

    names = ("attention_mask", "position_ids", "inputs_embeds")
    new = {name: moved(x) for name in names if (x := model_kwargs.get(name)) is not None}
    if "position_ids" in new:  # later tokens count on from the last column
        positions, last = model_kwargs["position_ids"], new["position_ids"][:, -1:]
        model_kwargs["position_ids"] = positions.where(mask[:, -positions.shape[1] :].bool(), last)
    return moved(input_ids), {**model_kwargs, **new}, order
