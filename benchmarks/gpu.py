"""Correctness and speed of ops, models and passes on a GPU, in one call of less than ten minutes: `make gpu`.

It needs torch, triton and this repository, and measures fla-core's kernels if they are installed. Without a GPU it says
what it would do. The phases of `PHASES` follow each other, and each has its time. A phase's jobs run in processes of
their own, so a crash or a hang costs the rest of one process. Every row is appended at once to `rows.jsonl` in $OUT, or
else to `benchmarks/results/<device>-<day>.jsonl`, so a call that is cut still counts.

`make gpu-cache` compiles our kernels beforehand, into `.triton-gpu`, with the same release of Triton. Where that folder
has been carried along, it is an error when one of them is compiled in a phase that is timed.

The exit status is 1 after a wrong result, an error, or such a compilation. `--device cpu` runs the same code at toy
sizes, with the Triton kernels too if TRITON_INTERPRET=1 is set.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent)]

import gpu_cache  # noqa: E402
import gpu_clock  # noqa: E402
import gpu_jobs  # noqa: E402
import gpu_models  # noqa: E402
import parity  # noqa: E402

from halflife import ops  # noqa: E402
from halflife.ops.backends.dispatch import registered  # noqa: E402

SLOWER = {"cuda": 1.0, "cpu": 20.0}  # factor of all times


@dataclass(frozen=True)
class Phase:
    """Jobs that share a span of time.

    Attributes:
        name: name in the plan.
        until: seconds from the start of all after which its processes are ended.
        families: the jobs of each process, as "kind: job".
        at_once: whether its processes run at the same time, as nothing is timed.
    """

    name: str
    until: float
    families: list[list[str]]
    at_once: bool = False


def phases(device: str) -> list[Phase]:
    """What is done, in order."""
    sizes = gpu_clock.SCALES[device].sizes
    whose = ("ours", "fla") if device == "cuda" else ("all",)

    def timed(*parts: str) -> list[str]:
        names = [name for name in gpu_jobs.OPS if name.startswith(parts)]
        return [f"ops: {name} / {size} / {who}" for who in whose for size in sizes for name in names]

    checks = [[f"parity: {name} / {who}"] for who in whose for name, (op, *_) in parity.CASES.items() if _has(op, who)]
    checks += [[f"selfcheck: {op} / {who}"] for who in whose for op in ops.ops() if _has(op, who)]
    ahead = _ahead(sizes) if device == "cuda" else []
    return [
        Phase("rates", 30, [["rates: "]]),
        Phase("checks, and models compiled ahead", 180, [*ahead, *checks], at_once=True),
        Phase("ops", 330, [
            timed("softmax", "linear_attention, none", "linear_attention, scalar", "gate_rank, linear"),
            timed("delta_rule, none", "delta_rule, scalar", "gate_rank, delta"),
            timed("linear_attention, vector", "delta_rule, vector", "dplr"),
            timed("log_linear", "ridge", "forgetting"),
        ]),
        Phase("steps", 450, [
            [f"steps: {name} / {way}" for way in ("eager", "compiled")] for name in gpu_models.MODELS
        ]),
        Phase("passes", 490, [["passes: "]]),
        Phase("decoding, Koopman attention", 540, [[f"decode: {name}" for name in (*gpu_models.DECODED, "koopman")]]),
    ]  # fmt: skip


def _ahead(sizes: tuple[int, ...]) -> list[list[str]]:
    """What is compiled while checks run: models, of which two fit the memory at once, and fla's kernels."""
    models = [[f"warm: {name}" for name in gpu_models.MODELS[start::2]] for start in (0, 1)]
    foreign = [name for name in gpu_jobs.OPS if "fla" in gpu_jobs.backends_of(name)]
    return models + [[f"warm: {name} / {size}" for size in sizes] for name in foreign]


def _has(op: str, who: str) -> bool:
    return who != "fla" or "fla" in registered(op)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else None)
    parser.add_argument("--output", type=Path, help="file of the rows")
    parser.add_argument("--cache", type=Path, default=gpu_cache.CACHE, help="folder of compiled kernels")
    parser.add_argument("--only", nargs="*", default=[], help="kinds of jobs to run, such as ops and steps")
    parser.add_argument("--work", nargs="*", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work is not None:
        work(arguments.work, arguments.device, arguments.output)
    elif arguments.device is None:
        print("no CUDA device here; with one, these processes would run:\n" + plan(phases("cuda")))
    else:
        sys.exit(run_all(arguments))


def plan(chosen: list[Phase]) -> str:
    """What is done until when, a line for each process."""
    lines = []
    for phase in chosen:
        lines.append(f"until {phase.until:.0f} s: {phase.name}{', at once' if phase.at_once else ''}")
        lines += [f"  {'; '.join(family)}" for family in phase.families]
    return "\n".join(lines)


def run_all(arguments: argparse.Namespace) -> int:
    """Run all phases, print the report, and return the exit status."""
    device, began = arguments.device, time.time()
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    day = f"{name.lower().replace(' ', '-')}-{time.strftime('%Y%m%d')}.jsonl"
    out = os.environ.get("OUT")
    rows = arguments.output or (Path(out) / "rows.jsonl" if out else FOLDER / "results" / day)
    rows.parent.mkdir(parents=True, exist_ok=True)
    rows.unlink(missing_ok=True)
    cache = gpu_cache.use(arguments.cache) if device == "cuda" else "a CPU compiles nothing"
    append(rows, {"part": "head", "device": name, "cache": cache or "used", **versions()})
    for phase in phases(device):
        families = [kept for family in phase.families if (kept := _only(family, arguments.only))]
        run_phase(families, phase, device, rows, began + SLOWER[device] * phase.until)
    found = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    wrong = [row for row in found if row.get("ok") is False or (row.get("compiled") and cache is None)]
    print(report(found), *(f"WRONG {json.dumps(row)}" for row in wrong), sep="\n")
    print(f"{time.time() - began:.0f} s; rows in {rows}")
    return bool(wrong)


def _only(family: list[str], kinds: list[str]) -> list[str]:
    return [job for job in family if not kinds or job.partition(":")[0] in kinds]


def versions() -> dict[str, Any]:
    from importlib import metadata

    from offline_sources import sources

    found: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "sources": sources()}
    for package in ("triton", "fla-core"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def append(file: Path, row: dict[str, Any]) -> None:
    """Append a row; a short line is written at once, so processes may share the file."""
    with file.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(row) + "\n")


