"""State tracking in text: the holdings of agents that mine, trade and build."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product
from string import ascii_uppercase as NAMES
from typing import ClassVar

import torch
from torch import Tensor

from halflife.tasks.base import TASKS, TaskBatch
from halflife.tasks.layout import draw_index
from halflife.tasks.text import TextTask, check_range, render, slot_mask, table

GOODS = ("gold", "wood")
HOLDINGS = 10  # an agent has 0 to 9 of each good, so the answer is one digit
STARTING_HOLDING = 5
NOISE = "!#$%&*+<@^_|"  # characters that occur in no statement


@TASKS.add("economy")
@dataclass(frozen=True, kw_only=True)
class Economy(TextTask):
    """Economy: agents mine, trade and build; invalid moves change nothing; `?A.gold=` → A's amount of gold.

    Every agent starts with 5 gold and 5 wood. At each step a random agent makes a move. The three kinds of moves are
    equally likely, and so are the numbers n = 1, 2, 3, the goods and the partners:

        `A:mine 2 gold;`     A gains 2 gold
        `A:trade 2 gold B;`  A gives B 2 gold for 2 wood
        `A:build;`           A loses 1 gold and 1 wood

    A move that would leave an agent with less than 0 or more than 9 of a good is rejected: it is written like any other
    move but changes nothing. After the moves come a gap of random characters that occur in no statement, and the query
    for a random agent and good.

    Args:
        length: see `TextTask`.
        num_agents: number of agents A, B, …
        min_steps, max_steps: least and largest number of moves; the number is uniform between them.
        min_gap, max_gap: least and largest number of characters of the gap; the number is uniform between them.

    Chance is 1/10. `shortcut_accuracy` is the share of the most common count. It is estimated from 32,768 episodes with
    a fixed seed (standard error at most 0.003), and is 0.15 for the easy tier and 0.12 for the hard tier. Playing the
    whole game and then naming the count that most agents and goods have scores 0.35 and 0.26.

    Slices: `length`, `num_steps`, `num_rejected`, `gap`. Source: Echo, Appendix G.4, which leaves the rules open; they
    are in docs/tasks.md.
    """

    num_agents: int = 3
    min_steps: int = 5
    max_steps: int = 15
    min_gap: int = 0
    max_gap: int = 0

    name = "economy"
    chance = 1 / HOLDINGS
    tiers: ClassVar = {
        "easy": {"length": 263, "num_agents": 3, "min_steps": 5, "max_steps": 15, "min_gap": 0, "max_gap": 0},
        "hard": {"length": 2108, "num_agents": 6, "min_steps": 40, "max_steps": 100, "min_gap": 200, "max_gap": 400},
    }

    def __post_init__(self) -> None:
        if not 2 <= self.num_agents <= len(NAMES):
            raise ValueError(f"num_agents must lie between 2, for a trade, and 26; got {self.num_agents}")
        check_range("steps", self.min_steps, self.max_steps, 0)
        check_range("gaps", self.min_gap, self.max_gap, 0)
        super().__post_init__()

    @property
    def shortest(self) -> int:
        return len("A:trade 2 gold B;") * self.max_steps + self.max_gap + len("?A.gold=")

    @property
    def shortcut_accuracy(self) -> float:
        return _majority(self.num_agents, self.min_steps, self.max_steps)

    def sample(self, num_examples: int, draw: torch.Generator) -> TaskBatch:
        moves, steps, accepted, counts = play(self.num_agents, self.min_steps, self.max_steps, num_examples, draw)
        texts = possible_moves(self.num_agents)[0][moves] * slot_mask(self.max_steps, steps).unsqueeze(2)
        gap = self.min_gap + draw_index(num_examples, self.max_gap - self.min_gap + 1, draw)
        noise = torch.randint(len(NOISE), (num_examples, self.max_gap), generator=draw)
        noise = table(NOISE).squeeze(0)[noise] * slot_mask(self.max_gap, gap)
        asked = draw_index(num_examples, counts.shape[1], draw)
        owners = product(NAMES[: self.num_agents], GOODS)
        query = table(*(f"?{agent}.{good}=" for agent, good in owners))[asked]
        answer = counts.gather(1, asked) + ord("0")
        return render(
            [texts, noise, query], answer, self.length, num_steps=steps, num_rejected=steps - accepted, gap=gap
        )


def play(
    num_agents: int, min_steps: int, max_steps: int, num_examples: int, draw: torch.Generator
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Play episodes of `Economy`.

    Returns:
        The moves as row indices of `possible_moves`, `[N, max_steps]`; the numbers of all moves and of accepted moves,
        `[N, 1]` each; and the final holdings (A's gold, A's wood, B's gold, …), `[N, 2 agents]`.
    """
    _, effects, starts = possible_moves(num_agents)
    kinds = torch.randint(len(starts) - 1, (num_examples, max_steps), generator=draw)
    within = torch.rand(kinds.shape, generator=draw, dtype=torch.float64)
    moves = starts[kinds] + (within * starts.diff()[kinds]).long()
    steps = min_steps + draw_index(num_examples, max_steps - min_steps + 1, draw)
    counts = torch.full((num_examples, effects.shape[1]), STARTING_HOLDING)
    accepted = torch.zeros_like(steps)
    for step in range(max_steps):
        after = counts + effects[moves[:, step]]
        valid = ((after >= 0) & (after < HOLDINGS)).all(1, keepdim=True) & (step < steps)
        counts = torch.where(valid, after, counts)
        accepted += valid
    return moves, steps, accepted, counts


@cache
def possible_moves(num_agents: int) -> tuple[Tensor, Tensor, Tensor]:
    """List the M possible moves.

    Returns:
        The texts of the moves as a `table`, `[M, 17]`; their changes to the holdings in the order of `play`,
        `[M, 2 agents]`; and the first indices of mine, trade and build, followed by M, `[4]`.
    """
    agents, numbers = range(num_agents), (1, 2, 3)
    mine = [(f"{NAMES[a]}:mine {n} {GOODS[g]};", [(a, g, n)]) for a, g, n in product(agents, (0, 1), numbers)]
    trade = [
        (f"{NAMES[a]}:trade {n} {GOODS[g]} {NAMES[b]};", [(a, g, -n), (a, 1 - g, n), (b, g, n), (b, 1 - g, -n)])
        for a, b, g, n in product(agents, agents, (0, 1), numbers)
        if a != b
    ]
    build = [(f"{NAMES[a]}:build;", [(a, 0, -1), (a, 1, -1)]) for a in agents]
    moves = [*mine, *trade, *build]
    effects = torch.zeros(len(moves), num_agents, 2, dtype=torch.int64)
    for row, (_, changes) in enumerate(moves):
        for agent, good, change in changes:
            effects[row, agent, good] += change
    texts = table(*(text for text, _ in moves))
    starts = torch.tensor([0, len(mine), len(mine) + len(trade), len(moves)])
    return texts, effects.flatten(1), starts


@cache
def _majority(num_agents: int, min_steps: int, max_steps: int) -> float:
    counts = play(num_agents, min_steps, max_steps, 1 << 15, torch.Generator().manual_seed(0))[-1]
    return torch.bincount(counts.flatten()).max().item() / counts.numel()
