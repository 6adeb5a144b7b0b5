"""Join comparisons into the files of the map of docs/results/echo.md, and of its controls.

    python docs/powers.py FOLDER …           add the models of finished comparisons of koopman-powers
    python docs/powers.py                    draw the picture again

Models and cells that the files have stay as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from join import RESULTS, add, read_table, scores  # beside this file

from halflife.files import CONFIG_JSON, read_json, write_json
from halflife.lab.experiments.evidence import koopman_powers
from halflife.report.figures.matplotlib_renderer import save
from halflife.report.table import Table

TRAINED, LONGER = RESULTS / "koopman_powers.csv", RESULTS / "koopman_powers_double.csv"
MAP = TRAINED.with_suffix(".json")
STEPS = 1800  # of the runs in `TRAINED`; longer ones are in `LONGER`
CONTROLS = RESULTS / "koopman_powers_controls.csv"  # models of equal state
KINDS = (*koopman_powers.KOOPMAN, koopman_powers.RIDGE, *koopman_powers.BASELINES)


def place(model: str) -> tuple[int, str]:
    """A key that sorts models, and the cells of each."""
    kind, _, cell = model.partition(":")
    return KINDS.index(kind), cell


def add_folder(folder: Path) -> None:
    """Add a comparison to the files, by its steps and by whether a model is a control."""
    rows, found = read_table(folder / "results.csv"), read_json(folder / "powers.json")
    path = LONGER if read_json(folder / CONFIG_JSON)["settings"]["steps"] > STEPS else TRAINED
    add(path, [row for row in rows if "@" not in row["model"]], place)
    add(CONTROLS, [row for row in rows if "@" in row["model"]], place)
    data = path.with_suffix(".json")
    old = read_json(data)
    write_json(data, {part: {**found[part], **old[part]} for part in old})


def table(wanted: Mapping[str, Any]) -> str:
    """The accuracy in distribution of `models` in `cells`, and after how many steps the seeds reached 90 %."""
    steps, trained = read_json(MAP)["steps"], scores(TRAINED)

    def cell(kind: str, where: str) -> str:
        name = f"{kind}:{where}"
        own = [row for row in trained if (row["model"], row["test"]) == (name, "in_distribution")]
        accuracies = [row["accuracy"] for row in own if row["selected"]]
        if not accuracies:
            return "–"
        reached = sorted({step for step in steps[name] if step is not None})
        ends = " to ".join(dict.fromkeys(f"{step:,}" for step in (reached[0], reached[-1]))) if reached else ""
        never = "never" if None in steps[name] else ""
        return f"{100 * fmean(accuracies):.1f} ({' or '.join(filter(None, [ends, never]))})"

    lines = [[f"`{kind}`", *(cell(kind, where) for where in wanted["cells"])] for kind in wanted["models"]]
    return Table(["model", *wanted["cells"]], lines).markdown()


def main(folders: Sequence[str]) -> None:
    for folder in folders:
        add_folder(Path(folder))
    found = read_json(MAP)["untrained"]
    save(koopman_powers.picture(scores(TRAINED), found), RESULTS, "koopman_powers", ("png",))


if __name__ == "__main__":
    main(sys.argv[1:])
