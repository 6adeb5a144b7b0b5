"""The report page in headless Chromium, for a small real comparison and a small real run on text."""

import csv
import json
import math
import random
import shutil
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import cases

from halflife.cli import main
from halflife.data.corpus import Corpus, CorpusConfig
from halflife.decay import PoST
from halflife.files import read_json
from halflife.lab.experiments import compare
from halflife.lab.experiments import train as language
from halflife.models import checkpoint
from halflife.models.timescales import layer_decays, timescales
from halflife.report.page.comparison import grid_findings
from halflife.report.page.spectrum import grid
from halflife.report.redraw import write_report
from halflife.training.config import ExecutionConfig

MODELS = ("mamba2", "mamba2+post")
LENGTH = 16
PATIENCE = 120_000  # milliseconds, for busy machines


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    folder = compare.create_comparison(
        MODELS, tasks=("mqar",), seeds=2, output=tmp_path_factory.mktemp("runs") / "one", command="halflife compare",
        settings={
            "steps": 10, "batch_size": 4, "hidden_size": 16, "num_layers": 2, "num_heads": 4, "vocab_size": 128,
            "train_length": LENGTH, "pairs": (2,), "test_examples": 8, "validation_examples": 8, "validate_every": 5,
        },
    )  # fmt: skip
    compare.run_comparison(folder, show=False)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    draw = random.Random(0)
    for i in range(30):
        (folder / f"{i:02}.txt").write_text(" ".join(draw.choice(["slow", "fast", "decay"]) for _ in range(60)) + ".\n")
    cache = tmp_path_factory.mktemp("cache")
    corpus = Corpus.open(
        CorpusConfig(sources=(folder,), context=32, fractions=(0.15, 0.0), cache_dir=cache), show=False
    )
    config = language.configure(
        "rwkv7+post", corpus, tokens=4 * 2 * 32, batch_size=2, learning_rate=1e-2, validate_every=2,
        sizes={"hidden_size": 160, "num_layers": 1, "num_heads": 2}, warmup=0.0,
    )  # fmt: skip
    output = tmp_path_factory.mktemp("run")
    language.run_language(
        config, output, execution=ExecutionConfig(show=False), samples=("slow",), command="halflife train"
    )
    return output


def opened(browser, folder, **context):
    """Open the page of a folder. Collect its messages and its requests while a test uses it."""
    page = browser.new_context(viewport={"width": 1280, "height": 900}, **context).new_page()
    page.set_default_timeout(PATIENCE)
    said, asked = [], []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto((folder / "report.html").as_uri())
    return SimpleNamespace(page=page, said=said, asked=asked, url=(folder / "report.html").as_uri())


@pytest.fixture(scope="module")
def shown(browser, comparison):
    return opened(browser, comparison)


@pytest.fixture(scope="module")
def text(browser, trained):
    return opened(browser, trained)


def until(page, holds, argument=None):
    for _ in range(1200):
        if page.evaluate(holds, argument):
            return
        page.wait_for_timeout(50)
    raise TimeoutError(holds)


def drawn(page, selector):
    """Return the traces of a plot from plotly, after it is drawn."""
    page.locator(selector).first.scroll_into_view_if_needed()
    until(page, "s => document.querySelector(s).data && document.querySelector(s).layout", selector)
    return page.evaluate(
        "s => document.querySelector(s).data.map(({name, x, y, visible}) => ({name, x, y, visible}))", selector
    )


def test_places_on_an_axis_are_not_rounded_to_others(shown):
    """A decay of 0.99962 is not 1, and a step has all of its digits."""
    places = shown.page.evaluate(
        """() => {
          const box = document.body.appendChild(document.createElement("details"));
          const layout = { xaxis: { title: { text: "λ" } }, yaxis: {} };
          const data = [{ name: "a", x: [0.99962, 1234567], y: [1, 2] }];
          const fill = report.tables(box, () => [{ title: "loss", data, layout }]);
          box.open = true;
          fill();
          const found = [...box.querySelectorAll("tbody th")].map((cell) => cell.textContent);
          box.remove();
          return found;
        }"""
    )
    assert places == ["0.99962", "1,234,567"]


