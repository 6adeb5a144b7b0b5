"""The page of the memory lens: one HTML file without a network, on which the text itself is the picture."""

from __future__ import annotations

import math
import zlib
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from halflife.analysis.look import HeadLens, Lens
from halflife.analysis.look.lens import Head
from halflife.analysis.readable import Progress, ignore
from halflife.report.page.embed import page

HERE = Path(__file__).parent
BUDGET = 2_800_000  # bytes of the numbers of heads; the rest of a page are its text, style and script
LISTED = (64, 32, 16, 8)  # tokens that a token reads most, of which as many are on the page as fit
STORED = 1 << 18  # shares of what is left on the page, for each head
FROM_LEFT, FROM_LISTS = 0.1, 0.8  # what zlib leaves of both, as measured
ROUNDED = np.uint32(0xFFFFF000)  # the bits of a float32 that are kept, 3 decimal digits


@dataclass(frozen=True)
class Pair:
    """A pair of a recall task: where its value stands and where it is asked for, and the answer of the model."""

    written: int
    asked: int
    value: str
    probability: float
    known: bool


def look_page(title: str, data: dict[str, Any] | None, above: str = "", script: str = "", connect: bool = False) -> str:
    """The HTML of a lens: `data` of `look_data`, or None where `script` gets it, with HTML `above`.

    A `script` follows that of the lens, and may call its function `lens(data)`. With `connect` it may ask the server
    that the page came from.
    """
    script = (HERE / "look.js").read_text(encoding="utf-8") + script
    return page("look", title, script, data, connect=connect, above=above)


