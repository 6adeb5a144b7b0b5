"""Lighthouse's accessibility of every page that people get, by npm."""

import json
import os
import shutil
import subprocess
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
from test_look_page import lens  # noqa: F401 (a fixture)
from test_page import comparison  # noqa: F401 (a fixture)
from test_site import site  # noqa: F401 (a fixture)

from halflife.report.page.chat import chat_page, live_page

LIGHTHOUSE = "lighthouse@12.8.2"  # the last release for Node 20
LEAST = 0.95
PAGES = ("report", "lens", "chat", "continue", "live", "site/playground", "site/index")


@pytest.fixture(scope="module")
def address(comparison, lens, site, tmp_path_factory):  # noqa: F811
    """The address of a server of all pages."""
    folder = tmp_path_factory.mktemp("pages")
    shutil.copy(comparison / "report.html", folder / "report.html")
    lens.save(folder / "lens.html")
    for name, chat in (("chat", True), ("continue", False)):
        (folder / f"{name}.html").write_text(chat_page("m", chat=chat, key=chat, most=64))
    (folder / "live.html").write_text(live_page("m", key=True))
    (folder / "site").symlink_to(site)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_lighthouse_finds_a_page_accessible(name, address, tmp_path):
    chromium, npx = shutil.which("chromium"), shutil.which("npx")
    if chromium is None or npx is None:
        pytest.skip("there is no chromium, or no npm, on this machine")
    result = tmp_path / "lighthouse.json"
    command = [
        npx, "--yes", LIGHTHOUSE, f"{address}/{name}.html", "--only-categories=accessibility", "--quiet",
        "--output=json", f"--output-path={result}",
        "--chrome-flags=--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage",
    ]  # fmt: skip
    done = subprocess.run(command, env={**os.environ, "CHROME_PATH": chromium}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(result.read_text())
    wrong = [audit["title"] for audit in found["audits"].values() if audit.get("score") == 0]
    assert found["categories"]["accessibility"]["score"] >= LEAST, wrong