# ------------------------------------------------------------------------------------------------- processes


@dataclass
class Process:
    """A worker. It loads its libraries, and begins when it is told to, so that loading takes no time of a phase."""

    jobs: list[str]
    device: str
    rows: Path
    process: Any = field(init=False)

    def __post_init__(self) -> None:
        command = [sys.executable, __file__, "--device", self.device, "--output", str(self.rows), "--work", *self.jobs]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1", "TRITON_CACHE_AUTOTUNING": "1"},
        )  # fmt: skip
        self.said = ""

    def begin(self) -> None:
        self.process.stdin.write("begin\n")
        self.process.stdin.flush()

    def ended(self, until: float) -> bool:
        """Whether it has ended. It is killed when its time is over, and a row says how it died."""
        output = self.process.stdout
        while select.select([output], [], [], 0)[0] and (text := os.read(output.fileno(), 65536)):
            self.said = (self.said + text.decode(errors="replace"))[-2000:]
        late = self.process.poll() is None and time.time() > until
        if late:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        status = self.process.poll()
        if status is not None:
            self.process.stdin.close()
            output.close()
        if status:
            reason = "out of time" if late else f"exit status {status}: {self.said.strip().splitlines()[-1:]}"
            append(self.rows, {"part": "end", "jobs": self.jobs, "failure": reason} | ({} if late else {"ok": False}))
        return status is not None


def run_phase(families: list[list[str]], phase: Phase, device: str, rows: Path, until: float) -> None:
    """Run the processes of a phase, all cores at once or one after another, with the next one already loaded."""
    slots = max(1, (os.cpu_count() or 2) if phase.at_once and device == "cuda" else 1)
    waiting, running = list(families), []
    ready: list[Process] = []
    while waiting or ready or running:
        while waiting and len(ready) + len(running) < slots + 1:
            ready.append(Process(waiting.pop(0), device, rows))
        while ready and len(running) < slots:
            running.append(ready.pop(0))
            running[-1].begin()
        running = [process for process in running if not process.ended(until)]
        time.sleep(0.02)
        if time.time() > until:
            for process in ready:
                process.ended(0)
            for family in waiting:
                append(rows, {"part": "end", "jobs": family, "failure": "out of time before its start"})
            waiting, ready = [], []


def work(jobs: list[str], device: str, rows: Path) -> None:
    """Do these jobs, and append their rows and the kernels that were compiled."""
    if not sys.stdin.readline():
        return
    for text in jobs:
        kind, _, job = text.partition(": ")
        with gpu_cache.watching() as seen:
            for row in gpu_jobs.JOBS[kind](job, device):
                append(rows, row)
        if seen["hits"] or seen["compiled"]:
            compiled = {} if kind in gpu_jobs.UNTIMED else {"compiled": seen["compiled"]}
            append(rows, {"part": "cache", "job": text, "hits": len(seen["hits"]), **compiled})


# ---------------------------------------------------------------------------------------------------- report


def report(rows: list[dict[str, Any]]) -> str:
    """A table of what was timed: the median milliseconds, and in brackets those of a CUDA graph."""
    columns = "part | what | backend | B × T | K | forward ms | with backward ms"
    lines = [f"| {columns} |", "|---|---|---|---|---:|---:|---:|"]
    for row in rows:
        what = row.get("op") or row.get("model") or row.get("pass") or ""
        cells = [_cell(row, name) for name in ("forward_ms", "both_ms")]
        if "ms" in row:
            cells = [_cell(row, "ms"), ""]
        if any(cells):
            shape = f"{row['B']} × {row['T']}" if "B" in row else ""
            where = row.get("backend", row.get("way", ""))
            lines.append(f"| {row['part']} | {what} | {where} | {shape} | {row.get('K', '')} | {' | '.join(cells)} |")
    checks = [row for row in rows if "ok" in row]
    return "\n".join([*lines, "", f"{sum(row['ok'] for row in checks)} of {len(checks)} checks are right."])


def _cell(row: dict[str, Any], name: str) -> str:
    if name not in row:
        return ""
    graph = row.get(f"graph_{name}")
    return f"{row[name]:.3f}" + ("" if graph is None else f" ({graph:.3f})")


if __name__ == "__main__":
    main()
