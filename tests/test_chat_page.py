"""The pages of a server in headless Chromium: talking to a model, and the lens on what is typed."""

import threading
import time
from contextlib import contextmanager

import pytest
import uvicorn
from test_serve import BYTES, alone, bpe, tiny

from halflife.report.look import looker
from halflife.report.page.chat import chat_page, live_page
from halflife.serve.app import build
from halflife.serve.engine import Engine
from halflife.serve.listen import bind
from halflife.serve.pages import MOST_LOOKED_AT, Pages, has_chat


@contextmanager
def served(model, tokenizer=BYTES, key=None):
    """The address of a server of a model."""
    talk = chat_page("a <model>", chat=has_chat(tokenizer), key=key is not None, most=64)
    pages = Pages({"/": talk, "/look": live_page("m", key=key is not None)}, looker(model, tokenizer))
    application = build(Engine(model, tokenizer, piece=16), "tiny", api_key=key, pages=pages)
    listening = bind("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(application, log_level="error", lifespan="on"))
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture
def page(browser):
    page = browser.new_page(viewport={"width": 360, "height": 640}, color_scheme="dark")
    page.said, page.asked = [], []
    page.on("pageerror", lambda error: page.said.append(str(error)))
    page.on("request", lambda request: page.asked.append(request.url))
    yield page
    assert page.said == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")  # on a phone
    page.close()


def until(page, place, text):
    """Wait until an element has a text."""
    from playwright.sync_api import expect

    expect(page.locator(place)).to_contain_text(text, timeout=20_000)


def test_a_text_is_continued_and_looked_at(page):
    model = tiny("gated_deltanet", num_layers=2)
    with served(model) as address:
        page.goto(address)
        assert page.title() == page.inner_text("h1") == "a <model>"
        page.click("summary")
        page.fill("#temperature", "0")
        page.fill("#tokens", "12")
        page.fill("#text", "once upon")
        page.keyboard.press("Control+Enter")
        until(page, "#said", "It wrote")
        written = page.input_value("#text")
        assert written == "once upon" + BYTES.decode(alone(model, BYTES.encode("once upon").tolist(), 12))
        page.click("#look")
        until(page, "#status", f"Token {len(written.encode())} ")
        assert page.input_value("#typed") == written
        page.select_option("#head", index=1)
        page.check("[value=read]")
        chosen = page.locator("#head option:checked").inner_text().split(" (")[0]
        page.locator("#typed").press_sequentially(" a time")
        until(page, "#status", f"Token {len(written.encode()) + 7} ")
        assert chosen.split(": ")[-1] in page.inner_text("#status")  # the view and the head stay
        assert page.is_checked("[value=read]")
        page.fill("#typed", "x" * (MOST_LOOKED_AT + 1))
        until(page, "#said", "the lens takes 1 to 1,024 tokens; got 1,025")
        assert all(url.startswith(address) for url in page.asked)


def test_a_chat_needs_the_key_and_goes_on(page):
    with served(tiny(vocab_size=257), bpe(), key="secret") as address:
        page.goto(address)
        page.click("summary")
        page.fill("#tokens", "3")
        page.fill("#text", "hi")
        page.keyboard.press("Enter")
        until(page, "#said", "the API key is missing or wrong")
        assert page.input_value("#text") == "hi"
        assert page.is_hidden("#talk") or not page.inner_text("#talk")
        page.fill("#key", "secret")
        for turns in (2, 4):
            page.fill("#text", "hi")
            page.click("#send")
            until(page, "#said", "It wrote")
            assert page.locator("#talk > div").count() == turns
        page.fill("#tokens", "64")
        page.click("#clear")
        assert page.is_hidden("#talk")
        page.goto(f"{address}/look")
        page.fill("#typed", "hi")
        until(page, "#status", "Token 2 ")  # the key is the one that was typed on the other page


def test_names_are_there_for_screen_readers(page):
    with served(tiny()) as address:
        for path in ("", "look"):
            page.goto(f"{address}/{path}")
            names = page.evaluate(
                "[...document.querySelectorAll('input, select, textarea, button')].map(e => "
                "e.getAttribute('aria-label') || e.labels?.[0]?.textContent.trim() || e.textContent.trim())"
            )
            assert all(names)
            assert page.get_attribute("#said", "role") == "status"
