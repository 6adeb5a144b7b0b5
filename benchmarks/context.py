"""One sequence over several processes: speed beside threads of one process, bytes sent, and memory.

    python benchmarks/context.py speed [--length 16384] [--layers 8] [--runs 5]
    python benchmarks/context.py memory [--length 1048576] [--processes 4]
    python benchmarks/context.py bytes
    python benchmarks/context.py plan

`speed` trains steps on two threads of one process and on two processes of one thread in turns. `memory` trains one step
and prints the peak of the resident memory of each process: all of it, and above that before the step, which follows a
short one that loads what the first step loads. `bytes` prints what a process sends. `plan` compares the memory and the
bytes of steps on 1 to 4 processes with what `halflife.training.plan` predicts.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import torch
from torch.utils.checkpoint import checkpoint

from halflife.models import LanguageModel, preset
from halflife.models.loss import mean_loss
from halflife.parallel import Piece, context_parallel
from halflife.training.config import TrainConfig
from halflife.training.plan import WORD, Needs

MIB = 1 << 20
BYTES = [
    "mamba2",
    "mamba2+post+gate_rank",
    "gated_deltanet",
    "gla",
    "rwkv7",
    "mamba2+log_linear",
    "mamba2+ska",
    "mesa",
    "llama",
]

PLANNED = ["mamba2+post", "mamba2+post+gate_rank", "gated_deltanet"]


def build(name, layers=8, width=256):
    torch.manual_seed(0)
    return LanguageModel(preset(name, vocab_size=256, hidden_size=width, num_layers=layers, train_length=4096))


def step(model, ids, piece, total, recompute):
    """One step on a piece of ids, without an optimiser."""
    call = partial(checkpoint, use_reentrant=False) if recompute else None
    hidden, _ = model.hidden(piece.of(ids[:, :-1]), call=call)
    labels = piece.of(ids[:, 1:])
    loss = mean_loss(hidden.flatten(0, 1), model.head_or_weight, labels.flatten()) * (labels.numel() / total)
    loss.backward()


def worker(arguments):
    """A process of torchrun, or the only one: times of steps, and memory."""
    torch.set_num_threads(arguments.threads)
    model, piece, context = build(arguments.model, arguments.layers, arguments.width), Piece(0, 1), None
    if "WORLD_SIZE" in os.environ:
        torch.distributed.init_process_group("gloo")
        context = context_parallel(model)
        piece = context.piece
    ids = torch.randint(256, (1, arguments.length + 1), generator=torch.Generator().manual_seed(0))
    short = max(256, arguments.length // 64)  # with every kernel and buffer that the long one has
    step(model, ids[:, : short + 1], piece, short, arguments.recompute)
    before, seconds = resident("VmRSS"), []
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    for _ in range(arguments.runs):
        if context is not None:
            context.sent = 0
            torch.distributed.barrier()
        start = time.perf_counter()
        step(model, ids, piece, arguments.length, arguments.recompute)
        if context is not None:
            context.add_gradients(model)
        model.zero_grad()
        seconds.append(time.perf_counter() - start)
    peak = resident("VmHWM")
    row = {
        "rank": piece.rank,
        "seconds": seconds,
        "step": peak - before,
        "peak": peak,
        "sent": context.sent if context else 0,
    }
    os.write(1, f"{json.dumps(row)}\n".encode())  # at once, as ranks share the output
    if context is not None:
        torch.distributed.destroy_process_group()


def resident(name):
    """A number of bytes of /proc about the resident memory of this process."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(lines[name].split()[0])


