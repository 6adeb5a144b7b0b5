"""How transformers reads the checkpoints of `halflife.models.checkpoint` and of earlier versions of this package."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming


class AddAxis(ConversionOps):
    """Number without an axis → tensor `[1]`; a tensor `[1]` stays as it is."""

    def convert(self, input_dict: dict[str, list[Tensor]], *args: Any, **kwargs: Any) -> dict[str, list[Tensor]]:
        return {name: [x.reshape(1) for x in tensors] for name, tensors in input_dict.items()}

    @property
    def reverse_op(self) -> ConversionOps:
        return self


def register() -> None:
    """Tell transformers the former names of the head, and that θ of PoST had no axis."""
    theta = WeightConverter("decay.theta", "decay.theta", [AddAxis()])
    heads = [WeightRenaming(r"^model\.head\.", "lm_head."), WeightRenaming(r"^head\.", "lm_head.")]
    register_checkpoint_conversion_mapping("halflife", [theta], overwrite=True)
    register_checkpoint_conversion_mapping("HalflifeForCausalLM", [*heads, theta], overwrite=True)
