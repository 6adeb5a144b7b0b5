"""The notebooks in docs/notebooks: what is stored in them, and that every cell runs."""

import importlib.util
import json
import os
import re
import shutil
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from test_package import ROOT, build, chosen, declared, link

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
LARGEST = 500_000  # bytes, because a checkout has them all


def cells(path, kind="code"):
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == kind]


def extras(text):
    """The extras that the first cell installs, of the checkout two folders up."""
    (named,) = re.findall(r"%pip install --quiet '\.\./\.\.\[(.+)\]'", text)
    return named.split(",")


def pictures(cell):
    return sum("image/png" in output.get("data", {}) for output in cell.get("outputs", []))


@each
def test_it_is_stored_with_pictures_and_without_errors(path):
    outputs = [output for cell in cells(path) for output in cell["outputs"]]
    assert len(NOTEBOOKS) == 2
    assert path.stat().st_size < LARGEST
    assert any(map(pictures, cells(path)))
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
    assert [cell["execution_count"] for cell in cells(path)] == list(range(1, len(cells(path)) + 1))
    assert "/tmp" not in path.read_text()


@each
def test_its_first_cell_installs_what_is_missing_and_its_links_lead_somewhere(path):
    first = "".join(cells(path)[0]["source"])
    declared = (ROOT / "pyproject.toml").read_text()
    assert all(re.search(rf"^{extra} = \[", declared, re.M) for extra in extras(first))
    assert f"halflife-lm[{','.join(extras(first))}]" in first  # for the day on which the package is published
    assert "find_spec" in first
    text = "".join(line for cell in cells(path, "markdown") for line in cell["source"])
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith("https://")]
    assert links
    assert all((path.parent / link).exists() for link in links)


@pytest.fixture(scope="module")
def badges():
    specification = importlib.util.spec_from_file_location("badges", ROOT / ".ci" / "badges.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@each
def test_its_badge_of_colab_is_that_of_the_address_in_pyproject(path, badges):
    pyproject, notebook = (ROOT / "pyproject.toml").read_text(), path.relative_to(ROOT).as_posix()
    text = "".join(cells(path, "markdown")[0]["source"])
    assert badges.with_badge(text, badges.badge(pyproject, notebook)) == text


def test_badges_follow_the_address_of_the_repository(badges, tmp_path):
    (tmp_path / "docs/notebooks").mkdir(parents=True)
    path = Path(shutil.copy(NOTEBOOKS[0], tmp_path / "docs/notebooks/x.ipynb"))
    before = json.loads(path.read_text())
    target = "https://colab.research.google.com/github/{}/blob/main/docs/notebooks/x.ipynb"
    for address, name in (("https://github.com/me/a", "me/a"), ("https://github.com/you/b.git", "you/b")):
        (tmp_path / "pyproject.toml").write_text(f'[project.urls]\nRepository = "{address}"\n')
        badges.main(tmp_path)
        first, *rest = cells(path, "markdown")[0]["source"]
        assert (
            first
            == f"[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({target.format(name)})\n"
        )
        assert rest == cells(NOTEBOOKS[0], "markdown")[0]["source"]
    (tmp_path / "pyproject.toml").write_text('[project.urls]\nRepository = "https://example.org/me/a"\n')
    badges.main(tmp_path)
    assert json.loads(path.read_text()) == before


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build(ROOT, tmp_path_factory.mktemp("wheel"))[1]


def like_colab(path, wheel, folder, monkeypatch):
    """Set up a kernel named `bare` like Colab's: without halflife, and with what its requirements need and no more."""
    environment = venv.EnvBuilder(symlinks=True)
    environment.create(folder / "bare")
    site = next((folder / "bare").glob("lib/python*/site-packages"))
    needed = [r for extra in ("", *extras(path.read_text())) for r in chosen(declared(wheel), extra)]
    link([*needed, *map(Requirement, ("ipykernel", "pip", "hatchling"))], site)
    argv = [str(folder / "bare/bin/python"), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (folder / "kernels/bare").mkdir(parents=True)
    kernel = {"argv": argv, "display_name": "bare", "language": "python"}
    (folder / "kernels/bare/kernel.json").write_text(json.dumps(kernel))
    for name in [name for name in os.environ if name.startswith(("PIP_", "PYTHONPATH"))]:
        monkeypatch.delenv(name)
    settings = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_CONFIG_FILE": os.devnull}
    settings |= {"JUPYTER_PATH": folder, "IPYTHONDIR": folder / "ipython", "HALFLIFE_CACHE": folder / "cache"}
    for name, value in settings.items():
        monkeypatch.setenv(name, str(value))
    return site


@each
@pytest.mark.slow
def test_every_cell_runs_and_the_first_installs_the_checkout(path, wheel, tmp_path, monkeypatch):
    """Pip builds the package from the checkout in which the notebook lies, and finds what it requires installed."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    site = like_colab(path, wheel, tmp_path, monkeypatch)
    assert not (site / "halflife").exists()
    book = nbformat.read(path, 4)
    stored = [pictures(cell) for cell in book.cells]
    notebooks = tmp_path / "checkout" / "docs" / "notebooks"
    notebooks.mkdir(parents=True)
    shutil.copytree(ROOT / "halflife", tmp_path / "checkout" / "halflife", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / "checkout" / name)
    resources = {"metadata": {"path": str(notebooks)}}
    nbclient.NotebookClient(book, timeout=600, kernel_name="bare", resources=resources).execute()
    assert (site / "halflife" / "__init__.py").exists()
    assert [pictures(cell) for cell in book.cells] == stored
    assert not list(notebooks.iterdir())
