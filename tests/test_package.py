"""The distribution: what the archives hold, what an installation without extras can do, and what errors ask for.

The bare environment is a venv. The distributions that the wheel requires are linked there from this environment, with
all that they need and nothing else. Then pip, which may not use an index, installs the wheel; it refuses if a
requirement of the wheel is not met. An installation of torch from its archive would take half a minute.
"""

import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from email.parser import Parser
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from helpers import assert_raises
from packaging.requirements import Requirement
from test_house import MODULES, imports

import halflife
from halflife.extras import EXTRAS, install, missing, require

ROOT = Path(__file__).parent.parent
ANNOTATIONS_AND_BACKENDS = {"jaxtyping", "triton"}  # without them halflife uses stand-ins, and other backends
BARE = """
import sys, torch, halflife
assert halflife.ops.selfcheck("cpu", length=3).ok
config = halflife.preset("mamba2+post+gate_rank", hidden_size=16, num_layers=1, vocab_size=256, train_length=8)
model = halflife.LanguageModel(config)
logits, state = model(torch.arange(9)[None])
logits.logsumexp(-1).mean().backward()
assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
session = halflife.Session(model)
assert len(list(session.feed("x").write(3))) > 0
for room in ("analysis", "evaluation", "lab.theory", "data.corpus", "models.load", "models.convert", "cli"):
    __import__("halflife." + room)
try:
    halflife.hf
except ImportError as error:
    print(error)
halflife.cli.main(["list"])
"""


def run(*command, **options):
    """The finished process, without variables of the environment that tell pip of other places."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "PYTHONPATH"))}
    environment = {**clean, "PIP_CONFIG_FILE": os.devnull, "SETUPTOOLS_USE_DISTUTILS": "stdlib"}
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment, **options)


def build(source, output):
    """Build both archives of the tree `source`. Return them as (source archive, wheel)."""
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--directory", str(output)],
        cwd=source,
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    return next(output.glob("*.tar.gz")), next(output.glob("*.whl"))


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    return build(ROOT, tmp_path_factory.mktemp("archives"))


def declared(wheel):
    """The requirements that the wheel declares."""
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(f"{wheel.name.rsplit('-', 3)[0]}.dist-info/METADATA").decode()
    return [Requirement(line) for line in Parser().parsestr(text).get_all("Requires-Dist")]


@pytest.fixture(scope="module")
def requirements(archives):
    return declared(archives[1])


def chosen(requirements, extra=""):
    return [r for r in requirements if r.marker is None or r.marker.evaluate({"extra": extra})]


def closure(requirements, seen=None):
    """The installed distributions that the requirements need, directly or not, by name."""
    seen = {} if seen is None else seen
    for requirement in requirements:
        name = requirement.name.lower().replace("_", "-")
        if name not in seen:
            seen[name] = distribution = metadata.distribution(name)
            inner = [Requirement(line) for line in distribution.requires or []]
            closure([r for extra in ("", *requirement.extras) for r in chosen(inner, extra)], seen)
    return seen


def link(requirements, target):
    """Link the distributions of `requirements` into `target`."""
    for distribution in closure(requirements).values():
        for part in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
            if not (target / part).exists():
                (target / part).symlink_to(Path(distribution.locate_file(part)))


def files():
    """The files of the package that git knows or will know."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "halflife"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}


def test_the_archives_hold_the_package_and_nothing_else(archives):
    source, wheel = archives
    name = f"halflife_lm-{halflife.__version__}"
    with zipfile.ZipFile(wheel) as archive:
        held = {n for n in archive.namelist() if not n.startswith(f"{name}.dist-info/")}
    assert held == files()
    assert {
        "halflife/py.typed",
        "halflife/report/page/report.js",
        "halflife/report/page/report.html.jinja",
        "halflife/report/page/vendor/plotly-cartesian.min.js",
        "halflife/report/page/vendor/LICENSE",
    } < held
    with tarfile.open(source) as archive:
        held = {n.removeprefix(f"{name}/") for n in archive.getnames()}
    assert {n for n in held if "/" in n} == files()
    assert held - files() == {
        "CHANGELOG.md", "CITATION.cff", "LICENSE", "README.md", "constraints.txt", "pyproject.toml", ".gitignore",
        "PKG-INFO",
    }  # fmt: skip


def test_the_archives_are_the_same_to_the_byte_wherever_they_are_built(archives, tmp_path):
    """Built again, from the source archive, whose files have other times."""
    with tarfile.open(archives[0]) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    tree = next((tmp_path / "source").iterdir())
    for path in tree.rglob("*"):
        os.utime(path, (1e9, 1e9))
    again = build(tree, tmp_path / "again")
    assert [path.name for path in again] == [path.name for path in archives]
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in archives]


