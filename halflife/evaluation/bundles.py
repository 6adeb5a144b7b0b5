"""The papers' sets of tasks by name, for lm-evaluation-harness.

The papers name benchmarks and not the harness's tasks, so the tasks are our reading. "acc_norm" divides the
log-likelihood of an answer by its length. The harness's WikiText is WikiText-2; Echo names WikiText-103.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ACC, NORM = "acc", "acc_norm"


@dataclass(frozen=True)
class Bundle:
    """A set of tasks."""

    source: str  # the paper's table
    metrics: Mapping[str, str | None]  # task → the metric that enters the average of accuracies; None for none
    lengths: tuple[int, ...] = ()  # lengths in tokens, for tasks that are made at a length

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(self.metrics)


NEEDLES = (
    "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multiquery", "niah_multivalue"
)  # fmt: skip

BUNDLES: dict[str, Bundle] = {
    "post-lm": Bundle(
        "PoST, Table 3, which names every metric",
        {
            "lambada_openai": ACC, "hellaswag": NORM, "piqa": ACC, "arc_easy": ACC, "arc_challenge": NORM,
            "winogrande": ACC, "openbookqa": NORM,
        },
    ),
    "decay-lm": Bundle(
        "Decay, Tables 2 to 9; the paper names no metric, and LAMBADA enters as perplexity",
        {
            "wikitext": None, "lambada_openai": None, "boolq": ACC, "piqa": ACC, "hellaswag": NORM, "winogrande": ACC,
            "arc_easy": ACC, "arc_challenge": NORM, "openbookqa": NORM, "social_iqa": ACC,
        },
    ),
    "echo-lm": Bundle(
        "Echo, Table 4, which names every metric",
        {
            "wikitext": None, "hellaswag": NORM, "piqa": ACC, "arc_easy": ACC, "arc_challenge": NORM,
            "winogrande": ACC, "lambada_openai": ACC,
        },
    ),
    "gate-rank-lm": Bundle(
        "GateRank, Table 1, which names every metric",
        {
            "wikitext": None, "lambada_openai": ACC, "piqa": ACC, "hellaswag": NORM, "winogrande": ACC,
            "arc_easy": ACC, "arc_challenge": NORM, "openbookqa": NORM, "sciq": NORM, "boolq": ACC,
        },
    ),
    "s-niah": Bundle(
        "the six needles of PoST, Table 4, and GateRank, Table 2", dict.fromkeys(NEEDLES), (1024, 2048, 4096)
    ),
}  # fmt: skip


def expand(names: Sequence[str]) -> list[str]:
    """The names of tasks, with the tasks of a bundle in its place, each once."""
    return list(dict.fromkeys(task for name in names for task in (BUNDLES[name].tasks if name in BUNDLES else (name,))))


def averages(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row for each bundle among `names`, if all its accuracies are in `harness.metric_rows`: mean and error."""
    own = {(row["task"], row["metric"]): row for row in rows if row.get("filter", "none") == "none"}
    found = []
    for name in names:
        wanted = [(task, metric) for task, metric in BUNDLES[name].metrics.items() if metric] if name in BUNDLES else []
        if wanted and all(key in own for key in wanted):
            mean = sum(own[key]["value"] for key in wanted) / len(wanted)
            errors = [error for key in wanted if (error := own[key].get("stderr")) is not None]
            error = math.hypot(*errors) / len(wanted) if len(errors) == len(wanted) else None  # of independent tasks
            found.append({"task": name, "metric": f"mean of {len(wanted)} accuracies", "value": mean, "stderr": error})
    return found
