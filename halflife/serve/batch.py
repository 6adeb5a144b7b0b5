"""Rows that share steps of the model, and the draw of their tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from halflife.models.lm import ModelState
from halflife.models.session import draw
from halflife.serve.jobs import Job, Row
from halflife.serve.states import form, select, stack


@dataclass(eq=False)
class Group:
    """Rows whose states have one form: their states, and their last hidden states `[N, D]`."""

    rows: list[Row]
    state: ModelState
    hidden: Tensor


def by_form(jobs: Iterable[Job]) -> list[list[Job]]:
    """Return the jobs in groups whose states have one form."""
    groups: dict[tuple | None, list[Job]] = {}
    for job in jobs:
        groups.setdefault(None if job.state is None else form(job.state), []).append(job)
    return list(groups.values())


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


def draw_tokens(logits: Tensor, rows: Sequence[Row]) -> list[int]:
    """Draw a token of each row from `logits [N, V]`."""
    likeliest = logits.argmax(-1).tolist()
    settings = [row.job.settings for row in rows]
    return [
        likeliest[i] if s.temperature == 0 else draw(logits[i], s.temperature, None, s.top_p, rows[i].generator)
        for i, s in enumerate(settings)
    ]
