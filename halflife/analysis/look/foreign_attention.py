"""The softmax attention of models of transformers, from the queries and keys that reach its function."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from halflife.analysis.foreign.model import ForeignModel
from halflife.analysis.look.readings import AttentionReading

FUNCTION = "sdpa"  # the name of the function in transformers, which its models take by default
AGREEMENT = 0.02  # of outputs, relative to the largest; rounding of bfloat16 stays below


class Window(NamedTuple):
    """One call: queries `[1, H, W, K]`, keys and values `[1, G, S, …]`, outputs `[1, W, H, V]`, scale and window."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    scale: float
    sliding: int | None


@contextmanager
def attentions(model: ForeignModel) -> Iterator[dict[int, list[Window]]]:
    """Give the calls of softmax attention by layer, which are complete when the context ends."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    known = getattr(ALL_ATTENTION_FUNCTIONS, "_global_mapping", {})
    found: dict[int, list[Window]] = {}
    attend = known.get(FUNCTION)

    def record(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
        assert attend is not None
        result = attend(module, q, k, v, mask, **options)
        scale = options.get("scaling") or q.shape[-1] ** -0.5
        sliding = getattr(module, "sliding_window", None)
        found.setdefault(int(module.layer_idx), []).append(Window(q, k, v, result[0], scale, sliding))
        return result

    if attend is None:
        yield found
        return
    with patch.dict(known, {FUNCTION: record}):
        yield found


def attention_reading(windows: list[Window], tokens: int) -> AttentionReading | str:
    """The reading of a layer from its calls, or the reason why it is not shown."""
    if not windows:
        return f"its softmax attention is shared with other layers, or does not run by {FUNCTION}"
    q, o = torch.cat([part.q for part in windows], 2).float(), torch.cat([part.o for part in windows], 1).float()
    *_, last = windows
    if last.k.shape[2] != tokens or q.shape[2] != tokens:
        return "its cache does not keep all tokens"
    heads, groups, window = q.shape[1], last.k.shape[1], last.sliding
    mixer = SimpleNamespace(num_heads=heads, num_kv_heads=groups, window=window)
    cache = {name: x.transpose(1, 2) for name, x in (("keys", last.k), ("values", last.v))}
    visible = None
    if window is not None:
        age = torch.arange(tokens).unsqueeze(-1) - torch.arange(tokens)
        visible = ((age >= 0) & (age < window)).to(q.device)
    q = q.transpose(1, 2) * (last.scale * q.shape[-1] ** 0.5)
    reading = AttentionReading(mixer, (q, cache, None, visible), tokens)
    for head in (0, heads - 1):
        read = reading.of([head]).weights()[0] @ last.v[0, head * groups // heads].float()
        if (read - o[0, :, head]).abs().max() > AGREEMENT * o.abs().max():
            return "its softmax attention has more than queries, keys and a window"
    return reading
