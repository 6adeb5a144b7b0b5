"""One self-contained page that tells a run: findings, numbers, figures to explore, how to run it again."""

from __future__ import annotations

import hashlib
import json
from base64 import b64encode
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.colors import to_hex

from halflife.files import write_text
from halflife.report.figures.comparison import FASTEST, SLOWEST, save_all
from halflife.report.figures.recall import SCALE
from halflife.report.page import comparison as report_comparison
from halflife.report.page import language as report_language
from halflife.report.style import INK
from halflife.runs.folder import Comparison, LanguageRun, read_any

HERE = Path(__file__).parent
# Heat maps from the page's own paper to its opposite, in the dark too.
RECALL = {"light": [to_hex(SCALE(x)) for x in (0.0, 0.5, 1.0)], "dark": ["#18222c", "#2a78ad", "#cfe8fb"]}


def write_report(run_dir: str | Path) -> Path:
    """Writes `report.html` of a run folder, of a comparison with its figures in files; returns the page's path.

    Args:
        run_dir: the folder of a comparison or of a run of `halflife train`, finished or not.

    Raises:
        FileNotFoundError, ValueError: as `results.read_any`.
    """
    run = read_any(run_dir)
    if isinstance(run, Comparison):
        save_all(run.path)
    return write_page(run)


def write_page(run: Comparison | LanguageRun) -> Path:
    """Writes the page alone, whole or not at all. It needs no network, and its policy lets nothing out."""
    page = report_comparison.page(run) if isinstance(run, Comparison) else report_language.page(run)
    path = run.path / "report.html"
    write_text(path, render(page))
    return path


def render(page: dict[str, Any]) -> str:
    """The page's HTML, of what `report_comparison.page` or `report_language.page` gives."""
    from plotly.offline import get_plotlyjs

    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    own = [(HERE / name).read_text(encoding="utf-8") for name in ("report.js", "spectrum.js")]
    scripts = [_script(text) for text in (get_plotlyjs(), *own)]
    data = {
        "ink": INK, "recall": RECALL, "spectra": page["spectra"],
        "plots": {plot.name: [panel._asdict() for panel in plot.panels] for plot in page["plots"]},
    }  # fmt: skip
    return environment.get_template("report.html.jinja").render(
        page,
        css=Markup((HERE / "report.css").read_text(encoding="utf-8")),
        scripts=[Markup(script) for script in scripts],
        policy=_policy(scripts),
        data=Markup(json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", r"\u003c")),
        plain=_plain,
        ink=INK,
        slowest=f"{SLOWEST:,.0f}",
        fastest=f"{FASTEST:g}",
    )


def _script(text: str) -> str:
    """JavaScript that an HTML element can hold."""
    return text.replace("</script", r"<\/script").replace("\r\n", "\n")


def _policy(scripts: list[str]) -> str:
    """What the page may do: run its own scripts, known by their digests, and save a plot as a picture; nothing else."""
    digests = (b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
