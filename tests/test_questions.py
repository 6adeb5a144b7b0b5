"""What a stranger asks first: a line of the README leads to a page whose first screen has the answer."""

import re
from pathlib import Path

import pytest
from test_site import site  # noqa: F401 (a fixture)

ROOT = Path(__file__).parent.parent
FIRST_WORDS = 170  # of a page, which fit a screen
# Question → words of the line in the README, the page that it links to, and what its first screen must say.
QUESTIONS = {
    "which model for recall?": ("for recall", "results/overview", ("recall", "DeltaNet, Gated DeltaNet, DeltaProduct")),
    "which model for text?": ("for text", "results/overview", ("for text Mamba-2",)),
    "which model for speed?": ("for speed", "results/overview", ("for speed HGRN2, Simple Decay or TNL",)),
    "why does mine forget?": ("why your model forgets", "how-to/why-it-forgets", (
        "halflife diagnose", "faded", "overwritten", "a slower decay", "a larger state")),
    "how do I add a decay?": ("add a decay", "how-to/add-a-decay", (
        "a class with log_decay", '@DECAYS.add("halving")', "halflife --import halving compare simple halving")),
}  # fmt: skip
SEEN = """() => [...document.querySelectorAll("article p, article li, article td, article code")]
    .filter(one => one.getBoundingClientRect().bottom <= innerHeight).map(one => one.innerText).join(" ")"""
each = pytest.mark.parametrize("question", QUESTIONS)


@each
def test_the_readme_leads_to_a_page_that_begins_with_the_answer(question):
    asked, page, answers = QUESTIONS[question]
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert any(asked in line and f"](docs/{page}.md)" in line for line in lines)
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    begin = " ".join(re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text).replace("`", "").split()[:FIRST_WORDS])
    assert not [answer for answer in answers if answer not in begin]


@pytest.mark.slow
def test_the_first_screen_of_each_page_has_the_answers(site, browser):  # noqa: F811
    """In a window of 1280 × 800, above its lower edge."""
    missing = []
    page = browser.new_page(viewport={"width": 1280, "height": 800})
    for question, (_, name, answers) in QUESTIONS.items():
        page.goto((site / f"{name}.html").as_uri())
        seen = page.evaluate(SEEN)
        missing += [(question, answer) for answer in answers if answer not in " ".join(seen.split())]
    assert not missing
