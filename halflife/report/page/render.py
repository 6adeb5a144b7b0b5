"""Renders the report page of a run: one HTML file that needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup
from matplotlib.colors import to_hex

from halflife.files import write_text
from halflife.report.figures.data import FASTEST, NO_DATA, SLOWEST, FigureData
from halflife.report.page.comparison import comparison_page, decay_grid_page
from halflife.report.page.embed import data_of, policy, style
from halflife.report.page.language import language_page
from halflife.report.page.plotly_renderer import plot
from halflife.report.page.spectrum import opened, without
from halflife.report.style import HEAT_COLOURS, INK
from halflife.report.table import captioned, template
from halflife.runs.folder import REPORT_HTML, FolderKind, folder_kind
from halflife.runs.records import Comparison, LanguageRun

HERE = Path(__file__).parent
SCRIPTS = ("vendor/plotly-cartesian.min.js", "report.js", "spectrum.js")
# Heat maps go from the page's background colour to its opposite, in the dark theme too.
HEAT_SCALES = {"light": [to_hex(HEAT_COLOURS(x)) for x in (0.0, 0.5, 1.0)], "dark": ["#18222c", "#2a78ad", "#cfe8fb"]}


def write_page(run: Comparison | LanguageRun, figures: Sequence[FigureData]) -> Path:
    """Write `report.html` into the run's folder and return its path. The file is replaced only when it is complete."""
    if isinstance(run, LanguageRun):
        page = language_page(run)
    else:
        page = decay_grid_page(run) if folder_kind(run.path) is FolderKind.GRID else comparison_page(run)
    return write_text(run.path / REPORT_HTML, render({**page, "figures": figures}))


def render(page: dict[str, Any]) -> str:
    """The HTML of a page, from the variables of its template. Figures without data are left out."""
    page = {"notes": (), "numbers": None, "samples": "", **page}
    if spectra := page["spectra"]:
        page |= {"opened": opened(spectra), "without": without(page["models"], spectra)}
    sources = [(HERE / name).read_text(encoding="utf-8") for name in SCRIPTS]
    scripts = [source.replace("</script", r"<\/script").replace("\r\n", "\n") for source in sources]
    plots = [plot(figure) for figure in page["figures"] if not figure.empty]
    data = {
        "ink": INK, "recall": HEAT_SCALES, "noData": NO_DATA, "spectra": spectra,
        "plots": {plot.data.name: plot.panels for plot in plots},
    }  # fmt: skip
    return template(HERE / "report.html.jinja").render(
        page, plots=plots, css=Markup(style("report")),
        scripts=[Markup(script) for script in scripts], policy=policy(scripts, images=True),
        data=Markup(data_of(data)),
        captioned=captioned, ink=INK, slowest=f"{SLOWEST:,.0f}", fastest=f"{FASTEST:g}",
    )  # fmt: skip
