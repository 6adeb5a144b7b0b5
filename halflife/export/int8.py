"""Int8 weights for decoding on a CPU.

The weight of a linear map is stored as one int8 number an entry and one scale an output, `w_ij ≈ s_i q_ij` with
`s_i = max_j |w_ij| / 127`. torch's kernel `_weight_int8pack_mm` multiplies them with activations in bfloat16, so a step
reads a quarter of the bytes that float32 weights have.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halflife.models.lm import LanguageModel

MULTIPLE = 16  # the kernel takes matrices whose sides are multiples of it; outputs are padded


class Int8Linear(nn.Module):
    """`x Wᵀ + b` with W, `weight [E, D]`, in int8, and b, `bias [E]` or None."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        scale = (weight.detach().float().abs().amax(-1).clamp(min=1e-12) / 127).bfloat16()
        integers = (weight.detach().float() / scale.float().unsqueeze(-1)).round().clamp(-127, 127).to(torch.int8)
        self.outputs, padding = len(weight), -len(weight) % MULTIPLE
        self.weight: Tensor
        self.scale: Tensor
        self.bias: Tensor | None
        self.register_buffer("weight", F.pad(integers, (0, 0, 0, padding)))
        self.register_buffer("scale", F.pad(scale, (0, padding)))
        self.register_buffer("bias", None if bias is None else bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        """Apply the map to `x [..., D]`."""
        rows = x.reshape(-1, x.shape[-1]).bfloat16().contiguous()
        y = torch.ops.aten._weight_int8pack_mm(rows, self.weight, self.scale.bfloat16())[:, : self.outputs].to(x.dtype)
        return (y if self.bias is None else y + self.bias).view(*x.shape[:-1], self.outputs)


def quantize(model: LanguageModel) -> int:
    """Replace the linear maps inside the blocks by int8 ones, and return their number.

    The embedding, the output head, norms, convolutions and decays stay as they are. So do maps whose number of inputs
    is no multiple of 16.

    Raises:
        ValueError: the model is not on a CPU, or it has no map that can be replaced.
    """
    if model.embedding.weight.device.type != "cpu":
        raise ValueError(f"int8 weights are for CPUs; the model is on {model.embedding.weight.device}")
    count = 0
    for block in model.blocks:
        for parent in list(block.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear) and child.in_features % MULTIPLE == 0:
                    setattr(parent, name, Int8Linear(child.weight, child.bias))
                    count += 1
    if not count:
        raise ValueError(f"{model.config.name} has no linear map whose inputs are a multiple of {MULTIPLE}")
    return count