def measure(processes, threads, arguments, **changed):
    """The rows of one process, or of several that torchrun starts."""
    options: dict[str, object] = {
        "length": arguments.length,
        "layers": arguments.layers,
        "runs": arguments.runs,
        "width": arguments.width,
        "model": arguments.model,
    }
    command = [__file__, "worker", "--threads", str(threads), *(["--recompute"] if arguments.recompute else [])]
    command += [word for name, value in (options | changed).items() for word in (f"--{name}", str(value))]
    start = [] if processes == 1 else ["-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    if arguments.what != "speed":  # freed tensors below 32 MiB, a rank's but not those of the whole, would be kept
        environment["MALLOC_MMAP_THRESHOLD_"] = str(MIB)
    done = subprocess.run([sys.executable, *start, *command], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return sorted((json.loads(x) for x in done.stdout.splitlines() if x.startswith("{")), key=lambda row: row["rank"])


def speed(arguments):
    """Tokens/s of two processes and of two threads, in turns."""
    found = {"one process, two threads": [], "two processes": []}
    for _ in range(3):
        for name, processes, threads in (("one process, two threads", 1, 2), ("two processes", 2, 1)):
            rows = measure(processes, threads, arguments)
            found[name] += [max(times) for times in zip(*(row["seconds"][1:] for row in rows), strict=True)]
    medians = {name: statistics.median(times) for name, times in found.items()}
    print(f"{arguments.model}, {arguments.layers} blocks, T {arguments.length}")
    for name, seconds in medians.items():
        print(f"{name}: {arguments.length / seconds:,.0f} tokens/s")
    first, second = medians.values()
    ideal = arguments.layers / (arguments.layers + 1)
    print(f"two processes / two threads: {first / second:.2f} (a line of {arguments.layers} blocks allows {ideal:.2f})")


def memory(arguments):
    """The memory of a step of each of several processes, and of one."""
    print(f"{arguments.model}, {arguments.layers} blocks of width {arguments.width}, T {arguments.length:,}")
    largest = {}
    for processes in (arguments.processes, 1):
        rows = measure(processes, 1, arguments, runs=1)
        seconds = max(row["seconds"][0] for row in rows)
        steps, peaks = (", ".join(f"{row[name] / MIB:,.0f}" for row in rows) for name in ("step", "peak"))
        print(f"{processes} processes: a step takes {steps} MiB (peak {peaks}), {seconds:,.0f} s", flush=True)
        largest[processes] = {name: max(row[name] for row in rows) for name in ("step", "peak")}
    several, one = largest[arguments.processes], largest[1]
    print(
        f"the largest over that of one: {several['step'] / one['step']:.2%} (peak {several['peak'] / one['peak']:.2%})"
    )


def sent(arguments):
    """Bytes that the first of two processes sends in a step, at two lengths."""
    print("| model | T 512 | T 2,048 |\n|---|---|---|")
    for name in BYTES:
        rows = [measure(2, 1, arguments, model=name, length=n, runs=1, layers=2)[0]["sent"] for n in (512, 2048)]
        print(f"| {name} | " + " | ".join(f"{n / 1000:,.0f} kB" for n in rows) + " |", flush=True)


def plan(arguments):
    """Memory and bytes of a step on 1 to 4 processes over those that `halflife.training.plan` predicts."""
    print("| model | processes | memory | predicted | sent | predicted |\n|---|---|---|---|---|---|")
    for name in PLANNED:
        model = build(name, 2, 64)
        config = TrainConfig(model=model.config, steps=1, batch_size=1, learning_rate=1e-3)
        needs = Needs.of(config, arguments.length)
        for processes in (1, 2, 3, 4):
            rows = measure(processes, 1, arguments, model=name, runs=1, layers=2, width=64)
            found = max(row["step"] for row in rows), max(row["sent"] for row in rows)
            # Without an optimiser, a step adds the gradients alone. The ranks inside a line send states both ways.
            memory = needs.activations(arguments.length / processes) + WORD * needs.parameters
            memory += needs.states(processes, arguments.length)
            sent = needs.sent_states(processes, processes) / (1 if processes > 2 else 2)
            cells = [f"{found[0] / MIB:,.0f} MiB", f"{found[0] / memory:.2f}", f"{found[1] / 1000:,.0f} kB"]
            print(
                f"| {name} | {processes} | {' | '.join(cells)} | {f'{found[1] / sent:.2f}' if sent else ''} |",
                flush=True,
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["speed", "memory", "bytes", "plan", "worker"])
    for name, default in (
        ("length", 16384),
        ("layers", 8),
        ("runs", 5),
        ("processes", 4),
        ("threads", 1),
        ("width", 256),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--model", default="mamba2+post")
    parser.add_argument("--recompute", action="store_true", help="activation checkpoints")
    arguments = parser.parse_args()
    {"speed": speed, "memory": memory, "bytes": sent, "plan": plan, "worker": worker}[arguments.what](arguments)


if __name__ == "__main__":
    main()