def draw_everything(page):
    for plot in page.locator(".plot").all():
        plot.scroll_into_view_if_needed()
        until(page, "e => e.classList.contains('js-plotly-plot')", plot.element_handle())


def number(text):
    return math.nan if text == "–" else float(text.replace(",", "").replace("%", "").strip())


@pytest.mark.parametrize("name", ["shown", pytest.param("text", marks=pytest.mark.slow)])
def test_nothing_is_said_and_nothing_leaves_the_file(name, request):
    used = request.getfixturevalue(name)
    draw_everything(used.page)
    for details in used.page.locator("details").all():
        details.locator("summary").click()
    assert used.said == []
    assert used.asked == [used.url]
    refused = used.page.evaluate("fetch('https://example.org').then(() => 'sent', () => 'refused')")
    assert refused == "refused"
    assert any("Content Security Policy" in line for line in used.said)  # and the cause is not a missing network
    used.said.clear()
    used.asked[1:] = []


def test_the_table_sorts_by_keyboard(shown):
    page = shown.page
    names = lambda: page.locator(".summary tr.first .name").all_inner_texts()  # noqa: E731
    seeds = lambda: page.locator(".summary tbody").first.locator("tr.seed .name").all_inner_texts()  # noqa: E731
    page.reload()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    while page.evaluate("document.activeElement.textContent") != "tokens/s":
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement !== document.body"), "the heading is out of the keyboard's reach"
    values = {
        row.locator(".name").inner_text(): number(row.locator("td").nth(-2).inner_text())  # before the learning rate
        for row in page.locator(".summary tr.first").all()
    }
    head = page.locator("th", has=page.get_by_role("button", name="tokens/s", exact=True))
    for order in ("descending", "ascending"):
        page.keyboard.press("Enter")
        assert head.get_attribute("aria-sort") == order
        assert names() == sorted(values, key=lambda name: values[name], reverse=order == "descending")
        assert seeds() == ["seed 0", "seed 1"]
        assert order in page.locator("#status").inner_text()
    page.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") is None
    assert [name.split()[0] for name in names()] == list(MODELS)
    page.get_by_role("button", name="model", exact=True).click()
    page.get_by_role("button", name="model", exact=True).click()
    assert [name.split()[0] for name in names()] == ["mamba2+post", "mamba2"]
    assert page.locator("th[aria-sort]").count() == 1


def choose(page, label, layer="0"):
    page.locator("#model").select_option(label=label)
    page.locator("#layer").select_option(label=layer)


def test_the_slider_stretches_the_spectrum_of_post_alone(shown, comparison):
    page = shown.page
    positions = grid(LENGTH)
    for name in MODELS:
        choose(page, f"{name}, seed 1", "1")
        [folder] = comparison.glob(f"{name}/lr*-seed1")
        decay = dict(layer_decays(checkpoint.load(folder)))[1]
        slider = page.locator("#position")
        slider.focus()
        page.keyboard.press("Home")
        assert page.locator("#at").inner_text() == "t = 1 (0.063 T)"
        seen = []
        for t in (1, *positions[positions.index(LENGTH) :]):
            while page.locator("#at").inner_text().split(" (")[0] != f"t = {t}":
                page.keyboard.press("ArrowRight")
            [trace] = [one for one in drawn(page, "#scales") if one["name"] == "trained"]
            expected = decay.timescales(t).detach()
            torch.testing.assert_close(torch.tensor(trace["y"]), expected, rtol=5e-4, atol=0)  # 4 digits are written
            seen.append(trace["y"][0])
            cells = page.locator("#channels tbody tr").first.locator("td").all_inner_texts()
            assert number(cells[0]) == pytest.approx(seen[-1], rel=5e-4)
            assert number(cells[1]) == pytest.approx(seen[-1] * math.log(2), rel=1e-3)
        assert page.locator("#at").inner_text() == f"t = {16 * LENGTH} (16 T)"
        assert slider.get_attribute("aria-valuetext") == page.locator("#at").inner_text()
        growth = float(decay.taper().detach()[0]) if isinstance(decay, PoST) else 0.0
        assert seen[-1] / seen[0] == pytest.approx((16 * LENGTH) ** growth, rel=1e-3)
        assert growth == (name == "mamba2+post")  # α is 1 for the slowest channel


