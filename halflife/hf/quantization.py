"""What quantisation by transformers (bitsandbytes, torchao) leaves in full precision, and what it needs on a CPU."""

from __future__ import annotations

from typing import Any

from torch import nn

# Patterns of the names of linear maps that are not quantised. Each sets how long memory lasts or what enters it, once a
# head or through a low rank. They are 0.01 to 4 % of the weights of the blocks (8 % under shared keys), and errors in
# them weigh more than in others: with fp4 in four layers of width 256, at 1,000 tokens, they alone change the logits of
# MesaNet and Gated DeltaNet by 9 and 11 % with 0.2 % of the weights (all others: 75 and 81 %).
# Output gates and the gates of Gated DeltaNet-2 have the size of other maps, so they are quantised. In Mamba-2 and
# Mamba-3 the step size is some rows of `in_proj`, which has a scale for each row or part of it.
KEPT = [
    r".*\.decay_proj",  # the activation of the decay
    r".*\.step_proj",  # Longhorn's step size
    r".*\.beta_proj",  # the strength of what is written
    r".*\.gate_rank\.proj",  # the resets of the slow state
    r".*\.log_linear\.proj",  # the weights of the levels
]


def mind_cpu_kernels(model: nn.Module) -> None:
    """Let the 4-bit maps of bitsandbytes that its kernel for AVX-512 refuses by an assertion run by its other code.

    The kernel takes multiples of 32 outputs and even numbers of inputs; Mamba-2's `in_proj` has H outputs more.
    """
    for module in model.modules():
        given: Any = module
        if getattr(module, "support_avx512bf16_for_cpu", False) and (given.out_features % 32 or given.in_features % 2):
            given.support_avx512bf16_for_cpu = False
