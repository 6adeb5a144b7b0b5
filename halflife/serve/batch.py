"""Rows that share steps of the model, and the draw of their tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from halflife.models.lm import ModelState
from halflife.models.states import form, select, stack
from halflife.models.text import draw
from halflife.serve.jobs import Job, Row


@dataclass(eq=False)
class Group:
    """Rows whose states have one form: their states, and their last hidden states `[N, D]`."""

    rows: list[Row]
    state: ModelState
    hidden: Tensor


def batches(portions: Mapping[Job, int]) -> Iterator[tuple[int, list[Job]]]:
    """Yield (tokens, jobs) for each call of the model that together read `portions`, the tokens of each job.

    The number of jobs is a power of two. The number of tokens is 64, 128, 256 …, or 16, 32, 48, or less than 16. So the
    model sees few shapes. Libraries compile and store kernels for every shape (oneDNN up to 1,024 primitives, and its
    micro-kernels without a limit), so each new one takes more memory. The states of a call's jobs have one form.
    """
    most = max(portions.values(), default=0)
    powers = [1 << bit for bit in reversed(range(6, most.bit_length()))]
    for mask in (*powers, 48, 15):
        same: dict[tuple, list[Job]] = {}
        for job, count in portions.items():
            if tokens := count & mask:
                same.setdefault((tokens, None if job.state is None else form(job.state)), []).append(job)
        for (tokens, _), jobs in same.items():
            while jobs:
                size = 1 << (len(jobs).bit_length() - 1)
                yield tokens, jobs[:size]
                jobs = jobs[size:]


def merge(groups: Sequence[Group]) -> Group:
    """Return one group with the rows of all `groups`, whose states have one form."""
    if len(groups) == 1:
        return groups[0]
    rows = [row for group in groups for row in group.rows]
    return Group(rows, stack([group.state for group in groups]), torch.cat([group.hidden for group in groups]))


def keep(group: Group, rows: list[int]) -> None:
    """Take all rows but `rows` out of the group."""
    if len(rows) < len(group.rows):
        group.rows = [group.rows[i] for i in rows]
        if rows:
            group.state, group.hidden = select(group.state, rows), group.hidden[rows]


def draw_tokens(logits: Tensor, rows: Sequence[Row], likeliest: Sequence[int]) -> list[int]:
    """Draw a token of each row from `logits [N, V]`, of which the likeliest tokens are known."""
    settings = [row.job.settings for row in rows]
    return [
        likeliest[i] if s.temperature == 0 else draw(logits[i], s.temperature, None, s.top_p, rows[i].generator)
        for i, s in enumerate(settings)
    ]