@pytest.mark.parametrize("name", ["shown", "text"])
def test_the_response_is_what_the_recurrence_leaves(name, request, comparison, trained):
    """The response is the product of every step's decay at zero input. Python computes it token by token."""
    page = request.getfixturevalue(name).page
    if name == "shown":
        choose(page, "mamba2+post, seed 0")
        [folder] = comparison.glob("mamba2+post/lr*-seed0")
    else:
        folder = trained
    page.locator("#position").focus()
    page.keyboard.press("End")
    t = grid(LENGTH if name == "shown" else 32)[-1]
    scales = timescales(checkpoint.load(folder), range(1, t + 1))[0].timescales.values()
    rates = 1 / torch.tensor([*scales], dtype=torch.float64)
    traces = drawn(page, "#response")
    assert len(traces) == min(12, rates.shape[1])
    for trace in traces:
        own = rates[:, int(trace["name"].split()[1]) - 1].flip(0).cumsum(0)
        expected = torch.exp(-own[torch.tensor(trace["x"]) - 1])
        # Measured: 7e-5, from time-scales of 4 digits and, for RWKV-7, from their interpolation between positions.
        torch.testing.assert_close(torch.tensor(trace["y"]).double(), expected, rtol=0, atol=2.8e-4)


def test_thicker_lines_are_slower_at_t(browser, comparison, tmp_path):
    """The time-scales of two channels cross; the thicker line changes with the position."""
    html = (comparison / "report.html").read_text()
    start = html.index(">", html.index('id="data"')) + 1
    data = json.loads(html[start : (end := html.index("</script>", start))])
    own = data["spectra"]["models"][0]
    own["positions"] = [1, 16, 256]
    own["layers"][0] |= {"total": 2, "channels": [1, 2], "trained": [[9, 3], [9, 5], [9, 40]], "initial": None}
    (tmp_path / "report.html").write_text(html[:start] + json.dumps(data) + html[end:])
    page = opened(browser, tmp_path).page
    page.locator("#model").select_option("0")
    slowest = []
    for place in range(3):
        page.locator("#position").evaluate("(e, v) => { e.value = v; e.dispatchEvent(new Event('input')) }", place)
        page.locator("#response").scroll_into_view_if_needed()
        until(page, "document.querySelector('#response').data?.length === 2")
        lines = page.evaluate("document.querySelector('#response').data.map((d) => [d.line.width, d.name])")
        slowest.append(max(lines)[1])
    assert slowest == ["channel 1", "channel 1", "channel 2"]


def test_many_channels_are_thinned_out(text, trained):
    page = text.page
    assert page.locator("#note").inner_text() == "The plot shows 64 evenly chosen key channels of 160 in each layer."
    [start, now] = drawn(page, "#scales")
    assert (start["name"], now["name"], len(now["x"]), now["x"][0], now["x"][-1]) == ("initial", "trained", 64, 1, 160)
    assert page.locator("#channels tbody tr").count() == 64


def test_hovering_shows_the_value(shown, comparison):
    page = shown.page
    traces = drawn(page, "[data-plot=accuracy] .plot")
    box = page.locator("[data-plot=accuracy] .plot").first.bounding_box()
    at = page.evaluate(
        "(name) => { const e = document.querySelector('[data-plot=accuracy] .plot');"
        "const one = e.data.find((trace) => trace.name === name), {xaxis, yaxis} = e._fullLayout;"
        "return [xaxis._offset + xaxis.d2p(one.x[1]), yaxis._offset + yaxis.d2p(one.y[1])]; }",
        "mamba2+post",
    )
    page.mouse.move(box["x"] + at[0], box["y"] + at[1])
    page.locator(".hoverlayer .hovertext").first.wait_for()
    text = page.locator(".hoverlayer").first.text_content()
    length = traces[-1]["x"][1]
    value = pytest.approx(number(text.split(f"{length} tokens: ")[1]) / 100, abs=5.01e-5)
    assert [one for one in traces if text.startswith(one["name"]) and one["y"][1] == value]  # lines may coincide


