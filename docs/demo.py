"""Join runs of the demo into docs/results/demo.csv: `python docs/demo.py BUILD FOLDER …`.

BUILD says with which kernels they ran, "native" or "chunked". The runs are those of `make demo` with other seeds:

    halflife compare retnet mamba2 gated_deltanet --task mqar --scale smoke --seeds 10
    HALFLIFE_NATIVE=/nowhere halflife compare …                                          without compiled kernels
    halflife compare retnet gated_deltanet --task mqar --scale smoke --steps 400 …       as HALFLIFE_DEMO=quick
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from join import RESULTS, read_table  # beside this file

from halflife.files import CONFIG_JSON, read_json, write_csv
from halflife.runs.records import LAG

DEMO = RESULTS / "demo.csv"
COLUMNS = ("build", "steps", "seed", "model", "lag", "accuracy")


def rows_of(build: str, folder: Path) -> list[dict[str, str]]:
    """The accuracy of each model and seed of a comparison at each lag."""
    steps = str(read_json(folder / CONFIG_JSON)["settings"]["steps"])
    tested = [row for row in read_table(folder / "results.csv") if row["test"] == LAG and row["selected"] == "True"]
    return [{"build": build, "steps": steps, **{name: row[name] for name in COLUMNS[2:]}} for row in tested]


def main(arguments: Sequence[str]) -> None:
    if len(arguments) < 2:
        print(__doc__)
        return
    build, *folders = arguments
    rows = read_table(DEMO) if DEMO.exists() else []
    rows += [row for folder in folders for row in rows_of(build, Path(folder))]
    unique = {tuple(row[name] for name in COLUMNS[:5]): row for row in rows}
    write_csv(DEMO, COLUMNS, [[*unique[key].values()] for key in sorted(unique)])


if __name__ == "__main__":
    main(sys.argv[1:])