def look_data(
    lens: Lens, tokens: Sequence[str], *, ids: bool = False, chosen: Sequence[Head] = (), pairs: Sequence[Pair] = (),
    budget: int = BUDGET, progress: Progress = ignore,
) -> dict[str, Any]:  # fmt: skip
    """What the page of a lens draws, as JSON, with what is written for each token in `tokens`.

    With `ids` these are numbers, which need room between them. The page must have the `chosen` heads. `budget` is in
    bytes of the numbers of heads, and `progress` is called with 1 for each head.
    """
    labels = typical_heads(lens)
    heads = list(dict.fromkeys([*chosen, *labels, *_spread(lens)]))
    count, listed = _room(len(tokens), len(heads), budget)
    cursors = max(48, STORED // max(1, len(tokens)))
    packed: dict[Head, dict[str, Any]] = {}
    recall: dict[Head, float] = {}
    for one in lens.details(heads[: max(count, len(chosen))], cursors):
        packed[one.head] = _pack(one, listed)
        shares = one.shares()
        recall[one.head] = float(np.mean([shares[pair.asked, pair.written] for pair in pairs] or [0]))
        progress(1)
    if pairs:
        best = max(recall, key=lambda head: recall[head])
        labels[best] = "reads the asked values most"
        heads = [best, *(head for head in heads if head != best)]
    shown, size = [], 0
    for head in [head for head in heads if head in packed]:
        size += len(packed[head]["blob"])
        if size <= budget or not shown:
            shown.append(head)
    index = {head: i for i, head in enumerate(lens.heads)}
    return {
        "tokens": list(tokens), "ids": ids, "cursor": pairs[-1].asked if pairs else len(tokens) - 1,
        "view": "read" if pairs else "left",
        "documents": np.cumsum([0, *lens.documents[:-1]]).tolist(), "pairs": [asdict(pair) for pair in pairs],
        "heads": [_head(head) for head in lens.heads],
        "details": [{**packed[head], "head": index[head], "label": labels.get(head, "")} for head in shown],
        "summary": _summary(lens, len(shown)),
        "absent": " ".join(f"{place} is not shown: {reason}." for place, reason in lens.refused.items()),
    }  # fmt: skip


def typical_heads(lens: Lens) -> dict[Head, str]:
    """The slowest, the median and the fastest head, with these names."""
    ranked = lens.ranked()
    found = {ranked[0]: "slowest", ranked[len(ranked) // 2]: "median", ranked[-1]: "fastest"}
    return found | {ranked[0]: "slowest"}  # of one head, too


def _spread(lens: Lens) -> list[Head]:
    """All heads, first the slowest of each layer, then the next ones."""
    seen: dict[Any, int] = {}
    order = []
    for head in lens.ranked():
        order.append((seen.setdefault(head.place, 0), head.place, head))
        seen[head.place] += 1
    return [head for *_, head in sorted(order, key=lambda item: item[:2])]


def _room(tokens: int, heads: int, budget: int) -> tuple[int, int]:
    """How many heads fit on a page, and how many tokens are listed for each token."""
    left = 2 * FROM_LEFT * max(48 * tokens, min(STORED, tokens * tokens))

    def fitting(listed: int) -> int:
        listed = min(listed, tokens)
        lists = FROM_LISTS * tokens * (3 * listed + 3 * math.ceil(listed / 2) + 12)
        return int(budget * 3 / 4 / (left + lists))  # base64 has 4 characters for 3 bytes

    listed = next((k for k in LISTED if fitting(k) >= heads), LISTED[-1])
    return max(3, min(heads, fitting(listed))), min(listed, tokens)


def _head(head: Head) -> dict[str, Any]:
    half = None if math.isinf(head.half_life) else round(head.half_life, 2)
    layer = f"{head.place.layer}{' +' if head.place.part else ''}"
    name, kind = str(head), head.kind.replace("_", " ")
    return {
        "name": name, "layer": layer, "kind": kind, "half": half, "beyond": head.beyond, "stored": head.stored
    }  # fmt: skip


def _pack(one: HeadLens, listed: int) -> dict[str, Any]:
    """The numbers of a head, compressed, with the place of each array as [type, offset, size]."""
    shares = one.shares() * np.sign(one.weights.values)
    later = math.ceil(listed / 2)
    total = (np.abs(one.weights.values) * one.sizes.values).sum(1)
    arrays = {"total": total.astype("<f4"), "sizes": one.sizes.values.astype("<f4")}
    for name, table, k in (("read", shares, listed), ("later", shares.T - np.diag(np.diag(shares)), later)):
        order = torch.from_numpy(np.abs(table)).topk(k).indices.numpy()
        values = np.take_along_axis(table, order, 1)
        scale = np.maximum(np.abs(values[:, :1]), 1e-30)
        arrays[f"{name}_scale"] = scale[:, 0].astype("<f4")
        arrays[f"{name}_index"] = order.astype("<u2")
        arrays[f"{name}_value"] = np.round(127 * values / scale).astype("i1")
    grids = {"left": one.left.values, "faded": one.faded.values}
    if np.allclose(grids["left"], grids["faded"], atol=1 / 255):
        del grids["faded"]
    arrays |= {name: np.round(255 * grid.clip(0, 1)).astype("u1") for name, grid in grids.items()}
    if one.resets is not None:
        arrays["resets"] = one.resets.astype("u1")
    blob, places = bytearray(), {}
    for name, array in arrays.items():
        if array.dtype == np.float32:
            array = (array.view(np.uint32) & ROUNDED).view(np.float32)
        blob.extend(b"\0" * (-len(blob) % 4))
        places[name] = [array.dtype.str[1:], len(blob), array.size]
        blob.extend(array.tobytes())
    return {
        "arrays": places, "cursors": one.cursors.tolist(), "k": listed, "k_later": later,
        "blob": b64encode(zlib.compress(bytes(blob), 9)).decode(),
    }  # fmt: skip


def _summary(lens: Lens, shown: int) -> str:
    layers = len({head.place for head in lens.heads})
    summary = (
        f"{len(lens.ids):,} tokens, {len(lens.heads)} heads in {layers} layers. Click a token or drag across the text "
        "to move the cursor."
    )
    return summary + (f" The page has the numbers of {shown} heads." if shown < len(lens.heads) else "")
