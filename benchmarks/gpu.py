"""Correctness and speed of the ops on a GPU, in one run of under 10 minutes: `make gpu`.

The run needs torch, triton and this repository. It measures fla-core too if that can be imported.

First every backend is compared with float64 on the device (`selfcheck`, `parity`), in several processes at once. Other
processes compile the kernels that will be timed. Then the ops are timed alone on the device, forward and with backward,
at 32K tokens (H 16, K = V = 64 and 128, T 1K to 128K). FlashAttention, fla, a matrix product and a copy are timed in
the same run. A table of ratios is written to `benchmarks/results/`, and to $OUT if that is set; the seconds are in a
file .json beside it.

A kernel that raises an error loses its rows in the table. The exit status is 1 after such an error or a wrong result.
`--device cpu` runs the same code at toy sizes, with the Triton kernels too if TRITON_INTERPRET=1 is set.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import parity  # noqa: E402
import speed  # noqa: E402

from halflife import ops  # noqa: E402
from halflife.files import write_json  # noqa: E402
from halflife.ops.backends.dispatch import available_backends, registered  # noqa: E402

# Seconds from the start after which everything ends. Checks have half of them. The interpreter on a CPU gets more.
SECONDS = {"cuda": 540, "cpu": 6000}
FOREIGN = " / fla"  # ends the names of jobs with kernels that are not ours


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--seconds", type=float, help="of the whole run; half of them are for checks (540 on a GPU)")
    parser.add_argument("--worker", choices=WORKERS, help=argparse.SUPPRESS)
    parser.add_argument("--names", nargs="*", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--skip", nargs="*", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=math.inf, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("make gpu: no CUDA device here; torch.cuda.is_available() is False")
    if arguments.worker:
        for name in arguments.names:
            for row in WORKERS[arguments.worker](name, arguments.device, arguments.skip, arguments.until):
                print("ROW " + json.dumps(row), flush=True)
        return
    began, device = time.time(), arguments.device
    seconds = arguments.seconds or SECONDS[device]
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu, toy sizes"
    file = f"{name.lower().replace(',', '').replace(' ', '-')}-{time.strftime('%Y%m%d')}.md"
    folders = [Path(folder) for folder in (arguments.output, os.environ.get("OUT")) if folder]
    checked, complaints = _checks(device, began + seconds / 2)
    report = [f"# Ops on {name}", "", _versions(), "", *_checked(checked), ""]
    _write(report, folders, file)
    timed, more = _speeds(device, began + seconds)
    complaints += more + [f"{row['name']} / {row['backend']}: {row['failure']}" for row in timed if "failure" in row]
    wrong = bool(complaints) or not all(row.get("ok", True) for row in checked)
    report += ["## Speed", "", *speed.table(timed), "", *speed.crossings(timed), ""]
    report += [*(f"- {line}" for line in complaints), "", f"{time.time() - began:.0f} s in all."]
    print("\n".join(report))
    _write(report, folders, file)
    for folder in folders:
        write_json((folder / file).with_suffix(".json"), {"device": name, "ops": timed})
    print(f"written to {arguments.output / file}")
    if wrong:
        sys.exit("make gpu: something is wrong or broke down on this device; see the report above")


def _write(report: list[str], folders: list[Path], file: str) -> None:
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text("\n".join(report) + "\n")


def _versions() -> str:
    from importlib import metadata

    found = {}
    for package in ("triton", "fla-core"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    listed = ", ".join(f"{name} {version}" for name, version in found.items())
    return f"torch {torch.__version__}, CUDA {torch.version.cuda}, {listed}, {time.strftime('%Y-%m-%d')}."


def _checked(rows: list[dict]) -> list[str]:
    """Return the lines of `selfcheck` and of `parity` for the report."""
    checks = [row for row in rows if "check" in row]
    right = sum(row["ok"] for row in checks)
    lines = [
        "## selfcheck",
        "",
        f"{right} of {len(checks)} right.",
        "",
        "```",
        *(row["check"] for row in checks),
        "```",
    ]
    found = [row for row in rows if "case" in row]
    return [*lines, "", "## Parity with float64 at length, plain and packed", "", *parity.table(found)]


# ------------------------------------------------------------------------------------------- processes


class Job:
    """One worker in a separate process, so that a crash or a hang does not affect the others."""

    def __init__(self, kind: str, names: list[str], device: str, skip: list[str], until: float) -> None:
        self.kind = kind
        self.title, self.until, self.log = f"{kind} {', '.join(names)}", until, tempfile.TemporaryFile("w+")  # noqa: SIM115
        command = [sys.executable, __file__, "--device", device, "--worker", kind, "--until", str(until)]
        command += ["--names", *names, "--skip", *skip]
        alone = {**os.environ, "OMP_NUM_THREADS": "1"}  # one process runs on each core
        self.process = subprocess.Popen(
            command, stdout=self.log, stderr=subprocess.STDOUT, start_new_session=True, env=alone
        )

    def running(self) -> bool:
        """Return whether the process still runs; kill it when its time is over."""
        if self.process.poll() is None and time.time() > self.until:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        return self.process.poll() is None

    def results(self) -> tuple[list[dict], list[str]]:
        """Return its rows, and a list with the reason of its death if it did not end normally."""
        self.log.seek(0)
        lines = [line.strip() for line in self.log.read().splitlines() if line.strip()]
        self.log.close()
        rows = [json.loads(line[4:]) for line in lines if line.startswith("ROW ")]
        rest = [line for line in lines if not line.startswith("ROW ")] or ["no output"]
        status = self.process.returncode
        died = {0: [], -signal.SIGKILL: [f"{self.title}: out of time"]}
        return rows, died.get(status, [f"{self.title}: exit status {status}: {rest[-1][:200]}"])


def _checks(device: str, until: float) -> tuple[list[dict], list[str]]:
    """Return the rows of `selfcheck` and `parity`. On a GPU, kernels to be timed are compiled at the same time.

    There fla's kernels have processes of their own, because an illegal access destroys the device's context.
    """
    names = {"parity": list(parity.CASES), "selfcheck": ops.ops()}
    if device == "cpu":
        waiting, slots = list(names.items()), 1
    else:
        theirs = [op for op in ops.ops() if "fla" in registered(op)]
        names["parity"] += [name + FOREIGN for name, (op, *_) in parity.CASES.items() if op in theirs]
        names["selfcheck"] += [op + FOREIGN for op in theirs]
        compiled = [f"{op} / {size}" for size in speed.SIZES[device] for op in speed.OPS]
        compiled += [name + FOREIGN for name in compiled if name.split(" / ")[0] in theirs]
        waiting = [("parity", [name]) for name in names["parity"]]  # those that take longest come first
        waiting += [("compile", [name]) for name in compiled] + [("selfcheck", [name]) for name in names["selfcheck"]]
        slots = max(2, os.cpu_count() or 2)
    running: list[Job] = []
    rows, complaints = [], []
    while waiting or running:
        while waiting and len(running) < slots:
            running.append(Job(*waiting.pop(0), device, [], until))
        for job in [job for job in running if not job.running()]:
            running.remove(job)
            found, died = job.results()
            rows += found
            complaints += [] if job.kind == "compile" else died
        time.sleep(0.1)
    return rows, complaints


def _speeds(device: str, until: float) -> tuple[list[dict], list[str]]:
    """Return the rows of `speed`, with one process a head size, first of ours alone and then of fla.

    A kernel that crashed its process is not run again. Ours have three quarters of the time, because the tuning of
    fla's kernels could take all of it.
    """
    rows, complaints = [], []
    ours = [str(size) for size in speed.SIZES[device]]
    theirs = [] if device == "cpu" else [name + FOREIGN for name in ours]
    weights = [3] * len(ours) + [1] * len(theirs)
    for index, name in enumerate([*ours, *theirs]):
        stop = time.time() + (until - time.time()) * weights[index] / sum(weights[index:])
        skip: list[str] = []
        for _ in range(4):
            job = Job("speed", [name], device, skip, stop)
            while job.running():
                time.sleep(0.1)
            found, died = job.results()
            rows += found
            lost = [f"{row['name']} / {row['backend']}" for row in found if row.get("fatal")]
            complaints += [] if lost else died
            skip += [*lost, *{f"T {row['T']}" for row in found if "forward" in row}]
            if not lost:
                break
    return rows, complaints


# --------------------------------------------------------------------------------------------- workers


def _one_configuration() -> None:
    """Make Triton compile one configuration a kernel, because checks need no tuning.

    Kernels that are timed are tuned in their process, and their results are checked again there.
    """
    try:
        import triton
    except ImportError:
        return
    autotune = triton.autotune
    triton.autotune = lambda configs, *rest, **options: autotune(configs[:1], *rest, **options)


def _whose(name: str, device: str) -> tuple[str, bool | None]:
    """Split a job's name into what it is about, and whether it is for fla's kernels (None on a CPU: for all)."""
    return name.removesuffix(FOREIGN), name.endswith(FOREIGN) if device == "cuda" else None


def _parity(name: str, device: str, skip: list[str], until: float) -> Iterator[dict]:
    _one_configuration()
    case, foreign = _whose(name, device)
    yield from parity.rows(case, device, foreign)


def _selfcheck(name: str, device: str, skip: list[str], until: float) -> Iterator[dict]:
    _one_configuration()
    op, foreign = _whose(name, device)
    chosen = parity.chosen(available_backends(op, device), foreign)
    for check in ops.selfcheck(device, ops=[op], backends=chosen).checks if chosen else ():
        yield {"check": str(check), "ok": check.ok}


def _compile(name: str, device: str, skip: list[str], until: float) -> Iterator[dict]:
    case, foreign = _whose(name, device)
    speed.compile_kernels(case, device, foreign)
    yield from ()


def _speed(name: str, device: str, skip: list[str], until: float) -> Iterator[dict]:
    size, foreign = _whose(name, device)
    yield from speed.rows(int(size), device, skip, until, foreign)


WORKERS: dict[str, Callable[[str, str, list[str], float], Iterator[dict]]] = {
    "selfcheck": _selfcheck, "parity": _parity, "compile": _compile, "speed": _speed,
}  # fmt: skip


if __name__ == "__main__":
    main()
