"""How much a reader has to read: the words of the site, and the shape of a page of results."""

import re
from pathlib import Path

import pytest
from helpers import cases

DOCS = Path(__file__).parent.parent / "docs"
MOST_WORDS = 60_000  # of all pages but those of `WITHOUT_LIMIT`
WITHOUT_LIMIT = ("claims.md", "log.md")  # a table of every claim, and a diary
MOST_SENTENCES = 10  # of a page of results, outside of folded parts and tables

FOLDED = re.compile(r"^<details\b.*?^</details>$", re.M | re.S)
COMMENT_OR_CODE = re.compile(r"<!--.*?-->|^```.*?^```$", re.M | re.S)
TABLE = re.compile(r"(?:^\|[^\n]*\n?)+", re.M)
PICTURE = re.compile(r"^!\[[^\n]*\]\([^\n]*\)$", re.M)
SENTENCE_END = re.compile(r"[.!?][*)\]\"”]*(?=\s|$)")


def shown(text):
    """The part of a page that a reader sees before unfolding anything, without comments and code."""
    return COMMENT_OR_CODE.sub("", FOLDED.sub("", text))


def sentences(text):
    prose = PICTURE.sub("", TABLE.sub("", text))
    return len(SENTENCE_END.findall(re.sub(r"^#.*$", "", prose, flags=re.M)))


def test_the_site_can_be_read():
    pages = [page for page in DOCS.rglob("*.md") if page.name not in WITHOUT_LIMIT]
    words = {page: len(page.read_text(encoding="utf-8").split()) for page in pages}
    longest = sorted(words, key=words.__getitem__)[-5:]
    assert sum(words.values()) <= MOST_WORDS, [(page.name, words[page]) for page in longest]


@pytest.mark.parametrize("page", sorted((DOCS / "results").glob("*.md")), ids=lambda page: page.stem)
def test_a_page_of_results_is_a_verdict_a_picture_a_table_and_ten_sentences(page):
    text = page.read_text(encoding="utf-8")
    seen = shown(text)
    assert re.match(r"# [^\n]+\n\n\*\*", text), "the verdict stands first, in bold"
    assert (len(PICTURE.findall(seen)), len(TABLE.findall(seen))) == (1, 1)
    assert sentences(seen) <= MOST_SENTENCES
    assert text.count("<details") == len(FOLDED.findall(text))


def test_every_picture_and_file_of_results_is_shown_or_linked():
    pages = "".join(page.read_text(encoding="utf-8") for page in DOCS.rglob("*.md"))
    files = {file.name for file in (DOCS / "results").iterdir() if file.suffix != ".md"} - {"claims_costs.json"}
    assert {name for name in files if name not in pages} == set()


@cases(
    "text, count",
    ("# A title.\n\n**It holds (0.5 %).** And *so on.*\n", 2),
    ("One, e.g. 1.5, of `a.b.c`?\n\n![A picture. Of two.](a.png)\n\n| a. | b. |\n|---|---|\n", 2),
    ('<details markdown="1">\n<summary>Folded.</summary>\n\nMore. And more.\n\n</details>\n', 0),
)
def test_sentences_are_counted(text, count):
    assert sentences(shown(text)) == count
