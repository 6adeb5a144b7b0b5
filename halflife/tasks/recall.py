"""Recall over 128 token ids: system prompt, tool trace, needle in a haystack, two hops, most common word.

The Echo paper (Section 4.1) names these tasks but does not give their layouts, which docs/tasks.md describes. Ids 0–15
are special tokens, 16–47 keys, 48–79 values, and 80–127 fillers, so no filler is a key or a value. A sequence ends with
its query. The label of the last token is the answer, which is not part of the inputs after the query.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from halflife.tasks.base import TASKS, TaskBatch, distinct
from halflife.tasks.layout import BOS, CALL, KEYS, RESULT, SEP, SYS, VALUES, RecallTask, draw_index, fillers, scatter

AGENTS, TOOLS = (16, 32), (32, 48)  # the two halves of the keys


@TASKS.add("sysprompt")
@dataclass(frozen=True, kw_only=True)
class SysPrompt(RecallTask):
    """System prompt: `BOS SYS (k v)×KV SEP filler* Q k` → v.

    Keys are distinct, and so are values. The settings are those of `RecallTask`, with T ≥ 2KV + 5.

    Chance is 1/32, and naming any bound value scores 1/KV. Slices: those of `RecallTask`, and `depth`, the number of
    pairs before the queried one. Source: Echo, Section 4.1; layout in docs/tasks.md.
    """

    name = "sysprompt"

    @property
    def shortest(self) -> int:
        return 2 * self.num_pairs + 5

    def sample(self, num_examples: int, draw: torch.Generator) -> TaskBatch:
        keys = distinct(num_examples, self.num_pairs, *KEYS, draw)
        values = distinct(num_examples, self.num_pairs, *VALUES, draw)
        inputs = fillers(num_examples, self.length, draw)
        end = 2 + 2 * self.num_pairs
        inputs[:, 0], inputs[:, 1], inputs[:, end] = BOS, SYS, SEP
        inputs[:, 2:end:2], inputs[:, 3:end:2] = keys, values
        asked = draw_index(num_examples, self.num_pairs, draw)
        return self.with_query(inputs, keys.gather(1, asked), 3 + 2 * asked, depth=asked.squeeze(1))


@TASKS.add("tooltrace")
@dataclass(frozen=True, kw_only=True)
class ToolTrace(RecallTask):
    """Tool trace: `CALL agent tool RES v` × KV scattered in filler, `Q agent tool` → v.

    Each pair (agent, tool) is called once, and values are distinct. Agents are ids 16–31, tools 32–47.

    The calls are the cells of a grid of agents × tools. The grid is the most nearly square one with at least KV cells;
    surplus cells are left out along the diagonal, and a coin decides whether the rows are agents or tools. For KV ≥ 4
    the queried call thus shares its agent with another call and its tool with another, so neither name alone determines
    the answer. At KV = 5 one call has a name that no other call has, and it is never queried. For KV ≤ 3 no such grid
    exists, and any call is queried: at KV = 3 two calls have a unique name, and at KV = 2 both share one name.

    The settings are those of `RecallTask`, with T ≥ 5KV + 3.

    Chance is 1/32. Naming the result of any call that can be queried scores 1/KV, or 1/4 at KV = 5. Slices: those of
    `RecallTask`, and `depth`, the number of calls before the queried one. Source: Echo, Section 4.1, which leaves the
    choice of names open; layout in docs/tasks.md.
    """

    name = "tooltrace"

    @property
    def shortest(self) -> int:
        return 5 * self.num_pairs + 3

    @property
    def shortcut_accuracy(self) -> float:
        return 1 / len(self._cells()[1])

    def sample(self, num_examples: int, draw: torch.Generator) -> TaskBatch:
        cells, askable = self._cells()
        swapped = torch.rand(num_examples, 1, generator=draw) < 0.5
        sides = [torch.where(swapped, cells[:, 1 - i], cells[:, i]) for i in (0, 1)]
        most = int(cells.max()) + 1
        agents, tools = (
            distinct(num_examples, most, *ids, draw).gather(1, side)
            for ids, side in zip((AGENTS, TOOLS), sides, strict=True)
        )
        values = distinct(num_examples, self.num_pairs, *VALUES, draw)
        marks = [torch.full_like(values, mark) for mark in (CALL, RESULT)]
        inputs = fillers(num_examples, self.length, draw)
        calls = torch.stack([marks[0], agents, tools, marks[1], values], 2)
        starts = scatter(inputs, calls, self.length - 3, draw)
        asked = askable[draw_index(num_examples, len(askable), draw)]
        start = starts.gather(1, asked)
        names = torch.cat([agents.gather(1, asked), tools.gather(1, asked)], 1)
        return self.with_query(inputs, names, start + 4, depth=(starts < start).sum(1))

    def _cells(self) -> tuple[Tensor, Tensor]:
        """Return the cells of the grid, `[KV, 2]`, and the indices of those that can be queried."""
        rows = round(math.sqrt(self.num_pairs))
        columns = math.ceil(self.num_pairs / rows)
        left_out = rows * columns - self.num_pairs
        cells = torch.tensor([(i, j) for i in range(rows) for j in range(columns) if not i == j < left_out])
        alike = (cells.unsqueeze(0) == cells.unsqueeze(1)).sum(1)  # calls in the same row; in the same column
        askable = (alike > 1).all(1) | (self.num_pairs < 4)
        return cells, askable.nonzero().squeeze(1)


@TASKS.add("niah")
@dataclass(frozen=True, kw_only=True)
class NIAH(RecallTask):
    """Needle in a haystack: `k v` × KV at uniform places in filler, `Q k` → v.

    Keys are distinct, and so are values. The settings are those of `RecallTask` and `hard`, with T ≥ 2KV + 2, or
    6KV + 2 if hard. The paper uses KV 1, 4, 8 and T 64–4096.

    Args:
        hard: whether to add decoys: KV keys without a value (`k filler`) and KV values without a key (`filler v`). They
            differ from the bound keys and values, and are placed in the same way. No value follows a decoy key, no key
            precedes a decoy value, and no decoy key is queried.

    Chance is 1/32, and naming any bound value scores 1/KV; naming any value in the hard mode scores 1/(2KV). Slices:
    those of `RecallTask`, and `depth`, the number of pairs before the queried one. Source: Echo, Section 4.1, which
    leaves the number of decoys open; layout in docs/tasks.md.
    """

    hard: bool = False

    name = "niah"
    tiers: ClassVar = {"plain": {}, "hard": {"hard": True}}

    @property
    def most_pairs(self) -> int:
        return (VALUES[1] - VALUES[0]) // (2 if self.hard else 1)

    @property
    def shortest(self) -> int:
        return (6 if self.hard else 2) * self.num_pairs + 2

    def sample(self, num_examples: int, draw: torch.Generator) -> TaskBatch:
        ids = 2 * self.num_pairs if self.hard else self.num_pairs
        keys, decoy_keys = distinct(num_examples, ids, *KEYS, draw).tensor_split([self.num_pairs], 1)
        values, decoy_values = distinct(num_examples, ids, *VALUES, draw).tensor_split([self.num_pairs], 1)
        beside = fillers(num_examples, 2 * (ids - self.num_pairs), draw).tensor_split(2, 1)
        first = torch.cat([keys, decoy_keys, beside[0]], 1)
        second = torch.cat([values, beside[1], decoy_values], 1)
        inputs = fillers(num_examples, self.length, draw)
        starts = scatter(inputs, torch.stack([first, second], 2), self.length - 2, draw)[:, : self.num_pairs]
        asked = draw_index(num_examples, self.num_pairs, draw)
        start = starts.gather(1, asked)
        return self.with_query(inputs, keys.gather(1, asked), start + 1, depth=(starts < start).sum(1))


@TASKS.add("multihop")
@dataclass(frozen=True, kw_only=True)
class MultiHop(RecallTask):
    """Two hops: `k m` × KV and `m v` × KV, shuffled together in filler, `Q k` → v.

    k and m are 2KV distinct keys, and values are distinct. The places and the order of all 2KV links are uniform, so
    neither order nor distance shows which links belong together. The settings are those of `RecallTask`, with
    T ≥ 4KV + 2 and KV ≤ 16. The paper uses KV 3, 4, 8 and T 16–256.

    Chance is 1/32, and naming any bound value scores 1/KV. Slices: those of `RecallTask`, and `forward`, which is 1 if
    `k m` precedes its `m v` and else 0. Source: Echo, Section 4.1, which leaves the ids of m open; layout in
    docs/tasks.md.
    """

    name = "multihop"
    most_pairs = (KEYS[1] - KEYS[0]) // 2

    @property
    def shortest(self) -> int:
        return 4 * self.num_pairs + 2

    def sample(self, num_examples: int, draw: torch.Generator) -> TaskBatch:
        names = distinct(num_examples, 2 * self.num_pairs, *KEYS, draw)
        keys, between = names.chunk(2, 1)
        values = distinct(num_examples, self.num_pairs, *VALUES, draw)
        links = torch.stack([names, torch.cat([between, values], 1)], 2)
        inputs = fillers(num_examples, self.length, draw)
        one, two = scatter(inputs, links, self.length - 2, draw).chunk(2, 1)
        asked = draw_index(num_examples, self.num_pairs, draw)
        one, two = one.gather(1, asked), two.gather(1, asked)
        return self.with_query(inputs, keys.gather(1, asked), two + 1, forward=(one < two).long().squeeze(1))


@TASKS.add("commonword")
@dataclass(frozen=True, kw_only=True)
class CommonWord(RecallTask):
    """Most common word: one word 2f times, KV others f times, at uniform places in filler, `Q` → the first.

    Words are ids of values. The settings are those of `RecallTask` and `repeats`, with T ≥ f(KV + 2) + 1 and KV ≤ 31.
    The paper uses KV 3–8.

    Args:
        repeats: f, the number of times that each of the other words occurs.

    Chance, among the words of the context, is 1/(KV + 1). Naming the word at one place, for example the last, without
    counting scores 2/(KV + 2). Slices: those of `RecallTask`; `gap` is counted from the last place of the most common
    word. Source: Echo, Section 4.1, which leaves f open; layout in docs/tasks.md.
    """

    repeats: int = 2

    name = "commonword"
    most_pairs = VALUES[1] - VALUES[0] - 1

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ValueError(f"repeats must be 1 or more; got {self.repeats}")
        super().__post_init__()

    @property
    def shortest(self) -> int:
        return self.repeats * (self.num_pairs + 2) + 1

    @property
    def chance(self) -> float:
        return 1 / (self.num_pairs + 1)

    @property
    def shortcut_accuracy(self) -> float:
        return 2 / (self.num_pairs + 2)

    def sample(self, num_examples: int, draw: torch.Generator) -> TaskBatch:
        words = distinct(num_examples, self.num_pairs + 1, *VALUES, draw)
        said = torch.cat([words[:, :1], words], 1).repeat(1, self.repeats)
        inputs = fillers(num_examples, self.length, draw)
        places = scatter(inputs, said.unsqueeze(2), self.length - 1, draw)
        last = places.unflatten(1, (self.repeats, -1))[:, :, :2].flatten(1).amax(1, keepdim=True)
        return self.with_query(inputs, words[:, :0], last)
