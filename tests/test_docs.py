"""Every block of code in the documents runs, or a comment above it says why it does not. Every command exists.

The Python blocks of a page run from top to bottom in one namespace and one folder, with the bash blocks in between, as
a reader would run them. A comment above a block keeps the block out: `<!-- slow: 6 minutes -->` (`pytest -m slow` runs
it), `<!-- needs: … -->` (it needs a network, a GPU, or files that are not here), or `<!-- record -->` (it made a result
and takes hours). Commands are parsed wherever they stand: in blocks that do not run, in tables, and in sentences.

Fast tests call `halflife …` in this process, because a new process needs seconds to import torch. Slow tests start
bash.
"""

import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from test_house import FLOORS

from halflife import cli
from halflife.cli import main
from halflife.decay import DECAYS
from halflife.extras import DISTRIBUTION
from halflife.layers import LAYERS
from halflife.models import MODIFIERS, PRESETS
from halflife.ops.spec import OPS
from halflife.tasks import TASKS

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN = ("python", "bash")
LANGUAGES = (*RUN, "text", "yaml", "mermaid")
MARK = re.compile(r"slow: \d+ (second|minute|hour)s?|needs: [^<>]+|record")
BUILTINS = ("cd", "export")
NEED_ARGUMENTS = (
    "check", "diagnose", "spectrum", "forecast", "look", "train", "generate", "eval", "convert", "compare", "figures",
    "serve", "export",
)  # fmt: skip
SHELL = re.compile(r"[|<>&;$*]")  # a line that contains one of these needs a shell
SECONDS = 300  # seconds for a fast block on a busy machine
WRITTEN = {"results.md", "summary.md", "overview.md", "table.md"}  # files that runs write into their folders

BLOCK = re.compile(r"^(?:<!-- (?P<mark>[^\n]*) -->\n\n?)?```(?P<language>\S*)\n(?P<code>.*?)^```$", re.M | re.S)
FENCE = re.compile(r"^\s*(?:```|~~~)", re.M)


class Block(NamedTuple):
    """A fenced block, where it begins, and the first word of the mark above it, if any."""

    line: int
    language: str
    code: str
    mark: str


def blocks(text):
    """Return all blocks. Raise a ValueError for an unknown mark or language, or if a block was missed."""
    found = []
    for match in BLOCK.finditer(text):
        line, mark = text.count("\n", 0, match.start()) + 1, match["mark"] or ""
        if mark and not MARK.fullmatch(mark):
            raise ValueError(f"line {line}: the mark {mark!r} is none of {MARK.pattern}")
        if match["language"] not in LANGUAGES:
            raise ValueError(f"line {line}: a block of {match['language']!r}; choose from {', '.join(LANGUAGES)}")
        found.append(Block(line, match["language"], match["code"], mark.partition(":")[0]))
    if (fences := len(FENCE.findall(text))) != 2 * len(found):
        raise ValueError(f"{fences} fences and {len(found)} blocks: one goes unseen (indented, or not closed)")
    return found


def lines(code):
    """Yield the commands of a bash block, each as a list of words."""
    for line in code.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            yield words


def mentions(text):
    """Yield each `halflife …` in a sentence or a table. `… --option` extends the command before it."""
    text, before = BLOCK.sub("", text), []
    for part in re.split(r"\n\s*\n|\n(?=\|)", text):
        for span in re.findall(r"`([^`]+)`", part):
            words = re.sub(r"<[^>]*>", "folder", span.replace("\\|", "|")).split(maxsplit=1)
            if words[0] == "…" and before and len(words) == 2:
                yield before + shlex.split(words[1])
            elif Path(words[0]).name == "halflife" and len(words) == 2:
                before = ["halflife", *shlex.split(words[1])]
                yield before


@cache
def parse(*arguments):
    """Parse a command line of `halflife`. Raise a ValueError if the parser refuses it."""
    try:
        cli.parse([*arguments[2:]] if arguments[0] == "--import" else [*arguments], console_outputs=False)
    except SystemExit as error:
        raise ValueError(
            f"halflife {shlex.join(arguments)}: there is no such command, or it lacks something"
        ) from error


