"""Recall in text: tool calls, and variables of a system prompt.

The Echo paper (Appendix G.4) gives the sizes of these tasks and few of their formats; docs/tasks.md describes all.
`halflife/tasks/text.py` defines the tokens and the scored positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from string import ascii_uppercase, digits
from typing import ClassVar

import torch
from torch import Tensor

from halflife.registry import check_choice
from halflife.tasks.base import TASKS, TaskBatch, distinct
from halflife.tasks.layout import draw_index
from halflife.tasks.text import TextTask, check_range, render, slot_mask, table

HEXADECIMAL = "0123456789abcdef"  # digits that name agents and tools
BLANK = "."  # fills the rest of a gap
KINDS = ("cot", "recall")


@TASKS.add("toolcalling")
@dataclass(frozen=True, kw_only=True)
class ToolCalling(TextTask):
    """Tool calls: `A3:T7>42;` × 10–30 (hard: 60–120), `?A3:T7=` → the two digits of the result.

    Agents A0–Af and tools T0–Tf are named by hexadecimal digits, which give 256 pairs (decimal digits give 100). Each
    pair (agent, tool) is called at most once, and any call can be queried. The first 100 results are all different, and
    so are the next 100, and so on.

    Args:
        length: see `TextTask`.
        min_calls, max_calls: least and largest number of calls; the number is uniform between them.

    An answer is right if both digits are. Chance is 1/100. Naming the result of the last call is right with the mean of
    ⌈n/100⌉/n over the numbers n of calls, because that result occurs ⌈n/100⌉ times.
    Slices: `length`; `num_calls`; `depth`, the number of calls before the queried one; `gap`, the characters between
    its result and the query. Source: Echo, Appendix G.4; format in docs/tasks.md.
    """

    min_calls: int = 10
    max_calls: int = 30

    name = "toolcalling"
    chance = 1 / 100
    whole_answers = True
    tiers: ClassVar = {
        "easy": {"length": 278, "min_calls": 10, "max_calls": 30},
        "hard": {"length": 1088, "min_calls": 60, "max_calls": 120},
    }

    def __post_init__(self) -> None:
        check_range("calls", self.min_calls, self.max_calls, 1, len(HEXADECIMAL) ** 2)
        super().__post_init__()

    @property
    def shortest(self) -> int:
        return len("A3:T7>42;") * self.max_calls + len("?A3:T7=4")

    @property
    def shortcut_accuracy(self) -> float:
        numbers = range(self.min_calls, self.max_calls + 1)
        return sum(math.ceil(n / 100) / n for n in numbers) / len(numbers)

    def sample(self, num_examples: int, draw: torch.Generator) -> TaskBatch:
        most = self.max_calls
        number = self.min_calls + draw_index(num_examples, most - self.min_calls + 1, draw)
        pairs = distinct(num_examples, most, 0, len(HEXADECIMAL) ** 2, draw)
        rounds = [distinct(num_examples, 100, 0, 100, draw) for _ in range(math.ceil(most / 100))]
        results = torch.cat(rounds, 1)[:, :most]
        names = [f"A{agent}:T{tool}" for agent, tool in product(HEXADECIMAL, HEXADECIMAL)]
        numerals = [f"{result:02}" for result in range(100)]
        heads, tails = table(*(f"{name}>" for name in names)), table(*(f"{result};" for result in numerals))
        calls = torch.cat([heads[pairs], tails[results]], 2) * slot_mask(most, number).unsqueeze(2)
        asked = draw_index(num_examples, number, draw)
        query = table(*(f"?{name}=" for name in names))[pairs.gather(1, asked)]
        answer = table(*numerals)[results.gather(1, asked)].squeeze(1)
        gap = calls.shape[2] * (number - 1 - asked) + len(";")
        return render([calls, query], answer, self.length, num_calls=number, depth=asked, gap=gap)


@TASKS.add("amnesia")
@dataclass(frozen=True, kw_only=True)
class Amnesia(TextTask):
    """System prompt amnesia: `X=7;` × 4 (or 6), a gap full of digits, `?X=` → its digit.

    Variables are distinct capital letters with distinct digits. The gap consists of whole statements that bind nothing,
    and of dots for the rest of its length. The statements are

        kind "cot"     scratch steps, which are sums without the carry: `4+8=2;`
        kind "recall"  decoys `~X=3;`, with the name of one of the variables and any digit but that variable's

    Args:
        length: see `TextTask`.
        kind: "cot" or "recall".
        num_variables: n, 1 to 10.
        min_gap, max_gap: least and largest number of characters of the gap; the number is uniform between them.

    Chance is 1/10, and naming any variable's digit scores 1/n. Slices: `length`; `num_variables`; `depth`, the number
    of variables before the queried one; `gap`; `decoys`, the number of decoys with the queried name. Source: Echo,
    Appendix G.4; format in docs/tasks.md. The paper gives gaps in tokens in G.4 and in steps in H.2, to which its T_max
    of 10 to 16 characters a step would fit. Here they are in tokens, and a step has 6 tokens.
    """

    kind: str = "cot"
    num_variables: int = 4
    min_gap: int = 10
    max_gap: int = 30

    name = "amnesia"
    chance = 1 / len(digits)
    tiers: ClassVar = {
        "cot_easy": {"length": 49, "kind": "cot", "num_variables": 4, "min_gap": 10, "max_gap": 30},
        "cot_hard": {"length": 319, "kind": "cot", "num_variables": 4, "min_gap": 150, "max_gap": 300},
        "recall_easy": {"length": 57, "kind": "recall", "num_variables": 6, "min_gap": 10, "max_gap": 30},
        "recall_hard": {"length": 227, "kind": "recall", "num_variables": 6, "min_gap": 80, "max_gap": 200},
    }

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, KINDS)
        if not 1 <= self.num_variables <= len(digits):
            raise ValueError(f"num_variables must lie between 1 and {len(digits)}; got {self.num_variables}")
        check_range("gaps", self.min_gap, self.max_gap, 0)
        super().__post_init__()

    @property
    def shortest(self) -> int:
        return len("X=7;") * self.num_variables + self.max_gap + len("?X=")

    @property
    def shortcut_accuracy(self) -> float:
        return 1 / self.num_variables

    def sample(self, num_examples: int, draw: torch.Generator) -> TaskBatch:
        names = distinct(num_examples, self.num_variables, 0, len(ascii_uppercase), draw)
        values = distinct(num_examples, self.num_variables, 0, len(digits), draw)
        bindings = table(*(f"{x}={d};" for x, d in product(ascii_uppercase, digits)))[names * len(digits) + values]
        asked = draw_index(num_examples, self.num_variables, draw)
        gap = self.min_gap + draw_index(num_examples, self.max_gap - self.min_gap + 1, draw)
        steps, of = (self._scratch if self.kind == "cot" else self._decoys)(values, names, draw)
        most, width = steps.shape[1:]
        taken = slot_mask(most, gap // width)
        rest = table(BLANK) * slot_mask(width, gap % width)
        query = table(*(f"?{x}=" for x in ascii_uppercase))[names.gather(1, asked)]
        numbers = {"num_variables": torch.full_like(gap, self.num_variables), "depth": asked, "gap": gap}
        parts, answer = [bindings, steps * taken.unsqueeze(2), rest, query], values.gather(1, asked) + ord("0")
        return render(parts, answer, self.length, **numbers, decoys=((of == asked) & taken).sum(1))

    def _scratch(self, values: Tensor, names: Tensor, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return the sums for the longest gap, `[N, steps, 6]`, and −1 for each, since a sum names no variable."""
        sums = table(*(f"{a}+{b}={(int(a) + int(b)) % 10};" for a, b in product(digits, digits)))
        steps = torch.randint(len(sums), (len(values), self.max_gap // sums.shape[1]), generator=draw)
        return sums[steps], torch.full_like(steps, -1)

    def _decoys(self, values: Tensor, names: Tensor, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return the decoys for the longest gap, `[N, steps, 5]`, and the index of the variable that each one names."""
        lies = table(*(f"~{x}={d};" for x, d in product(ascii_uppercase, digits)))
        of = torch.randint(self.num_variables, (len(values), self.max_gap // lies.shape[1]), generator=draw)
        other = (values.gather(1, of) + torch.randint(1, len(digits), of.shape, generator=draw)) % len(digits)
        return lies[names.gather(1, of) * len(digits) + other], of
