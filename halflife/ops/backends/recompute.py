"""Results that are not kept for the backward pass, but computed again in it from the inputs of the op that gave them.

Inside `recomputing(kinds)` every call of an op of these kinds is a region. Autograd keeps neither what the op saves nor
its results, which later ops save; it keeps the region and its inputs, which are themselves results of regions or saved
anyway. The first saved tensor that the backward pass asks for runs the op again, and all others of the region are taken
from that run. Nothing else runs twice, in contrast to `torch.utils.checkpoint`, whose selective form runs the whole
function again and keeps every result of the other ops, also those that no gradient needs.

Inside a compiled block torch's selective form chooses by the same kinds, because the compiler keeps only what is needed
(`policy`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from halflife.ops.backends import dispatch
from halflife.ops.backends.dispatch import kind_of


@contextmanager
def recomputing(kinds: Sequence[str]) -> Iterator[None]:
    """Inside this block, let the backward pass compute again what ops of these kinds, some of `KINDS`, return."""
    before, dispatch.again = dispatch.again, (again := Recomputation(kinds))
    try:
        with saved_tensors_hooks(again.pack, again.unpack):
            yield
    finally:
        dispatch.again = before
        again.results.clear()


def calling(recompute: Sequence[str]) -> Callable[..., Any] | None:
    """`call(block, …)` for `Backbone.hidden`: a checkpoint for "blocks", else `recomputing`, or None for nothing."""

    def call(block: Callable[..., Any], *args: Any, **options: Any) -> Any:
        with recomputing(recompute):
            return block(*args, **options)

    return partial(checkpoint, use_reentrant=False) if "blocks" in recompute else call if recompute else None


def policy(kinds: Sequence[str], _: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Whether torch's selective checkpoint is to compute the results of an op again."""
    space, _, name = str(op.name()).partition("::") if hasattr(op, "name") else ("", "", "")
    if space == "halflife" and kind_of(name.partition(".")[0].removeprefix("triton_")) in kinds:
        return CheckpointPolicy.MUST_RECOMPUTE
    return CheckpointPolicy.PREFER_SAVE


class Recomputation:
    """The regions of one block of a model, and the results by which they are found."""

    def __init__(self, kinds: Sequence[str]) -> None:
        self.kinds = frozenset(kinds)
        # Storage → region, place among its results, result. Results live until the block ends, so no address is used
        # twice.
        self.results: dict[int, tuple[_Region, int, Tensor, int]] = {}

    def run(self, function: Callable[..., Any], tensors: Sequence[Any]) -> Any:
        """`function(*tensors)` as a region."""
        region = _Region(self, function, tensors)
        dispatch.again = None  # ops that this one calls belong to its region
        try:
            with saved_tensors_hooks(region.keep, region.give):
                out = function(*tensors)
        finally:
            dispatch.again = self
        for place, x in enumerate(tree_leaves(out)):
            if isinstance(x, Tensor) and x.requires_grad and (key := _storage(x)) not in region.given:
                self.results[key] = region, place, x.detach(), x._version
        return out

    def pack(self, x: Tensor) -> Any:
        """What stands for a saved tensor: itself, or where it is found among the results of a region."""
        region, place, result, version = self.results.get(_storage(x), (None, 0, x, 0))
        if region is None or result.dtype != x.dtype or result._version != version:
            return x
        region.total += 1
        return region, place, (x.shape, x.stride(), x.storage_offset())

    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        region, place, view = packed
        return region.take(1, place).as_strided(*view)


class _Region:
    """One call of an op, with the storages `given` to it, and the `total` of tensors that autograd saves of it."""

    def __init__(self, outer: Recomputation, function: Callable[..., Any], tensors: Sequence[Any]) -> None:
        self.outer, self.function = outer, function
        given = [x for x in tensors if isinstance(x, Tensor)]
        self.given = {_storage(x) for x in given}
        self.total = self.saved = self.taken = 0
        self._found: tuple[list[Tensor], list[Any]] | None = None
        self._tensors = [
            (outer.pack(x.detach()), x.requires_grad, x._version) if isinstance(x, Tensor) else x for x in tensors
        ]
        kind = given[0].device.type
        self._autocast: Any = nullcontext
        if kind != "meta":  # a backward pass may run under another autocast
            dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
            self._autocast = partial(torch.autocast, kind, dtype, enabled, cache_enabled=False)

    def keep(self, x: Tensor) -> Any:
        self.saved += 1
        if _storage(x) in self.given:
            return self.outer.pack(x)
        self.total += 1
        return self.saved - 1

    def give(self, packed: Any) -> Tensor:
        return self.take(0, packed) if isinstance(packed, int) else self.outer.unpack(packed)

    def take(self, which: int, place: int) -> Tensor:
        """A tensor that the op saves (`which` 0) or returns (1). After the last one the second run is forgotten."""
        found = self._found = self._found or self._again()
        self.taken += 1
        if self.taken == self.total:
            self._found, self.taken = None, 0
        return found[which][place]

    def _again(self) -> tuple[list[Tensor], list[Any]]:
        saved: list[Tensor] = []

        def keep(x: Tensor) -> Tensor:
            saved.append(x.detach())
            return x

        tensors = [self._argument(*x) if isinstance(x, tuple) else x for x in self._tensors]
        with torch.enable_grad(), self._autocast(), saved_tensors_hooks(keep, lambda x: x):
            out = self.function(*tensors)
        if len(saved) != self.saved:
            raise RuntimeError(f"an op saved {self.saved} tensors, and {len(saved)} when it was computed again")
        return saved, [x.detach() if isinstance(x, Tensor) else x for x in tree_leaves(out)]

    def _argument(self, packed: Any, differentiated: Any, version: Any) -> Tensor:
        x = self.outer.unpack(packed)
        if isinstance(packed, Tensor) and x._version != version:
            raise RuntimeError("an input of an op was changed in place before its results were computed again")
        return x.detach().requires_grad_(differentiated)


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata
