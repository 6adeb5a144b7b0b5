"""Statements of the four papers that a few random draws decide, in float64: identities, bounds and numbers.

The other topics of `halflife theory` are about one statement each. These need one number each: the largest error of an
identity, the largest quotient of a value and its bound, or a value that the paper names.
"""

from __future__ import annotations

from typing import Any

from halflife.lab.theory.statements import decay, gate_rank, post, ska
from halflife.lab.theory.statements.row import BOUND, IDENTITY, NUMBER

__all__ = ["BOUND", "IDENTITY", "NUMBER", "statements"]


def statements(seed: int = 0) -> dict[str, dict[str, Any]]:
    """Evaluate every statement on draws of this seed: name → "source" (paper and place), "what", "kind" and "value".

    The value of an identity is its largest relative error. That of a bound is the largest quotient of the value and the
    bound, which is at most 1 if the statement is true. Other values are numbers or lists of numbers.
    """
    papers = (post, decay, gate_rank, ska)
    return {name: row for paper in papers for name, row in paper.statements(seed).items()}