def test_buttons_hide_lines_and_zoom_can_be_reset(shown):
    page = shown.page
    plot = "[data-plot=accuracy] .plot"
    drawn(page, plot)
    button = page.locator("[data-plot=accuracy]").get_by_role("button", name="mamba2", exact=True)
    button.focus()
    page.keyboard.press("Space")
    assert button.get_attribute("aria-pressed") == "false"
    hidden = {one["name"] for one in drawn(page, plot) if one["visible"] is False}
    assert hidden == {"mamba2", "mamba2, seed 0", "mamba2, seed 1"}
    button.click()
    assert not [one for one in drawn(page, plot) if one["visible"] is False]
    before = page.evaluate("s => document.querySelector(s)._fullLayout.yaxis.range", plot)
    page.evaluate("s => Plotly.relayout(document.querySelector(s), {'yaxis.range': [0.2, 0.4]})", plot)
    page.locator("[data-plot=accuracy] .reset").click()
    assert page.evaluate("s => document.querySelector(s)._fullLayout.yaxis.range", plot) == before


@pytest.mark.slow
def test_themes(browser, shown, comparison):
    page = shown.page
    drawn(page, "[data-plot=accuracy] .plot")
    colour = lambda p: p.evaluate("getComputedStyle(document.body).backgroundColor")  # noqa: E731
    ink = lambda p: p.evaluate("document.querySelector('[data-plot=accuracy] .plot').layout.font.color")  # noqa: E731
    light, light_ink = colour(page), ink(page)
    page.get_by_role("button", name="Dark theme").click()
    assert page.locator("#theme").get_attribute("aria-pressed") == "true"
    assert page.locator("#status").inner_text() == "Dark theme"
    assert (light, light_ink) == ("rgb(255, 255, 255)", "rgb(31, 35, 40)")
    dark, dark_ink = colour(page), ink(page)
    assert (dark, dark_ink) == ("rgb(18, 22, 27)", "rgb(230, 237, 243)")
    page.get_by_role("button", name="Dark theme").click()
    assert (colour(page), ink(page)) == (light, light_ink)
    night = opened(browser, comparison, color_scheme="dark").page
    drawn(night, "[data-plot=accuracy] .plot")
    assert (colour(night), ink(night)) == (dark, dark_ink)
    assert night.locator("#theme").get_attribute("aria-pressed") == "true"


@pytest.mark.slow
def test_narrow_screens_need_no_sideways_scrolling(browser, comparison, trained):
    for folder in (comparison, trained):
        page = opened(browser, folder).page
        page.set_viewport_size({"width": 400, "height": 800})
        draw_everything(page)
        assert page.evaluate("document.documentElement.scrollWidth") == 400
        page.set_viewport_size({"width": 380, "height": 800})  # plots follow the width
        fit = "(e) => e.layout.width === e.clientWidth && e.clientWidth < 380"
        until(page, f"() => [...document.querySelectorAll('.plot')].every({fit})")
    box = page.locator(".wide").first
    assert box.get_attribute("tabindex") == "0"


@pytest.mark.slow
def test_paper_shows_every_plot_in_light_colours(browser, comparison):
    page = opened(browser, comparison, color_scheme="dark").page
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    inks = page.evaluate("[...document.querySelectorAll('.plot')].map((plot) => plot.layout?.font.color)")
    assert set(inks) == {"rgb(31, 35, 40)"}
    too_wide = "all => all.filter((e) => e.layout.width > e.parentElement.clientWidth || e.layout.width > 720).length"
    assert page.locator(".plot").evaluate_all(too_wide) == 0
    cut = "all => all.filter((e) => e.scrollWidth > e.clientWidth + 1).length"
    assert page.locator(".wide").evaluate_all(cut) == 0
    assert page.locator(".more:not([open])").count() == 0
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(18, 22, 27)"
    assert page.pdf().startswith(b"%PDF")


