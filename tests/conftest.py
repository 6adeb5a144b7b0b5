"""Settings for all tests: shape annotations are checked, torch has one thread, and random numbers are seeded."""

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest
import quicker
import torch
from typecheck import install

# Without a GPU, our Triton kernels run in Triton's interpreter. It must be chosen before triton is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    quicker.interpreter()

# Processes that tests start also have one thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests download nothing. Without this setting a wrong name is looked up on the hub, with half a minute of retries.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Runs are signed with a key of the tests and not with that of the user.
os.environ["HALFLIFE_KEY"] = str(Path(tempfile.gettempdir(), f"halflife-tests-{os.getuid()}", "key"))

quicker.parser()

# Every annotation of halflife is checked at run time, in tests only. The hook must precede the first import.
install("halflife")

# Scripts of the documents and benchmarks are tested too.
sys.path += [str(Path(__file__).parent.parent / folder) for folder in ("docs", "benchmarks")]

# No file of a test must outlive a power cut, and a worker would wait 2,000 times for its disk.
os.fsync = lambda descriptor: None

# A shell starts what ends in `&` with Ctrl-C ignored, and halflife leaves an ignored signal so.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The tensors are small, so more threads gain nothing. On a busy machine threads wait for each other (10x slower).
torch.set_num_threads(1)

# Collecting the tests makes a million objects that stay to the end. Python would look through them for garbage again
# and again, which takes 5 s in each worker.
gc.disable()


# A file stays with one worker. Those that take longest come first, so that both workers end at about the same time.
LONGEST = (
    "test_docs.py", "test_triton.py", "test_language.py", "test_report.py", "test_triton_passes.py", "test_registry.py",
    "test_page.py", "test_training.py", "test_triton_dplr.py", "test_triton_steps.py", "test_compiled_blocks.py",
)  # fmt: skip


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.name not in LONGEST)


def pytest_collection_finish():
    gc.freeze()
    atexit.register(gc.unfreeze)  # not before pytest's own last collections
    gc.enable()


# `torch.manual_seed` formats the stack for each kind of device that is absent, which takes as long as a small test.
seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed


@pytest.fixture(autouse=True)
def _seed():
    seed(0)


@pytest.fixture(autouse=True, scope="session")
def _short():
    """Runs write short samples and figures of one format, and measure the rate of the machine with a small product."""
    from halflife.report import redraw
    from halflife.runs import samples
    from halflife.training import speed

    samples.SAMPLE_TOKENS, speed.GEMM_SECONDS = 20, 1e-6
    save = redraw.save_figures
    redraw.save_figures = lambda run, data, formats=("png",): save(run, data, formats)


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """The folder of an uninterrupted run."""
    from tiny_runs import run, tiny

    folder = tmp_path_factory.mktemp("whole")
    run(tiny(), folder)
    return folder


@pytest.fixture(scope="session")
def interrupted(tmp_path_factory):
    """A run that was interrupted after step 9, with the checkpoints of the steps 4 and 8."""
    from tiny_runs import interrupt

    folder = tmp_path_factory.mktemp("interrupted")
    interrupt(folder, 9)
    return folder


@pytest.fixture
def folder(tmp_path):
    """A folder of documents, for the tests of texts."""
    from corpora import write_documents

    return write_documents(tmp_path / "text")


@pytest.fixture
def refused(capsys):
    """A function that runs a command, checks that it ends with one line on stderr and code 2, and returns the line."""

    def run(*arguments):
        from halflife.cli import main

        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main(list(arguments))
        error = capsys.readouterr().err
        assert stop.value.code == 2
        assert error.startswith("halflife: ")
        assert len(error.strip().splitlines()) == 1
        return error

    return run


@pytest.fixture
def quick_check(monkeypatch):
    """`ops.selfcheck` reads three tokens."""
    from halflife import ops

    check = ops.selfcheck
    monkeypatch.setattr(ops, "selfcheck", lambda device, length=3: check(device, length=3))


@pytest.fixture(scope="module")
def browser():
    """Headless Chromium. A test that needs it is skipped on machines without one."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no chromium on this machine")
    from playwright.sync_api import sync_playwright

    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=chromium, args=flags, timeout=120_000)
        yield launched
        launched.close()


@pytest.fixture
def machine(monkeypatch):
    """Pretend to be a CUDA machine with fla-core: `machine(capability=9, triton=(3, 6, 0), release=(0, 6, 0))`."""
    from halflife.ops.backends import fla

    def pretend(capability=8, triton=(3, 8, 0), release=(0, 6, 0)):
        monkeypatch.setattr(fla, "_versions", lambda: (release, triton))
        monkeypatch.setattr(fla, "_capability", lambda device: capability)

    return pretend
