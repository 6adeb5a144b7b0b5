"""Building blocks of tasks in text: tables of statements, and `render`, which joins them and labels the answer.

A token is the ASCII code of a character, V = 128. The text begins at the left, and zeros behind it fill the row. The
text ends with the query, `?…=`. The answer is predicted one character at a time, as by any language model. Its first
character is the label at `=`. Each further character is the label at the character before it, so all characters of the
answer but the last are part of the input.

Examples differ in length. They are therefore built from rows of tables that hold every possible statement, with zeros
in place of a shorter or an absent statement. `render` removes these zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from halflife.tasks.base import IGNORED, Task, TaskBatch
from halflife.tasks.layout import VOCABULARY, check_sizes


@dataclass(frozen=True, kw_only=True)
class TextTask(Task):
    """Base of the tasks in text.

    The tiers have the least possible length. The paper's T_max of 400 to 3,000 adds zeros, which no causal model reads.

    Slices: `length`, the number of characters up to the last scored position.
    """

    scalable = False

    vocab_size: int = VOCABULARY  # V, always 128
    length: int = 400  # T, at least the number of characters of the longest possible text

    tiers: ClassVar[dict[str, dict[str, int | str]]]  # the paper's settings, but for T_max

    def __post_init__(self) -> None:
        check_sizes(self, self.shortest)

    @property
    def shortest(self) -> int:
        """Number of characters of the longest possible text."""
        raise NotImplementedError


def check_range(what: str, low: int, high: int, least: int, most: int | None = None) -> None:
    """Raise ValueError if the range of a random size does not have least ≤ low ≤ high (≤ most)."""
    if not least <= low <= high or (most is not None and high > most):
        end = "" if most is None else f" ≤ {most}"
        raise ValueError(f"{what} need {least} ≤ min ≤ max{end}; got min {low}, max {high}")


@cache
def table(*texts: str) -> Tensor:
    """Return the texts as ASCII codes, `[number of texts, longest length]`, with zeros behind shorter texts."""
    width = max(map(len, texts))
    return torch.tensor([list(text.ljust(width, "\0").encode("ascii")) for text in texts])


def slot_mask(count: int, present: Tensor) -> Tensor:
    """Return the mask `[N, count]` of the first `present` slots of each row; `present` is `[N, 1]`."""
    return torch.arange(count) < present


def render(parts: list[Tensor], answer: Tensor, length: int, **slices: Tensor) -> TaskBatch:
    """Join the parts of the texts without their gaps, and label each character of the answer.

    Args:
        parts: codes `[N, any shape]` in their order, with 0 for no character. The first part holds the facts.
        answer: codes of the answer, `[N, characters]`.
        **slices: further slices, `[N]` or `[N, 1]`.
    """
    size = answer.shape[1]
    codes = torch.cat([*(part.flatten(1) for part in parts), answer[:, : size - 1]], 1)
    present = codes != 0
    at = torch.where(present, present.cumsum(1) - 1, length)  # zeros go to an extra column, which is cut off
    inputs = torch.zeros(len(codes), length + 1, dtype=torch.int64).scatter_(1, at, codes)[:, :length].contiguous()
    end = present.sum(1, keepdim=True)
    facts = torch.arange(length) < (parts[0].flatten(1) != 0).sum(1, keepdim=True)
    labels = torch.full_like(inputs, IGNORED).scatter_(1, end - size + torch.arange(size), answer)
    numbers = {"length": end.flatten(), **{name: ids.flatten() for name, ids in slices.items()}}
    return TaskBatch(inputs, labels, numbers, facts)