@pytest.mark.parametrize("name", ["shown", "text"])
def test_everything_has_a_name(name, request):
    page = request.getfixturevalue(name).page
    name_of = "all => all.map((e) => (e.labels?.[0] ?? e).textContent.trim())"
    controls = page.locator("button, select, input").evaluate_all(name_of)
    assert len(controls) > 10
    assert all(controls)
    names = page.locator(".plot").evaluate_all("all => all.map((e) => [e.getAttribute('role'), e.ariaLabel])")
    assert len({label for _, label in names}) == len(names) > 2
    assert all(role == "img" and len(label) > 20 for role, label in names)
    headings = [int(tag[1]) for tag in page.locator("h1, h2, h3, h4").evaluate_all("all => all.map((e) => e.tagName)")]
    assert headings[0] == 1
    assert all(b - a <= 1 for a, b in pairwise(headings))


@pytest.mark.parametrize("name", ["shown", "text"])
def test_captions_have_two_lines_and_the_rest_behind_a_click(name, request):
    page = request.getfixturevalue(name).page
    lines = """all => all.map((e) => {
        const more = e.querySelector(".more"), range = document.createRange();
        range.selectNodeContents(e);
        if (more) range.setEndBefore(more);
        return new Set([...range.getClientRects()].map((box) => Math.round(box.top))).size;
    })"""
    counts = page.locator("figcaption, .summary caption > span").evaluate_all(lines)
    assert len(counts) > 2
    assert max(counts) <= 2
    more = page.locator(".more").first
    before = more.get_attribute("open")  # another test may have opened it
    page.locator(".more summary").first.click()
    assert (more.get_attribute("open") is None) != (before is None)


def tables(page, name):
    """Return the numbers under a figure's Data: for each panel a dict from (row, column) to text."""
    details = page.locator(f"[data-plot={name}] .data")
    if details.get_attribute("open") is None:
        details.locator("summary").click()
    details.locator(".wide").nth(page.locator(f"[data-plot={name}] .plot").count() - 1).wait_for()
    found = []
    for table in details.locator("table").all():
        rows = table.evaluate("t => [...t.rows].map((row) => [...row.cells].map((cell) => cell.textContent))")
        found.append({(row[0], head): cell for row in rows[1:] for head, cell in zip(rows[0], row, strict=True)})
    return found


def test_tables_under_plots_have_the_numbers_of_the_results(shown, comparison):
    rows = list(csv.DictReader((comparison / "results.csv").read_text().splitlines()))
    tests = ("capacity", "lag")
    for test, found in zip(tests, tables(shown.page, "accuracy"), strict=True):
        for row in (row for row in rows if row["test"] == test):
            at = row["lag" if test == "lag" else "length"]
            cell = found[f"{int(at):,}", f"{row['model']}, seed {row['seed']}"]
            assert number(cell) == pytest.approx(100 * float(row["accuracy"]), abs=0.00501)
    loss, accuracy = tables(shown.page, "training")
    [folder] = comparison.glob("mamba2/lr*-seed0")
    for line in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        if "loss" in line:
            assert number(loss[str(line["step"]), "mamba2, seed 0"]) == pytest.approx(line["loss"], rel=1e-4)
        if "validation_accuracy" in line:
            cell = accuracy[str(line["step"]), "mamba2, seed 0"]
            assert number(cell) == pytest.approx(100 * line["validation_accuracy"], abs=0.00501)
    assert len({step for step, _ in loss}) == 1  # one log every 20 steps
    assert len({step for step, _ in accuracy}) == 2