def check(words):
    """Raise a ValueError for a command, option, target, file or extra that does not exist."""
    program, arguments = Path(words[0]).name, words[1:]
    if "halflife.cli" in arguments:
        program, arguments = "halflife", arguments[arguments.index("halflife.cli") + 1 :]
    if program == "halflife":
        parse(*arguments)
    elif program == "make":
        shown = subprocess.run(["make", "-n", *arguments], cwd=ROOT, capture_output=True, text=True)
        if shown.returncode:
            raise ValueError(f"make {shlex.join(arguments)}: {shown.stderr.strip()}")
        for line in shown.stdout.splitlines():
            if line.startswith(".venv/bin/halflife "):
                parse(*shlex.split(line.partition("||")[0])[1:])
    elif program == "python" and arguments[0].endswith(".py"):
        if not (ROOT / arguments[0]).exists():
            raise ValueError(f"there is no {arguments[0]}")
    elif program == "pip":
        optional = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1]
        for distribution, extra in re.findall(r"([\w.-]+)\[([\w,]+)\]", " ".join(arguments)):
            if distribution not in (DISTRIBUTION, "."):
                raise ValueError(f"no distribution of ours is named {distribution}")
            if missing := [name for name in extra.split(",") if not re.search(rf"^{name} = ", optional, re.M)]:
                raise ValueError(f"halflife has no extra {missing[0]}")
    elif program not in BUILTINS and not (BIN / program).exists() and shutil.which(program) is None:
        raise ValueError(f"{program} is not installed")


def name(page):
    return str(page.relative_to(ROOT))


def of_pages(pages):
    return pytest.mark.parametrize("page", pages, ids=name)


WITH_BLOCKS = [page for page in PAGES if "```" in page.read_text()]
BASH = [page for page in PAGES if "```bash" in page.read_text()]


