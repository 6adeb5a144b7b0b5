"""The playground: three exported models read what is typed, in headless Chromium, and the lens has their numbers."""

import json
import re
import shutil
import subprocess
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "playground"
ABOUT = json.loads((FOLDER / "playground.json").read_text())
TEXT = "Anna is red. Bob is blue. Clara is tall. David is gold. Emma is kind. Bob"
LARGEST = 3_000_000  # bytes of a model


def ids(text):
    """The ids of a text of known words."""
    return [ABOUT["words"].index(w) for w in re.findall(r"\w+", text.lower()) if w not in ("is", "are")]


def test_every_word_has_one_id_and_models_are_small():
    words = [word for word in ABOUT["words"] if word]
    assert len(set(words)) == len(words) == 32 + 32 + 48
    assert not {"is", "are"} & set(words)
    assert ids("anna red the") == [ABOUT[kind][0] for kind in ("names", "values", "others")]
    assert all((FOLDER / f"{name}.onnx").stat().st_size < LARGEST for name in ABOUT["models"])


def run(name, ids):
    """What onnxruntime returns for each token of a text, by the names of the results."""
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(FOLDER / f"{name}.onnx")
    outputs = [one.name for one in session.get_outputs()]
    given = {key: np.zeros(shape, kind) for key, (kind, *shape) in ABOUT["state"][name].items()}
    found = []
    for t, token in enumerate(ids):
        slot = np.eye(ABOUT["slots"], dtype=np.float32)[t]
        found.append(dict(zip(outputs, session.run(None, {"ids": [[token]], "slot": slot, **given}), strict=True)))
        given = {key: found[-1][f"{key}.after"] for key in given}
    return found


@pytest.fixture(scope="module")
def page(browser, tmp_path_factory):
    """The page without the site around it."""
    if not (FOLDER / "vendor" / "ort-wasm-simd-threaded.wasm").exists():
        if shutil.which("npm") is None:
            pytest.skip("there is no npm on this machine")
        subprocess.run(["make", "docs/playground/vendor/installed"], cwd=ROOT, check=True)
    folder = tmp_path_factory.mktemp("site")
    source = (ROOT / "docs" / "playground.md").read_text()
    body = source[source.index("<link") : source.index("</script>")]
    (folder / "index.html").write_text(f'<!doctype html><html lang="en"><title>p</title>{body}</script>')
    (folder / "playground").symlink_to(FOLDER)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    page = browser.new_page(viewport={"width": 360, "height": 640})
    page.said, page.asked = [], []
    page.on("pageerror", lambda error: page.said.append(str(error)))
    page.on("request", lambda request: page.asked.append(request.url))
    page.goto(f"http://127.0.0.1:{server.server_port}/")
    until(page, f"{len(ids(TEXT))} words, read by 3 models")
    yield page
    assert all(url.startswith(page.url) or url.startswith(("blob:", "data:")) for url in page.asked)
    page.close()
    server.shutdown()
    server.server_close()


def until(page, text):
    from playwright.sync_api import expect

    expect(page.locator("#told")).to_contain_text(text, timeout=60_000)


def sections(page):
    return dict(zip(ABOUT["models"], page.locator("#models section").all(), strict=True))


@pytest.mark.slow
def test_the_second_of_five_facts_is_known(page):
    assert page.said == []
    for section in sections(page).values():
        assert section.locator(".answer").inner_text().startswith("✓ bob is blue: right")
        assert section.locator("tr").count() == 6
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.slow
def test_colours_are_the_numbers_of_the_step(page):
    page.fill("#typed", TEXT.replace("Clara", "then we saw Clara"))
    until(page, "14 words")
    last = 13
    for name, section in sections(page).items():
        seen = run(name, ids(TEXT.replace("Clara", "then we saw Clara")))
        for layer in range(ABOUT["layers"]):
            section.locator("select").select_option(f"{layer} 1")
            weights = np.array([one[f"{layer}.weights"][1, :14] for one in seen])
            norms = np.array([one[f"{layer}.norms"][1, :14] for one in seen])
            parts = weights[last] * np.array([one[f"{layer}.size"][1] for one in seen])
            for view, expected in (("read", abs(parts) / abs(parts).max()), ("left", norms[last] / norms.diagonal())):
                page.check(f"[value={view}]")
                colours = section.locator(".words span").evaluate_all(
                    "s => s.map(x => +x.style.getPropertyValue('--a'))"
                )
                assert colours == pytest.approx(np.sqrt(expected.clip(0, 1)), abs=0.002)
    page.check("[value=read]")


@pytest.mark.slow
def test_a_question_far_away_is_forgotten_by_one_and_a_new_fact_is_told(page):
    for section in sections(page).values():
        section.locator("select").select_option("most")
    page.fill("#typed", TEXT)
    until(page, "11 words")
    page.click("#change")
    until(page, "13 words")
    said = {name: section.locator(".answer").inner_text() for name, section in sections(page).items()}
    assert not any("blue: right" in text for text in said.values())
    assert all(said[name].startswith("✓ bob is") for name in ("gated_deltanet", "deltanet"))
    page.click("#again")
    for _ in range(4):
        page.click("#chatter")
    until(page, "211 words")
    said = {name: section.locator(".answer").inner_text() for name, section in sections(page).items()}
    assert said["deltanet"].startswith("✓ bob is blue")
    page.fill("#typed", "the " * 300)
    until(page, "256 words at most; these are 300")
    assert page.said == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # of the exporter
def test_a_file_with_int8_weights_gives_what_the_rounded_model_gives(tmp_path):
    """The numbers of onnxruntime are those of the lens."""
    onnxruntime = pytest.importorskip("onnxruntime")
    import torch
    from playground_step import write_lens
    from test_look_graph import assert_lens, texts, tiny

    for name in ABOUT["models"]:
        model, tokens = tiny(name), torch.randint(0, 64, (11,))
        step = write_lens(model, tmp_path / f"{name}.onnx", slots=11)
        session = onnxruntime.InferenceSession(tmp_path / f"{name}.onnx")

        def once(*given, step=step, session=session):
            named = {key: x.numpy() for key, x in zip(step.input_names, given, strict=True)}
            return [torch.from_numpy(x) for x in session.run(None, named)]

        assert_lens(model, tokens, texts(step, once, tokens), 1e-5)