def test_a_run_on_text_shows_its_numbers(text, trained):
    result = read_json(trained / "result.json")
    assert text.page.locator(".samples").inner_text().strip() == (trained / "samples.txt").read_text().strip()
    perplexity, position = tables(text.page, "length")
    for row in result["lengths"]:
        assert number(perplexity[f"{row['length']:,}", "rwkv7+post"]) == pytest.approx(row["perplexity"], rel=1e-4)
    for bucket in result["positions"]:
        bits = bucket["loss"] / math.log(2)
        assert number(position[f"{bucket['last']:,}", "rwkv7+post"]) == pytest.approx(bits, rel=1e-4)
    assert text.page.locator(".summary tr.first").count() == len(result["lengths"])
    assert f"{result['parameters']:,}" in text.page.locator(".pairs").first.inner_text()
    assert "halflife train" in text.page.locator(".command").first.inner_text()


@pytest.mark.slow
def test_commands_are_copied(browser, comparison):
    used = opened(browser, comparison, permissions=["clipboard-read", "clipboard-write"])
    used.page.get_by_role("button", name="Copy").first.click()
    until(used.page, "() => document.getElementById('status').textContent === 'Copied'")
    assert used.page.evaluate("navigator.clipboard.readText()") == "halflife compare"


def test_an_unfinished_run_on_text_has_its_curves(trained, tmp_path):
    folder = shutil.copytree(trained, tmp_path / "run")
    for name in ("result.json", "model.safetensors"):
        (folder / name).unlink()
    lines = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(lines + '{"step": 9')  # a file that is being written
    page = write_report(folder).read_text()
    assert "the run has not finished" in page
    assert "not finished</span>" in page
    assert 'data-plot="loss"' in page
    assert "explorer" not in page[: page.index('id="data"')]


@pytest.mark.slow
def test_figures_are_drawn_anew_from_saved_data(comparison, trained, tmp_path, capsys):
    folder = shutil.copytree(trained, tmp_path / "run")
    shutil.rmtree(folder / "figures")
    corpus = tmp_path / "text.txt"
    corpus.write_text("slow fast decay " * 40)
    main(["spectrum", str(folder), "--text", str(corpus), "--length", "16", "--sequences", "2", "--quiet"])
    (folder / "spectrum" / "decays.svg").unlink()
    capsys.readouterr()
    main(["figures", str(folder), "--formats", "png", "svg", "pdf"])
    files = capsys.readouterr().out.split()
    names = ("figures/length", "figures/loss", "spectrum/decays")
    expected = [str(folder / f"{name}.{suffix}") for name in names for suffix in ("png", "svg", "pdf")]
    assert files[: len(expected)] == expected
    assert files[-1] == str(folder / "report.html")
    assert all(Path(file).stat().st_size for file in files)
    starts = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}
    for suffix, start in starts.items():
        assert (folder / "figures" / f"loss.{suffix}").read_bytes().startswith(start)


@cases(
    "where, more, message",
    ("", [], "a comparison's folder holds config.json"),
    ("/one", ["--formats", "gif"], "unknown format 'gif'; choose from png, svg, pdf"),
    ("/one/mamba2/*-seed0", [], "is one run of a comparison"),
)
def test_wrong_folders_and_formats_are_named(comparison, where, more, message, refused):
    [folder] = comparison.parents[1].glob(f"{comparison.parent.name}{where}")
    assert message in refused("figures", str(folder), *more)


def test_a_diverged_seed_is_no_advantage():
    """A mean over the seeds that are left is too good: such a model ranks last, as in the tables."""
    losses = {"whole": {"0": {"test": 1.2}, "1": {"test": 1.3}}, "diverged": {"1": {"test": 1.0}}}
    (text,) = grid_findings({"results": losses, "findings": []})
    assert text.startswith("whole has the lowest test loss")
    (text,) = grid_findings({"results": {"diverged": losses["diverged"]}, "findings": []})
    assert "1.0000 (1 seed)" in text


@pytest.mark.slow
def test_weights_of_another_version_are_told(comparison, tmp_path):
    folder = shutil.copytree(comparison, tmp_path / "run")
    for weights in folder.glob("mamba2/*/model.safetensors"):
        weights.write_bytes(weights.read_bytes()[:-9])
    assert (
        "The weights are damaged, or of another version. The plot shows the time-scales measured after training"
        in write_report(folder).read_text()
    )