@pytest.fixture
def folder(tmp_path, monkeypatch, quick_check):
    """The folder in which a page runs. It holds the documents, as a checkout does. The registries are restored."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=lambda _, names: [n for n in names if n.endswith(".png")])
    for file in ("README.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / file, tmp_path)
    monkeypatch.chdir(tmp_path)
    registries = [registry._entries for registry in (DECAYS, LAYERS, TASKS, PRESETS, MODIFIERS, OPS)]
    kept = [dict(entries) for entries in registries]
    yield tmp_path
    for entries, before in zip(registries, kept, strict=True):
        entries.clear()
        entries.update(before)


def run(page, marks, seconds, capsys, shell=False):
    """Run the blocks of a page whose mark is among `marks`, in order; `shell` starts every command from bash."""
    namespace = {"__name__": "__main__"}
    for block in blocks(page.read_text()):
        if block.mark not in marks or block.language not in RUN:
            continue
        commands = list(lines(block.code)) if block.language == "bash" else []
        if block.language == "python":
            code = "\n" * block.line + block.code  # so that a traceback names the line of the page
            exec(compile(code, str(page), "exec"), namespace)
        elif all(words[0] == "make" for words in commands):
            pass  # make is only checked, because it would run the tests
        elif not shell and not SHELL.search(block.code) and all(words[0] == "halflife" for words in commands):
            for words in commands:
                call(words[1:])
        else:
            with capsys.disabled():
                bash(block.code, seconds)


def call(arguments):
    """Run a `halflife` command in this process. Its warnings are not errors, as for a reader."""
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        main(arguments)


def bash(code, seconds=None):
    """Run a block in bash, with the programs of the virtual environment."""
    environment = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code], env=environment, capture_output=True, text=True, timeout=seconds
    )
    assert done.returncode == 0, f"{code}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


# ---------------------------------------------------------------------------------------------------- the documents


@of_pages(WITH_BLOCKS)
def test_every_block_is_accounted_for(page):
    """A block has a known language, and a known mark or none. No fence is left over. Every command exists."""
    for block in blocks(page.read_text()):
        for words in lines(block.code) if block.language == "bash" else ():
            check(words)
        if block.language == "yaml":
            assert isinstance(yaml.safe_load(block.code), dict)


@of_pages(sorted((ROOT / "docs").rglob("*.sh")))
def test_every_recorded_command_exists(page):
    for words in lines(page.read_text()):
        check(words)


@of_pages([page for page in PAGES if page.name != "log.md"])  # the log describes the project on the day of an entry
def test_commands_in_sentences_and_tables_exist(page):
    for words in mentions(page.read_text()):
        if words[1] in NEED_ARGUMENTS and len(words) == 2:
            words = [*words, "--help"]  # the name of a command that needs arguments
        if words[-1] != "--help":
            check(words)


@of_pages(WITH_BLOCKS)
def test_blocks_run(page, folder, capsys):
    run(page, ("",), SECONDS, capsys)


@pytest.mark.slow
@of_pages(BASH)
def test_all_blocks_run_in_a_shell(page, folder, capsys):
    """Run the slow blocks too, with every command started from bash."""
    run(page, ("", "slow"), None, capsys, shell=True)


def test_named_files_exist():
    """Every Markdown file that a text file of the project names exists; `docs/log.md` may name old files."""
    reports = (ROOT / "benchmarks" / "results").glob("*.md")
    documents = [f"/{name(page)}" for page in [*PAGES, ROOT / "CHANGELOG.md", ROOT / "SECURITY.md", *reports]]
    texts = [file for suffix in ("md", "yml", "toml") for file in ROOT.glob(f"*.{suffix}")]
    for part in ("halflife", "tests", "benchmarks", "docs"):
        texts += [file for suffix in ("py", "md") for file in (ROOT / part).rglob(f"*.{suffix}")]
    texts.remove(ROOT / "docs" / "log.md")
    missing = []
    for text in texts:
        for named in re.findall(r"[\w/-]*\w[\w-]+\.md\b", text.read_text(encoding="utf-8")):
            exists = any(page.endswith(f"/{named.lstrip('/')}") for page in documents)
            if not exists and Path(named).name not in WRITTEN:
                missing.append(f"{name(text)}: {named}")
    assert not missing


def test_an_empty_line_ends_every_table():
    """Without one the sentence after a table becomes its last row."""
    ends = re.compile(r"^\|.*\n(?=[^|\n])(.*)", re.M)
    assert [(page.name, *found) for page in PAGES if (found := ends.findall(page.read_text()))] == []


def test_the_minutes_of_a_block_stand_in_the_text_before_it():
    """A reader does not see the comment above a block."""
    for page in PAGES:
        text = page.read_text()
        for mark in re.finditer(r"^<!-- slow: (\d+ (?:minutes|hours?)) -->$", text, re.M):
            assert mark[1] in " ".join(text[: mark.start()][-600:].split()), f"{name(page)}: {mark[1]}"


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_the_tree_of_the_readme_has_every_room():
    """No folder of the package is missing, and none is named that does not exist."""
    tree = (ROOT / "README.md").read_text().split("halflife/\n", 1)[1].split("```")[0]
    folders = {path.name for path in (ROOT / "halflife").iterdir() if (path / "__init__.py").exists()}
    assert {named for line in tree.splitlines() for named in re.findall(r"(\w+)/", line)} == folders


def names_of_the_api():
    """(module, name) of every member that a page of the API lists."""
    listed = re.compile(r"^::: (\S+)\n    options:\n      members: \[(.*)\]", re.M)
    documents = (page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "api").glob("*.md"))
    entries = [entry for text in documents for entry in listed.findall(text)]
    return [(module, name) for module, members in entries for name in re.findall(r"\w+", members)]


def test_the_api_names_what_exists():
    """The site leaves out a member that does not exist, without a warning; the site's own test is slow."""
    for module, name in names_of_the_api():
        assert hasattr(importlib.import_module(module), name), f"{module} has no {name}"


def test_the_journeys_of_the_architecture_lead_through_files_that_exist():
    page = (ROOT / "docs" / "architecture.md").read_text()
    named = re.findall(r"`((?:halflife|tests|benchmarks|docs)/[\w/]+\.\w+)`", page)
    assert len(named) > 40
    assert [path for path in named if not (ROOT / path).is_file()] == []


def test_the_picture_of_the_architecture_has_the_floors():
    """The diagram in `docs/architecture.md` has the floors of `tests/test_house.py`, from the top."""
    page = blocks((ROOT / "docs/architecture.md").read_text())
    diagram = next(block for block in page if block.language == "mermaid")
    drawn = [set(floor.split(" · ")) for floor in re.findall(r'\["<b>(.*?)</b>', diagram.code)]
    assert drawn == [set(floor) for floor in reversed(FLOORS)]


# ------------------------------------------------------------------------------------------------ the checks themselves


def test_blocks_are_found_with_their_marks():
    text = "a\n```python\nx = 1\n```\n\n<!-- slow: 6 minutes -->\n```bash\nhalflife list\n```\n"
    assert blocks(text) == [Block(2, "python", "x = 1\n", ""), Block(6, "bash", "halflife list\n", "slow")]