def test_the_version_stands_in_one_place_and_the_citation(archives):
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == halflife.__version__
    assert all(halflife.__version__ in path.name for path in archives)
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()


def test_the_base_needs_three_packages_and_torch_has_no_upper_cap(requirements):
    torch = next(r for r in requirements if r.name == "torch" and r.marker is None)
    assert {spec.operator for spec in torch.specifier} == {">="}
    pinned = (ROOT / "constraints.txt").read_text()
    assert re.search(r"^torch==2\.(11|12|13)\.", pinned, re.M)  # of these there are builds without CUDA
    assert {r.name for r in chosen(requirements)} == {"torch", "numpy", "safetensors"}


def test_every_package_that_is_imported_has_an_extra_that_installs_it(requirements):
    used = {name.partition(".")[0] for path in MODULES for name in imports(path)}
    base = {"torch", "numpy", "safetensors", "halflife", *sys.stdlib_module_names}
    assert used - base - ANNOTATIONS_AND_BACKENDS <= EXTRAS.keys()
    owners = metadata.packages_distributions()
    for package, extra in EXTRAS.items():
        direct = [r for r in chosen(requirements, extra) if r.marker is not None]
        if package not in owners:  # one of those that `make slow` alone installs, whose distributions have their names
            assert package in {r.name for r in direct}, f"{extra} does not install {package}"
            continue
        installed = {name.lower().replace("_", "-") for name in owners[package]}
        assert installed & closure(direct).keys(), f"{extra} does not install {package}"


def test_all_has_what_every_command_needs(requirements):
    # fla-core is for GPUs alone, and ONNX for one command. Of the heavy trackers a person uses one at most.
    extras = set(EXTRAS.values()) - {"gpu", "onnx", "wandb", "trackio", "mlflow"}
    assert {r.name for r in chosen(requirements, "all")} == {r.name for e in extras for r in chosen(requirements, e)}


def test_an_error_about_a_package_says_what_installs_it(monkeypatch):
    error = missing("x", "matplotlib")
    assert isinstance(error, ImportError)
    assert str(error) == f"x needs matplotlib: pip install -e '{ROOT}[report]'"
    assert install("train", "report", "train") == f"pip install -e '{ROOT}[train,report]'"
    monkeypatch.setitem(EXTRAS, "nosuch", "train")
    assert_raises(ImportError, r"^x needs nosuch: ", require, "x", "numpy", "nosuch")


@pytest.mark.slow
def test_the_core_runs_without_extras_and_the_command_line_without_the_other_extras(archives, requirements, tmp_path):
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    packages, programs = next(tmp_path.glob("bare/lib/python*/site-packages")), tmp_path / "bare" / "bin"
    link(chosen(requirements), packages)
    pip = (sys.executable, "-m", "pip", "--python", programs / "python")
    done = run(*pip, "install", "--quiet", "--no-index", "--no-compile", archives[1])
    assert done.returncode == 0, done.stderr
    done = run(programs / "python", "-W", "error", "-c", BARE, cwd=tmp_path)
    assert done.stdout.splitlines() == ["halflife.hf needs transformers: pip install 'halflife-lm[train]'"]
    assert (done.returncode, done.stderr) == (
        2,
        "halflife: the command line needs tyro: pip install 'halflife-lm[cli]', or pip install 'halflife-lm[all]' for "
        "every command\n",
    )
    link(chosen(requirements, "cli"), packages)
    done = run(programs / "halflife", "list", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert "gated_deltanet" in done.stdout
    done = run(programs / "halflife", "compare", "mamba2", "--steps", "1", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    needed = "transformers, accelerate, matplotlib"  # torch itself needs filelock and jinja2
    assert done.stderr == f"halflife: halflife compare needs {needed}: pip install 'halflife-lm[train,report]'\n"
    assert [path.name for path in tmp_path.iterdir()] == ["bare"]  # nothing was begun


def test_workflows_run_targets_that_exist():
    """Nothing here runs the workflows, so what they call is the Makefile, which is run here."""
    found = set()
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            matrix = job.get("strategy", {}).get("matrix", {})
            found |= {*matrix.get("target", ()), *(row["target"] for row in matrix.get("include", ()))}
            for step in job["steps"]:
                found |= set(re.findall(r"\bmake ([\w-]+)", step.get("run", "")))
    assert found >= {"lint", "test", "test-oldest", "test-newest", "docs", "dist"}
    known = re.findall(r"^([\w -]+):", (ROOT / "Makefile").read_text(), re.M)
    assert found <= {name for line in known for name in line.split()}
