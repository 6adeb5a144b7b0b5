"""Recall over 128 token ids: system prompt, tool trace, needle in a haystack, two hops, most common word.

The tasks of the Echo paper (Section 4.1), which names them but lays none of them out; layouts from tasks.md. Ids 0–15
are special, 16–47 keys, 48–79 values, 80–127 fillers: no filler is ever a key or a value. A sequence ends with its
query, and what is to be predicted at its last token is the one answer, which never stands behind it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from halflife.tasks.base import TASKS, TaskBatch, distinct
from halflife.tasks.layout import BOS, CALL, KEYS, RESULT, SEP, SYS, VALUES, RecallTask, fillers, pick, scatter

AGENTS, TOOLS = (16, 32), (32, 48)  # the keys' two halves


@TASKS.add("sysprompt")
@dataclass(frozen=True, kw_only=True)
class SysPrompt(RecallTask):
    """System prompt: `BOS SYS (k v)×KV SEP filler* Q k` → v.

    Keys are distinct, and so are values. Takes the settings of `RecallTask`; T ≥ 2KV + 5.

    Chance is 1/32; naming any bound value scores 1/KV. Slices besides those of `RecallTask`: `depth`, the pairs before
    the one that is asked. Source: Echo paper, Section 4.1; tasks.md.
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
        asked = pick(num_examples, self.num_pairs, draw)
        return self.asking(inputs, keys.gather(1, asked), 3 + 2 * asked, depth=asked.squeeze(1))


@TASKS.add("tooltrace")
@dataclass(frozen=True, kw_only=True)
class ToolTrace(RecallTask):
    """Tool trace: `CALL agent tool RES v` × KV scattered in filler, `Q agent tool` → v.

    Each (agent, tool) is called once and values are distinct. Agents are ids 16–31, tools 32–47. The calls are the
    cells of the most nearly square grid of agents × tools that holds KV of them (which side the agents are is a coin's
    choice); cells too many are left out along the diagonal. So for KV ≥ 4 the call that is asked shares its agent with
    another call and its tool with another: neither name alone decides. At KV = 5 one call has a name to itself and is
    never asked. At KV ≤ 3 no such grid exists, and any call is asked: at 3 two of them have a name to themselves; at
    2 both share one name, the agent or the tool; at 1 there is nothing to confuse.

    Takes the settings of `RecallTask`; T ≥ 5KV + 3.

    Chance is 1/32; naming the result of any call that can be asked scores 1/KV, or 1/4 at KV = 5. Slices besides those
    of `RecallTask`: `depth`, the calls before the one that is asked. Source: Echo paper, Section 4.1; tasks.md, which
    leaves the choice of names open.
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
        asked = askable[pick(num_examples, len(askable), draw)]
        start = starts.gather(1, asked)
        names = torch.cat([agents.gather(1, asked), tools.gather(1, asked)], 1)
        return self.asking(inputs, names, start + 4, depth=(starts < start).sum(1))

    def _cells(self) -> tuple[Tensor, Tensor]:
        """The cells of the grid, `[KV, 2]`, and the indices of those that can be asked."""
        rows = round(math.sqrt(self.num_pairs))
        columns = math.ceil(self.num_pairs / rows)
        left_out = rows * columns - self.num_pairs
        cells = torch.tensor([(i, j) for i in range(rows) for j in range(columns) if not i == j < left_out])
        alike = (cells.unsqueeze(0) == cells.unsqueeze(1)).sum(1)  # calls with this row, with this column
        askable = (alike > 1).all(1) | (self.num_pairs < 4)
        return cells, askable.nonzero().squeeze(1)


@TASKS.add("niah")
@dataclass(frozen=True, kw_only=True)
class NIAH(RecallTask):
    """Needle in a haystack: `k v` × KV at uniform places in filler, `Q k` → v.

    Keys are distinct, and so are values. Takes the settings of `RecallTask` (the paper: KV 1, 4, 8; T 64–4096), and:

    Args:
        hard: adds KV keys without a value (`k filler`) and KV values without a key (`filler v`), all different from
            the bound ones and placed like these. A decoy key is never followed by a value, a decoy value never
            preceded by a key, and no decoy key is asked.

    T ≥ 2KV + 2, or 6KV + 2 if hard. Chance is 1/32; naming any bound value scores 1/KV (in the hard mode, naming any
    value 1/2KV). Slices besides those of `RecallTask`: `depth`, the pairs before the one that is asked. Source: Echo
    paper, Section 4.1; tasks.md, which leaves the number of decoys open.
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
        asked = pick(num_examples, self.num_pairs, draw)
        start = starts.gather(1, asked)
        return self.asking(inputs, keys.gather(1, asked), start + 1, depth=(starts < start).sum(1))


@TASKS.add("multihop")
@dataclass(frozen=True, kw_only=True)
class MultiHop(RecallTask):
    """Two hops: `k m` × KV and `m v` × KV, shuffled together in filler, `Q k` → v.

    k and m are 2KV distinct keys; values are distinct. Places and order of all 2KV links are uniform, so that neither
    order nor nearness tells which links belong together. Takes the settings of `RecallTask` (the paper: KV 3, 4, 8;
    T 16–256); T ≥ 4KV + 2, KV ≤ 16.

    Chance is 1/32; naming any bound value scores 1/KV. Slices besides those of `RecallTask`: `forward`, 1 where `k m`
    stands before its `m v`, else 0. Source: Echo paper, Section 4.1; tasks.md, which leaves the ids of m open.
    """

    name = "multihop"

    @property
    def most_pairs(self) -> int:
        return (KEYS[1] - KEYS[0]) // 2

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
        asked = pick(num_examples, self.num_pairs, draw)
        one, two = one.gather(1, asked), two.gather(1, asked)
        return self.asking(inputs, keys.gather(1, asked), two + 1, forward=(one < two).long().squeeze(1))


@TASKS.add("commonword")
@dataclass(frozen=True, kw_only=True)
class CommonWord(RecallTask):
    """Most common word: one word 2f times, KV others f times, at uniform places in filler, `Q` → the first.

    Words are ids of values. Takes the settings of `RecallTask` (the paper: KV 3–8), and:

    Args:
        repeats: f.

    T ≥ f(KV + 2) + 1, KV ≤ 31. Chance, among the words that stand there, is 1/(KV + 1); not counting, but naming the
    word at any one place (the last, say), scores 2/(KV + 2). `gap` counts from the mode's last place. Source: Echo
    paper, Section 4.1; tasks.md, which leaves f open.
    """

    repeats: int = 2

    name = "commonword"

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ValueError(f"repeats must be 1 or more; got {self.repeats}")
        super().__post_init__()

    @property
    def most_pairs(self) -> int:
        return VALUES[1] - VALUES[0] - 1

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
        return self.asking(inputs, words[:, :0], last)
