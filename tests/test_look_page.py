"""The page of the memory lens in headless Chromium."""

import pytest
import torch

import halflife
from halflife.models import LanguageModel, preset
from halflife.report.page.look import Pair

LENGTH = 30


@pytest.fixture(scope="module")
def lens():
    torch.manual_seed(0)
    config = preset("gated_deltanet", hidden_size=16, num_layers=2, num_heads=2, train_length=32, vocab_size=64)
    ids = torch.randint(0, 64, (LENGTH,))
    pairs = (Pair(3, 20, "7", 0.91, True), Pair(5, 24, "9", 0.02, False))
    return halflife.look(LanguageModel(config).double(), ids, documents=(26, 4), pairs=pairs, title="a <lens>")


@pytest.fixture(scope="module")
def page(lens, browser, tmp_path_factory):
    path = lens.save(tmp_path_factory.mktemp("look") / "look.html")
    page = browser.new_page()
    page.said, page.asked = [], []
    page.on("console", lambda message: page.said.append(message.text))
    page.on("pageerror", lambda error: page.said.append(str(error)))
    page.on("request", lambda request: page.asked.append(request.url))
    page.goto(path.as_uri())
    page.wait_for_function("document.getElementById('status').textContent")
    return page


def alphas(page):
    """The strengths of the colours of all tokens, after the next frame."""
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return page.evaluate("[...document.querySelectorAll('#text span')].map(s => +s.style.getPropertyValue('--a'))")


def show(page, lens, view, head):
    """Choose a view and a head, and return the numbers of the head."""
    page.check(f"[name=view][value={view}]")
    page.click(f"#strip button[aria-label^='layer {head.place.layer}, head {head.head},']")
    return next(lens.details([head]))


def test_it_opens_at_a_question_and_asks_for_nothing(page):
    assert page.said == []
    assert len(page.asked) == 1
    assert page.title() == "a <lens>"
    assert page.input_value("#cursor") == "24"
    assert page.is_checked("[value=read]")
    assert page.locator("#text span.known").count() == page.locator("#text span.forgotten").count() == 2
    assert "2.0 %" in page.inner_text("#pairs")


def test_legends_hold_in_both_themes(page):
    """In the dark one a token with more colour is brighter than the others."""
    for view in ("left", "lost", "read"):
        page.check(f"[name=view][value={view}]")
        legend = page.inner_text("#legend")
        assert "darker" not in legend.lower()
        assert view == "read" or legend.startswith("The stronger the colour of a token")


def test_keys_and_clicks_move_the_cursor(page):
    page.focus("#text")
    for key, cursor in (
        ("Home", 0),
        ("ArrowLeft", 0),
        ("ArrowRight", 1),
        ("PageDown", 11),
        ("End", 29),
        ("PageUp", 19),
    ):
        page.keyboard.press(key)
        alphas(page)
        assert page.input_value("#cursor") == str(cursor)
    page.locator("#text span").nth(7).click()
    alphas(page)
    assert page.locator("#text span.at").get_attribute("data-i") == "7"
    assert page.get_attribute("#cursor", "aria-valuetext").startswith("token 8 of 30")


def test_colours_are_the_numbers(page, lens):
    for head in lens.heads[1:3]:
        page.focus("#text")
        page.keyboard.press("Home")
        for _ in range(2):
            page.keyboard.press("PageDown")
        detail = show(page, lens, "left", head)
        assert alphas(page) == pytest.approx(detail.left.values[20].clip(0, 1), abs=0.003)
        show(page, lens, "lost", head)
        written = torch.arange(LENGTH) <= 20
        assert alphas(page) == pytest.approx((1 - detail.left.values[20].clip(0, 1)) * written.numpy(), abs=0.003)
        show(page, lens, "read", head)
        shares = detail.shares()[20]
        assert alphas(page) == pytest.approx((shares / shares.max()) ** 0.5, abs=0.07)
        most = page.locator("#most tr").nth(1).locator("td")
        assert int(most.nth(1).inner_text()) == shares.argmax() + 1
        expected = detail.weights.values[20, shares.argmax()]
        assert float(most.nth(4).inner_text()) == pytest.approx(expected, rel=0.01)
        show(page, lens, "later", head)
        readers = detail.shares()[:, 20] * (torch.arange(LENGTH) > 20).numpy()
        if readers.max() > 0:
            assert alphas(page)[readers.argmax()] == 1


def test_a_document_that_ended_is_lost(page, lens):
    show(page, lens, "lost", lens.heads[0])
    page.focus("#text")
    page.keyboard.press("End")
    assert alphas(page)[:26] == [1] * 26
    assert "documents that ended" in page.inner_text("#status")


def test_a_notebook_shows_the_page(page, lens):
    notebook = page.context.browser.new_page()
    notebook.set_content(f"<main>{lens._repr_html_()}</main>")
    frame = notebook.frames[1]
    frame.wait_for_function("document.getElementById('status').textContent.startsWith('Token 25')")
    assert notebook.locator("iframe").get_attribute("title") == "a <lens>"
    notebook.close()


def test_names_and_roles_are_there_for_screen_readers(page):
    names = page.evaluate(
        "[...document.querySelectorAll('input, select, button, [tabindex]')].map(e => "
        "e.getAttribute('aria-label') || e.labels?.[0]?.textContent.trim() || '')"
    )
    assert all(names)
    assert page.locator("#strip button[aria-pressed=true]").count() == 1
    assert page.get_attribute("#status", "role") == "status"
    assert page.get_attribute("html", "lang") == "en"
