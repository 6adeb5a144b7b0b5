"""Pictures of results show today's files: the digest of their numbers, which a PNG file carries, is computed again."""

import json
import re
import sys
from pathlib import Path

import pytest
from PIL import Image

from halflife.files import read_json
from halflife.lab.experiments.evidence import koopman_powers
from halflife.report.figures.forecast import forecast_figures
from halflife.report.figures.matplotlib_renderer import DATA, digest, draw
from halflife.report.tables.forecast import read_forecasts

DOCS = Path(__file__).parents[1] / "docs"
RESULTS = DOCS / "results"
sys.path.insert(0, str(DOCS))

import powers  # noqa: E402
import result_pictures  # noqa: E402
import scale  # noqa: E402
from overview_picture import CHOSEN, overview  # noqa: E402


def forecast(name):
    (figure,) = forecast_figures(read_forecasts(RESULTS / f"{name}.json"))
    return draw(figure)


DRAWN = {
    **{one.__name__: one for one in result_pictures.PICTURES},
    **{name: lambda name=name: forecast(name) for name in ("forecast", "forecast_overview", "forecast_text")},
    "overview": lambda: draw(overview(read_json(RESULTS / "overview.json"), CHOSEN)),
    "overview_all": lambda: draw(overview(read_json(RESULTS / "overview.json"))),
    "koopman_powers": lambda: draw(
        koopman_powers.picture(powers.scores(powers.TRAINED), read_json(powers.MAP)["untrained"])
    ),
}


@pytest.mark.parametrize("name", DRAWN)
def test_a_picture_shows_the_numbers_of_its_files(name):
    with Image.open(RESULTS / f"{name}.png") as picture:
        assert picture.text[DATA] == digest(DRAWN[name]())


def test_readme_and_site_begin_with_the_film_and_then_show_the_overview():
    for page in (DOCS.parent / "README.md", DOCS / "index.md"):
        film, first = re.findall(r"!\[[^]]*\]\(([^)]*)\)", page.read_text(encoding="utf-8"))[:2]
        assert Path(first).stem in DRAWN
        assert (page.parent / film).stat().st_size < 1_500_000
        with Image.open(page.parent / film) as shown:
            assert shown.n_frames > 50


def test_other_numbers_have_another_digest(monkeypatch):
    before = digest(DRAWN["recall"]())
    rows = read_json(RESULTS / "forecast_overview.json")
    rows["models"][0]["measured"][3] += 1e-4
    monkeypatch.setattr(result_pictures, "read_json", lambda path: rows)
    assert digest(DRAWN["recall"]()) != before


@pytest.mark.slow
def test_the_plans_of_the_pictures_are_those_of_today():
    written = read_json(RESULTS / "scale.json")
    assert json.loads(json.dumps(scale.predicted())) == written