@pytest.mark.parametrize(
    "text",
    [
        "```\nx\n```\n",  # no language
        "```cobol\nx\n```\n",
        "<!-- slow: a while -->\n```bash\nx\n```\n",  # how long?
        "<!-- skip -->\n```bash\nx\n```\n",  # why?
        "  ```python\n  x\n  ```\n",  # indented
        "```python\nx\n",  # not closed
    ],
)
def test_blocks_that_would_go_unseen_are_refused(text):
    with pytest.raises(ValueError, match=r"block|mark"):
        blocks(text)


def test_commands_are_read_from_lines_and_mentions():
    assert list(lines("a b \\\n  c  # d\n\n# e\nf 'g h'\n")) == [["a", "b", "c"], ["f", "g h"]]
    text = "| `.venv/bin/halflife compare mamba2` | x `y` |\n| `… --scale small` | |\n\n`halflife\nlist` and `list`"
    assert list(mentions(text)) == [
        ["halflife", "compare", "mamba2"], ["halflife", "compare", "mamba2", "--scale", "small"], ["halflife", "list"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    "line",
    [
        "halflife compare mamba2 --lenght 3", "halflife predict x", "make everything", "python benchmarks/none.py",
        "torchrun --nproc-per-node 2 -m halflife.cli train mamba2 --fspd", "pip install 'halflife[cli]'",
        "pip install 'halflife-lm[nosuch]'", "nosuch x",
    ],
)  # fmt: skip
def test_what_does_not_exist_is_refused(line):
    with pytest.raises(ValueError, match=r"no |not |No |unknown "):
        check(shlex.split(line))


def test_a_block_that_fails_is_seen(folder):
    with pytest.raises(AssertionError, match="exit 3"):
        bash("echo hello | cat\nexit 3\n")


@pytest.mark.slow
def test_the_files_of_the_how_tos_work_in_the_package(tmp_path):
    """They stand in a copy of it, with the lines that the pages ask for, and the tests over registries run."""
    for name in ("halflife", "tests", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "*.png"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    text = {page: (ROOT / f"docs/how-to/{page}.md").read_text() for page in ("add-a-decay", "add-an-op")}
    written = []
    for block in (block for page in text.values() for block in blocks(page)):
        if match := re.match(r"# (halflife/\S+\.py)\n", block.code):
            (tmp_path / match[1]).write_text(block.code)
            written.append(match[1])
    kernel = "halflife/ops/backends/triton/longhorn.py"
    assert written == ["halflife/decay/halving.py", "halflife/ops/longhorn.py", kernel]
    (law,) = re.findall(r"LAWS = \{(.*)\}", text["add-a-decay"])
    for file, before, after in (
        ("halflife/decay/__init__.py", "import gla, hgrn2,", "import gla, halving, hgrn2,"),
        ("tests/test_decay.py", "LAWS = {\n", f"LAWS = {{\n    {law},\n"),
        (
            "halflife/ops/__init__.py",
            "from halflife.ops.ridge",
            "from halflife.ops.longhorn import longhorn\nfrom halflife.ops.ridge",
        ),
        ("tests/test_decay.py", "import torch\n", "import torch\nimport torch.nn.functional as F\n"),
    ):
        source = (tmp_path / file).read_text()
        assert before in source
        (tmp_path / file).write_text(source.replace(before, after, 1))
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_decay.py", "-k", "halving"]
    comparisons = [
        block.code for block in blocks(text["add-an-op"]) if block.language == "python" and "assert_equal" in block.code
    ]
    checks = "\n".join(["import torch", "from halflife.ops import longhorn", *comparisons])
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "TRITON_INTERPRET": "1"}
    for command in (tests, [sys.executable, "-c", checks]):
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_the_first_page_chooses_as_the_overview_does():
    """The models of each row of the table of docs/index.md stand in one sentence of docs/results/overview.md."""
    lines = (ROOT / "docs" / "index.md").read_text(encoding="utf-8").split("| you need | choose |\n")[1].splitlines()
    chosen = list(takewhile(lambda line: line.startswith("|"), lines[1:]))
    sentences = (ROOT / "docs" / "results" / "overview.md").read_text(encoding="utf-8").splitlines()
    assert len(chosen) > 3
    for line in chosen:
        models = re.findall(r"[A-Z][A-Za-z]*[A-Z\d][\w-]*|Mamba-2|Simple Decay", line)
        assert models, line
        assert any(all(model in sentence for model in models) for sentence in sentences), line
