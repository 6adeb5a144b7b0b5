"""One table for terminals, Markdown, CSV and HTML."""

import io

import pytest

from halflife.report.table import GAP, Cell, Table, grouped, pairs, show, styled

TABLE = Table(
    ["model", "loss", "why"],
    [["a[b]|", Cell("1.5", 1.5, "bold"), None], GAP, styled("dim", "<c>", "2", "x, y")],
    "a note", "a title", left=("model", "why"),
)  # fmt: skip


def test_a_pipe_has_the_whole_table(capsys):
    show(TABLE, Table((), [["name", "value"]], title="pairs"))
    title, _, head, _, first, _, second, _, note, other, line = capsys.readouterr().out.splitlines()
    assert (title, note, other) == ("a title", "a note", "pairs")
    assert head.split() == ["model", "loss", "why"]
    assert first.split() == ["a[b]|", "1.5"]  # no markup of rich
    assert second.split() == ["<c>", "2", "x,", "y"]
    assert line.split() == ["name", "value"]


def test_a_long_table_in_a_pipe_is_not_cut(capsys):
    show(Table(["a"], [["x" * 150]]))
    assert "x" * 150 in capsys.readouterr().out


def test_a_reader_that_ends_is_an_error(monkeypatch):
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr("sys.stdout", Closed())
    with pytest.raises(BrokenPipeError):
        show(TABLE)


def test_markdown_and_csv():
    lines = ["| model | loss | why |", "|---|---:|---|", "| a[b]| | **1.5** |  |", "| <c> | 2 | x, y |"]
    assert TABLE.markdown().splitlines() == lines
    assert TABLE.csv() == 'model,loss,why\na[b]|,1.5,\n<c>,2,"x, y"\n'
    assert Table(("n", "x"), [(1, 0.1), (2, None)]).csv() == "n,x\n1,0.1\n2,\n"


def test_html_escapes_and_marks():
    html = TABLE.html()
    assert html.count("<tbody>") == 2
    assert '<td data-value="1.5"><strong>1.5</strong></td>' in html
    assert "&lt;c&gt;" in html
    assert "a note" in html
    named = pairs("Settings", {"layer.width": [1, "é"], "text": "<b>"}).html()
    assert '<tr><th scope="row">layer.<wbr>width</th><td>[1, &#34;é&#34;]</td></tr>' in named
    assert "&lt;b&gt;" in named


def test_groups_are_named_once():
    rows = grouped([("a", [["1"], ["2"]]), ("b", [["3"]])])
    assert rows == [["a", "1"], ["", "2"], GAP, ["b", "3"], GAP]
