"""One table for terminals, Markdown, CSV and HTML, and the intervals in tables."""

import io
import itertools
import math

import numpy as np
import pytest

from halflife.report.intervals import bootstrap, has_learned, with_interval
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
    lines = ["| model | loss | why |", "|---|---:|---|", "| a[b]\\| | **1.5** |  |", "| <c> | 2 | x, y |"]
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


FIVE = [0.1, 0.7, 0.4, 0.45, 0.9]


def test_intervals_of_three_seeds_and_of_fewer():
    assert bootstrap([0.3, 0.1, 0.2]) == pytest.approx((0.2, 0.1, 0.3))
    assert bootstrap([0.25, 0.75])[0] == 0.5
    assert all(math.isnan(end) for values in ([0.2, 0.4], [0.1, 0.2, math.nan]) for end in bootstrap(values)[1:])
    assert math.isnan(bootstrap([])[0])


def test_every_resample_is_counted():
    means = np.sort([np.mean(each) for each in itertools.product(FIVE, repeat=5)])
    mean, low, high = bootstrap(FIVE)
    assert mean == pytest.approx(0.51)
    # With rounding in the sums, a quantile may fall on the neighbouring resample.
    assert low == pytest.approx(np.quantile(means, 0.025, method="inverted_cdf"), abs=1e-12)
    assert high == pytest.approx(np.quantile(means, 0.975, method="inverted_cdf"), abs=1e-12)


@pytest.mark.slow  # for the import of scipy.stats
@pytest.mark.parametrize("values", [FIVE, [*FIVE, *np.linspace(0, 1, 15)]], ids=["all resamples", "drawn resamples"])
def test_scipy_finds_the_same(values):
    stats = pytest.importorskip("scipy.stats")
    other = stats.bootstrap((values,), np.mean, method="percentile", rng=np.random.default_rng(1)).confidence_interval
    assert bootstrap(values)[1:] == pytest.approx((other.low, other.high), abs=0.02)


def test_texts():
    assert with_interval([81.1, 72.8, 80.1], 1) == "78.0 [72.8, 81.1]"
    assert with_interval([50, 60], 1) == "55.0"


def test_a_baseline_has_learned_above_nine_tenths():
    assert has_learned([0.95, 0.85])
    assert not has_learned([0.95, 0.84])
    assert not has_learned([math.nan])
    assert has_learned([0.9])
