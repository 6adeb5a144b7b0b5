"""The documentation builds without a warning, all its links lead somewhere, and it needs no network."""

import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from test_house import FLOORS

from halflife import ops

# `make docs` refuses a broken page too, in a workflow of its own.
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}


class Page(HTMLParser):
    """The links of a page, the files that it loads, and its anchors."""

    def __init__(self, file):
        super().__init__()
        self.links, self.loads, self.anchors = [], [], {""}
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if LOADED.get(tag) in given:
            self.loads.append(given[LOADED[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of a site that is built as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.returncode}: {done.stdout}{done.stderr}"
    return folder


@pytest.fixture(scope="module")
def pages(site):
    return {file.relative_to(site): Page(file) for file in site.rglob("*.html")}


def test_every_page_is_built(pages):
    """Each document is one page. The only other page is the one for missing pages."""
    written = {file.relative_to(ROOT / "docs").with_suffix(".html") for file in (ROOT / "docs").rglob("*.md")}
    assert written == set(pages) - {Path("404.html")}


def test_links_lead_somewhere(site, pages):
    """Every link inside the site, with its anchor; pictures and data files too."""
    missing, seen = [], 0
    for path, page in pages.items():
        if path.name == "404.html":  # its links begin at the root of a server
            continue
        for link in page.links + page.loads:
            parts = urlsplit(link)
            if not parts.scheme and not parts.netloc:
                seen += 1
                target = (site / path.parent / unquote(parts.path)).resolve() if parts.path else site / path
                inside = target.is_file() and target.is_relative_to(site)
                anchors = pages[target.relative_to(site)].anchors if inside and target.suffix == ".html" else {""}
                if not inside or unquote(parts.fragment) not in anchors:
                    missing.append(f"{path}: {link}")
    assert not missing
    assert seen > 1000


def test_nothing_is_loaded_from_elsewhere(site, pages):
    loads = [load for page in pages.values() for load in page.loads]
    assert not [load for load in loads if urlsplit(load).scheme not in ("", "data") or load.startswith("//")]
    for sheet in site.rglob("*.css"):
        assert "url(http" not in sheet.read_text()
        assert "@import" not in sheet.read_text()


def test_the_api_has_every_op(pages):
    anchors = {anchor.rpartition(".")[2] for anchor in pages[Path("api/ops.html")].anchors}
    assert set(ops.__all__) <= anchors


def test_diagrams_are_drawn_without_a_script(site):
    page = (site / "architecture.html").read_text(encoding="utf-8")
    assert page.count("<div><b>") == len(FLOORS)
    assert "flowchart" not in page


def test_search_works_from_a_file(site, browser):
    """The search finds a page in a browser without a server, and the pages load nothing but files."""
    asked, errors = [], []
    page = browser.new_page()
    page.set_default_timeout(60_000)
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto((site / "index.html").as_uri())
    page.get_by_role("textbox", name="Search").click()
    page.keyboard.type("tapering")
    page.locator(".md-search-result__link").first.wait_for()
    found = [link.get_attribute("href") or "" for link in page.locator(".md-search-result__link").all()]
    page.keyboard.press("Control+A")
    page.keyboard.type("which model")
    first = page.locator(".md-search-result__link").first
    page.wait_for_function("document.querySelector('.md-search-result__link')?.href.includes('model')")
    answer = first.get_attribute("href") or ""
    assert any("post.html" in link for link in found)
    assert "results/overview.html" in answer, "pages come before functions (docs/search.py)"
    assert not [url for url in asked if urlsplit(url).scheme not in ("file", "data", "about")]
    assert not errors
