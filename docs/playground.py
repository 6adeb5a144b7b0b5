"""Train the three models of docs/playground.md and write them with `python docs/playground.py` in 6 minutes.

The graphs need the extra `onnx`. Weights are rounded to int8 before they are measured.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

from playground_step import write_lens  # beside this file

from halflife.evaluation.recall import accuracy
from halflife.files import write_json, write_text
from halflife.lab.experiments.mqar import SMOKE, mqar_model
from halflife.models.load import load_any
from halflife.runs.one import run_one
from halflife.runs.task_run import RunConfig
from halflife.tasks import build
from halflife.tasks.base import median_lag
from halflife.tasks.layout import FILLERS, KEYS, VALUES, VOCABULARY

DOCS = Path(__file__).parent
MODELS = {"mamba2": "Mamba-2", "gated_deltanet": "Gated DeltaNet", "deltanet": "DeltaNet"}
SLOTS = 256  # tokens of a text
FACTS = 5
SETTINGS = dataclasses.replace(SMOKE, vocab_size=VOCABULARY, filler="recall")
NAMES = (
    "anna bob clara david emma frank grace henry iris jack kate leo mia noah olga paul quinn rosa sam tina uma victor "
    "wendy xavier yara zoe alice ben carol dan eva felix"
)
THINGS = (
    "red blue green gold black white pink grey brown purple orange silver tall short old young happy sad rich poor "
    "loud quiet fast slow warm cold kind brave calm wise lazy shy"
)
OTHERS = (
    "the a and then well so now today here there we they it was had said went saw came some many more very just also "
    "later again once never always often soon away home back over under with from about into after before because "
    "while when where how"
)


def task(length: int, pairs: int, **options: Any) -> dict[str, Any]:
    """The settings of a task whose ids are the words above."""
    sizes = {"vocab_size": VOCABULARY, "length": length, "num_pairs": pairs}
    return {"name": "mqar", "filler": "recall", **sizes, **options}


# The last quarter of the steps also has facts that change, and questions that come late.
STAGES = (
    (task(32, 2),), (task(32, 4),), (task(32, 8),),
    (task(32, 8), task(32, 4, updates=1, power=1.0), task(64, 8, power=1.0)),
)  # fmt: skip
LATE = [task(length, FACTS, gap=length - 4 * FACTS) for length in (20, 64, 128, 256)]
TESTS: dict[str, dict[str, Any]] = {
    **{f"{median_lag(build(**settings)):.0f} words": settings for settings in LATE},
    "a fact that changed": task(48, FACTS, updates=1, power=1.0),
    "facts between other words": {"name": "niah", "length": 64, "num_pairs": FACTS},
}


def config(name: str) -> RunConfig:
    """The run of a model."""
    return RunConfig(
        model=mqar_model(name, SETTINGS), learning_rate=1e-2, steps=1400, batch_size=128, stages=STAGES,
        validation=STAGES[-1][::2], tests=(),
    )  # fmt: skip


def vocabulary() -> list[str]:
    """The word of each id; an id that the tasks do not use has none."""
    words = [""] * VOCABULARY
    for (low, high), text in ((KEYS, NAMES), (VALUES, THINGS), (FILLERS, OTHERS)):
        words[low:high] = text.split()
    assert len(words) == len(set(words)) + words.count("") - 1 == VOCABULARY
    return words


def main(runs: Path) -> None:
    measured: dict[str, dict[str, float]] = {}
    states: dict[str, dict[str, list[Any]]] = {}
    for name in MODELS:
        run_one(config(name).open(), runs / name, name=name)
        model = load_any(runs / name).float().eval()
        step = write_lens(model, DOCS / "playground" / f"{name}.onnx", SLOTS)
        given = dict(zip(step.input_names, step.inputs, strict=True))
        states[name] = {n: [str(x.dtype).split(".")[1], *x.shape] for n, x in given.items() if n not in ("ids", "slot")}
        measured[name] = {
            test: accuracy(model, build(**settings), split="test", seed=0, num_examples=512)
            for test, settings in TESTS.items()
        }
        print(name, measured[name])
    about = {
        "words": vocabulary(), "names": KEYS, "values": VALUES, "others": FILLERS, "slots": SLOTS, "models": MODELS,
        "layers": SETTINGS.num_layers, "state": states,
    }  # fmt: skip
    write_json(DOCS / "playground" / "playground.json", about)
    head = f"| asked after | {' | '.join(MODELS.values())} |\n|---|" + "---:|" * len(MODELS) + "\n"
    rows = (f"| {test} | {' | '.join(f'{100 * measured[m][test]:.1f} %' for m in MODELS)} |" for test in TESTS)
    page = DOCS / "playground.md"
    table = f"<!-- measured -->\n\n{head}" + "\n".join(rows) + "\n\n<!-- end -->"
    write_text(page, re.sub("<!-- measured -->.*<!-- end -->", table, page.read_text("utf-8"), flags=re.S))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS.parent / "runs" / "playground")
