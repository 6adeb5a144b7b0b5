"""Every block of code in the documents is run, or says above it why not; every command is one that exists.

Python runs from top to bottom in one namespace a page, bash in between, all in one folder, as a reader would. A comment
right above a block keeps it out: `<!-- slow: 6 minutes -->` (it runs with `pytest -m slow`), `<!-- needs: … -->`
(a network, a GPU, files that are not here), `<!-- record -->` (what gave a result, hours long). Commands are parsed
wherever they stand: in blocks that are not run, in tables, in a sentence.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import tyro

from halflife.cli import Command
from halflife.decay import DECAYS
from halflife.layers import LAYERS
from halflife.models import MODIFIERS, PRESETS
from halflife.ops.backends import dispatch as backend
from halflife.tasks import TASKS

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = ("python", "bash", "text")
MARK = re.compile(r"slow: \d+ (second|minute|hour)s?|needs: [^<>]+|record")
BUILTINS = ("cd", "export")
SECONDS = 300  # for a fast block, on a busy machine

BLOCK = re.compile(r"^(?:<!-- (?P<mark>[^\n]*) -->\n\n?)?```(?P<language>\S*)\n(?P<code>.*?)^```$", re.M | re.S)
FENCE = re.compile(r"^\s*(?:```|~~~)", re.M)


class Block(NamedTuple):
    """A fenced block, where it begins, and the first word of the mark above it, if any."""

    line: int
    language: str
    code: str
    mark: str


def blocks(text):
    """All blocks; a ValueError for a mark or a language that is not known, and if one was not seen."""
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
    """The commands of a bash block, as words."""
    for line in code.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            yield words


def mentions(text):
    """`halflife …` between backquotes, in sentences and tables; a `… --option` goes on from the one before it."""
    text, before = BLOCK.sub("", text), []
    for part in re.split(r"\n\s*\n|\n(?=\|)", text):
        for span in re.findall(r"`([^`]+)`", part):
            words = re.sub(r"<[^>]*>", "folder", span.replace("\\|", "|")).split(maxsplit=1)
            if words[0] == "…" and before and len(words) == 2:
                yield before + shlex.split(words[1])
            elif Path(words[0]).name == "halflife" and len(words) == 2:
                before = ["halflife", *shlex.split(words[1])]
                yield before


def parse(arguments):
    """A command line of `halflife`, through the parser that it has; a ValueError if that refuses it."""
    try:
        tyro.cli(Command, args=arguments, prog="halflife", config=(tyro.conf.OmitArgPrefixes,), console_outputs=False)
    except SystemExit as error:
        raise ValueError(
            f"halflife {shlex.join(arguments)}: there is no such command, or it lacks something"
        ) from error


def check(words):
    """A ValueError for a command, option, target, file or extra that does not exist."""
    program, arguments = Path(words[0]).name, words[1:]
    if "halflife.cli" in arguments:
        program, arguments = "halflife", arguments[arguments.index("halflife.cli") + 1 :]
    if program == "halflife":
        parse(arguments)
    elif program == "make":
        shown = subprocess.run(["make", "-n", *arguments], cwd=ROOT, capture_output=True, text=True)
        if shown.returncode:
            raise ValueError(f"make {shlex.join(arguments)}: {shown.stderr.strip()}")
        for line in shown.stdout.splitlines():
            if line.startswith(".venv/bin/halflife "):
                parse(shlex.split(line)[1:])
    elif program == "python" and arguments[0].endswith(".py"):
        if not (ROOT / arguments[0]).exists():
            raise ValueError(f"there is no {arguments[0]}")
    elif program == "pip":
        optional = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1]
        for extra in re.findall(r"\[([\w,]+)\]", " ".join(arguments)):
            if missing := [name for name in extra.split(",") if not re.search(rf"^{name} = ", optional, re.M)]:
                raise ValueError(f"halflife has no extra {missing[0]}")
    elif program not in BUILTINS and not (BIN / program).exists() and shutil.which(program) is None:
        raise ValueError(f"{program} is not installed")


def name(page):
    return str(page.relative_to(ROOT))


def of_pages(pages):
    return pytest.mark.parametrize("page", pages, ids=name)


WITH_BLOCKS = [page for page in PAGES if "```" in page.read_text()]
SLOW = [page for page in PAGES if "<!-- slow: " in page.read_text()]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where a page is run: with the documents in it, as in a checkout; what its code registers is gone afterwards."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=lambda _, names: [n for n in names if n.endswith(".png")])
    for file in ("README.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / file, tmp_path)
    monkeypatch.chdir(tmp_path)
    registries = [registry._entries for registry in (DECAYS, LAYERS, TASKS, PRESETS, MODIFIERS, backend._OPS)]
    kept = [dict(entries) for entries in registries]
    yield tmp_path
    for entries, before in zip(registries, kept, strict=True):
        entries.clear()
        entries.update(before)


def run(page, marks, seconds, capsys):
    """Runs the blocks of a page whose mark is among `marks`, in order."""
    namespace = {"__name__": "__main__"}
    for block in blocks(page.read_text()):
        if block.mark not in marks or block.language == "text":
            continue
        if block.language == "python":
            code = "\n" * block.line + block.code  # so that a traceback names the line of the page
            exec(compile(code, str(page), "exec"), namespace)
        elif any(words[0] != "make" for words in lines(block.code)):  # make is checked alone: it would run the tests
            with capsys.disabled():
                bash(block.code, seconds)


def bash(code, seconds=None):
    """Runs a block as a reader does who has the virtual environment's programs."""
    environment = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", code], env=environment, capture_output=True, text=True, timeout=seconds
    )
    assert done.returncode == 0, f"{code}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


# ---------------------------------------------------------------------------------------------------- the documents


@of_pages(WITH_BLOCKS)
def test_every_block_is_accounted_for(page):
    """A language, a known mark or none, no fence left over; and every command in a block exists."""
    for block in blocks(page.read_text()):
        for words in lines(block.code) if block.language == "bash" else ():
            check(words)


@of_pages([page for page in PAGES if page.name != "log.md"])  # a log says what was so on its day
def test_commands_in_sentences_and_tables_exist(page):
    for words in mentions(page.read_text()):
        if words[1] in ("spectrum", "train", "generate", "eval", "convert", "reproduce") and len(words) == 2:
            words = [*words, "--help"]  # the name of a command that needs arguments
        if words[-1] != "--help":
            check(words)


@of_pages(WITH_BLOCKS)
def test_blocks_run(page, folder, capsys):
    run(page, ("",), SECONDS, capsys)


@pytest.mark.slow
@of_pages(SLOW)
def test_slow_blocks_run(page, folder, capsys):
    run(page, ("", "slow"), None, capsys)


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
        "torchrun --nproc-per-node 2 -m halflife.cli train mamba2 --fspd", "pip install 'halflife[all]'", "nosuch x",
    ],
)  # fmt: skip
def test_what_does_not_exist_is_refused(line):
    with pytest.raises(ValueError, match=r"no |not |No "):
        check(shlex.split(line))


def test_a_block_that_fails_is_seen(folder):
    with pytest.raises(AssertionError, match="exit 3"):
        bash("echo hello | cat\nexit 3\n")
