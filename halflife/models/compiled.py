"""The blocks of a model by `torch.compile`, for the time of a training.

A block becomes a function of tensors: the packing and what layers share are made anew inside, so that a graph depends
on nothing outside it. Blocks of one kind share their graphs. The order is the checkpoint, inside the graph, then
`torch.compile`, and then the hooks of FSDP2 around both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from halflife.layers import Shared, SharedTensors, State
from halflife.models.lm import LanguageModel
from halflife.packing import Packing

BACKEND = "inductor"
# Kinds of blocks × kinds of batches. By default torch stops at 8 graphs, and runs the rest uncompiled without an error.
MOST_GRAPHS = 64


@contextmanager
def compiled_blocks(model: LanguageModel, recompute: Sequence[str] = ()) -> Iterator[Callable[[], int]]:
    """Inside this block, run the blocks of `model` compiled wherever gradients are recorded.

    It replaces `forward` of the blocks, and afterwards restores it. FSDP2 shards the model inside.

    Args:
        recompute: what the backward pass computes again: "blocks", or some of `backends.dispatch.KINDS`.

    Yields:
        A function that returns how many graphs were compiled so far. A batch of another kind compiles again: the first
        one, the first of another length (whose graphs then hold for every length, but in Mamba-3 and log-linear and
        forgetting attention), packed documents, and a single one.
    """
    from torch._dynamo import config
    from torch._dynamo.utils import counters

    before = counters["stats"]["unique_graphs"]
    # GateRank counts its resets, which the second computation of a checkpoint must not repeat.
    settings = {"recompile_limit": MOST_GRAPHS, "skip_fwd_side_effects_in_bwd_under_checkpoint": True}
    for block in model.blocks:
        block.forward = _compiled(block, recompute)
    try:
        with config.patch(settings):
            yield lambda: counters["stats"]["unique_graphs"] - before
    finally:
        for block in model.blocks:
            del block.forward


def _compiled(block: nn.Module, recompute: Sequence[str]) -> Callable[..., tuple[Tensor, State]]:
    eager: Any = block.forward
    reads_longest = any(getattr(module, "reads_longest", False) for module in block.modules())

    def run(
        x: Tensor, state: State | None, cu_seqlens: Tensor | None, longest: int | None, given: Mapping[str, Tensor]
    ) -> tuple[Tensor, State, dict[str, Tensor]]:
        shared = SharedTensors(given)
        y, new = eager(x, state, Packing(x.shape[0], x.shape[1], cu_seqlens, longest), shared)
        return y, new, {name: shared[name] for name in shared if name not in given}

    options: Any = {"use_reentrant": False}
    if recompute and "blocks" not in recompute:
        from halflife.ops.backends.recompute import policy

        options["context_fn"] = partial(create_selective_checkpoint_contexts, partial(policy, recompute))
    # Loops over powers of two of the length, or over pieces, have graphs of one length; inductor fails at others.
    dynamic = False if any(getattr(part, "loops_over_length", False) for part in block.modules()) else None
    whole = partial(checkpoint, run, **options) if recompute else run
    fast: Any = torch.compile(whole, backend=BACKEND, dynamic=dynamic)

    def forward(x: Tensor, state: State | None, packing: Packing, shared: Shared) -> tuple[Tensor, State]:
        if not torch.is_grad_enabled():
            return eager(x, state, packing, shared)
        longest = packing.longest if reads_longest else None
        y, new, added = fast(x, state, packing.cu_seqlens, longest, {name: shared[name] for name in shared})
        for name, value in added.items():
            shared[name] = value
        return y, new

    return forward
