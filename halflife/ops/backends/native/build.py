"""Compiles the kernels in csrc/ for the CPU and the torch of this machine, once, and loads them.

A build has a folder in `$HALFLIFE_NATIVE` (default `~/.cache/halflife/native`), named by everything that it depends on:
the sources, the versions of torch and of the compiler's flags, and the instruction set. Nothing is compiled at import.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cache
from pathlib import Path

import torch

from halflife.files import folder_lock, write_json
from halflife.ops.arguments import cached_constant

SOURCES = Path(__file__).parent / "csrc"
LIBRARY, PASSED = "halflife_native.so", "passed.json"  # in the folder of a build; the second after a selfcheck
COMPILE_LIMIT = 600  # seconds that a compiler may take
SANITIZE = ("-fsanitize=address,undefined", "-fno-omit-frame-pointer")


class CannotBuild(RuntimeError):
    """The kernels cannot be compiled here; the message says why, and what to install."""


def flags() -> list[str]:
    """The compiler's flags for this CPU."""
    capability = torch.backends.cpu.get_cpu_capability()
    wide = "AVX512" if capability.startswith("AVX512") else "AVX2"
    return [
        "-O3", "-march=native", "-mprefer-vector-width=512", "-fno-math-errno", "-fno-trapping-math", "-fopenmp",
        "-DAT_PARALLEL_OPENMP=1", f"-DCPU_CAPABILITY={wide}", f"-DCPU_CAPABILITY_{wide}", "-Wno-unknown-pragmas",
        "-Wno-maybe-uninitialized",
    ]  # fmt: skip


def why_not_here() -> str | None:
    """Return the reason why the kernels cannot be built for this machine, or None."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return f"native kernels are for x86-64 CPUs; this one is {platform.machine()}"
    capability = torch.backends.cpu.get_cpu_capability()
    if not capability.startswith("AVX"):
        return f"native kernels need AVX2 or AVX-512; torch uses {capability} here"
    return None


@cache
def folder() -> Path:
    """The folder of the build for this machine."""
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    digest.update(repr((torch.__version__, sys.platform, _processor(), flags())).encode())
    builds = Path(os.environ.get("HALFLIFE_NATIVE") or Path.home() / ".cache/halflife/native")
    return builds.expanduser() / digest.hexdigest()[:16]


def _processor() -> str:
    """The instruction sets of this CPU, which `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith("flags")), "")


# torch.compile calls these two while it traces and takes their results as constants.
@cached_constant
def why_not() -> str | None:
    """Return the reason why the kernels cannot run in this process, or None if they can."""
    reason = why_not_here()
    if reason is not None:
        return reason
    if not (folder() / LIBRARY).is_file():
        return "native kernels are not built here (run: halflife build)"
    if not (folder() / PASSED).is_file():
        return f"the native kernels in {folder()} failed their check (run: halflife build --force)"
    return None


@cached_constant
def load() -> None:
    """Load the kernels of this machine into torch."""
    use(folder() / LIBRARY)


def use(library: Path) -> None:
    """Load one library of kernels; an ImportError says that it is of another machine, or damaged."""
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        raise ImportError(f"cannot load {library}: {error} (run: halflife build --force)") from error
    from halflife.ops.backends.native import fakes, passes  # noqa: F401 (they register the shapes and gradients)


def build(force: bool = False, report: Callable[[str], None] = print) -> Path:
    """Compile the kernels unless that is done, check them in a process of their own, and return the library.

    Args:
        force: compile again.
        report: receives lines of progress.

    Raises:
        CannotBuild: the machine, the compiler or the check says no. The message gives the reason and the remedy.
    """
    from halflife.ops.backends.native import products  # which imports this module

    reason = why_not_here()
    if reason is not None:
        raise CannotBuild(reason)
    final = folder()
    with folder_lock(final.parent, patience=COMPILE_LIMIT):
        if not force and (final / PASSED).is_file():
            report(f"native kernels are built: {final}")
            return final / LIBRARY
        with tempfile.TemporaryDirectory(prefix=".build-", dir=final.parent) as temporary:
            start = time.monotonic()
            library = compile_library(Path(temporary), report=report)
            report(f"compiled in {time.monotonic() - start:.0f} s; checking against the token loops")
            _check(library)
            write_json(
                library.with_name(PASSED),
                {"torch": torch.__version__, "compiler": _version(compiler()), "flags": flags(),
                 "onednn": products.measure(),
                 "seconds": round(time.monotonic() - start, 1)},
            )  # fmt: skip
            shutil.rmtree(final, ignore_errors=True)
            os.replace(temporary, final)
            os.makedirs(temporary)  # for the end of the block, which deletes it
    for cached in (why_not, load):
        cached.cache_clear()
    report(f"native kernels are ready: {final}")
    return final / LIBRARY


def compiler() -> str:
    """The C++ compiler, `$CXX` or c++."""
    name = os.environ.get("CXX") or "c++"
    path = shutil.which(name)
    if path is None:
        raise CannotBuild(f"there is no C++ compiler {name!r}; install one (Debian: apt-get install g++) or set CXX")
    return path


def _version(path: str) -> str:
    return subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout.split("\n")[0]


def compile_library(target: Path, extra: Sequence[str] = (), report: Callable[[str], None] = lambda line: None) -> Path:
    """Compile all sources into the folder `target`, as many at a time as there are CPUs, and link the library."""
    from torch.utils import cpp_extension

    command = [compiler(), "-std=c++20", "-fPIC", *flags(), *extra]
    for path in cpp_extension.include_paths():
        command += ["-isystem", path]
    sources = sorted(SOURCES.glob("*.cpp"), key=lambda path: -path.stat().st_size)
    objects = [target / f"{source.stem}.o" for source in sources]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        jobs = [
            pool.submit(_run, [*command, "-c", str(source), "-o", str(out)])
            for source, out in zip(sources, objects, strict=True)
        ]
        for done, job in enumerate(as_completed(jobs), 1):
            job.result()
            report(f"compiling native kernels: {done} of {len(jobs)} files")
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
    library = target / LIBRARY
    _run(
        [compiler(), "-shared", *map(str, objects), *libraries, "-ltorch_cpu", "-lc10", "-fopenmp", *extra,
         "-o", str(library)]
    )  # fmt: skip
    for out in objects:
        out.unlink()
    return library


def _run(command: list[str]) -> None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_LIMIT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotBuild(f"the C++ compiler {command[0]} does not run: {error}") from error
    if result.returncode:
        lines = result.stderr.splitlines()
        first = next((line for line in lines if "error" in line), "\n".join(lines[-3:]))
        raise CannotBuild(f"{command[0]} cannot compile the kernels: {first}")


_CHECK = """
import sys
from pathlib import Path
from halflife.ops import selfcheck
from halflife.ops.backends.native import build
build.use(Path(sys.argv[1]))
build.why_not = build.load = lambda: None
report = selfcheck("cpu", backends=["native"])
print(report)
sys.exit(not report.ok)
"""


def _check(library: Path) -> None:
    """Run the selfcheck of the kernels in `library` in a process of their own, because a wrong one may crash it."""
    result = subprocess.run(
        [sys.executable, "-c", _CHECK, str(library)], capture_output=True, text=True, check=False, timeout=COMPILE_LIMIT
    )
    if result.returncode:
        output = (result.stdout + result.stderr).strip().splitlines()
        wrong = [line for line in output if "WRONG" in line] or output[-1:] or [f"exit code {result.returncode}"]
        raise CannotBuild("the native kernels fail their check: " + "; ".join(wrong[:3]))
