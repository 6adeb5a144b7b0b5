"""Speed of the ops on this CPU: `python benchmarks/ops.py [--write docs/benchmarks.md]`.

B 1, H 12, K = V = 64 (spectral Koopman attention: r 48). Every backend of every op, softmax attention and the scans of
transformers take turns in one process, for each length, dtype and number of threads. Times are medians. Each stands
beside three floors, measured in the same run: its FLOPs at the rate of torch's matrix product and of oneDNN's (both of
2048³), and the bytes of its inputs, outputs and gradients at the rate of a copy of 256 MB. All times go into
benchmarks/results/cpu_ops.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import cases  # noqa: E402
import timing  # noqa: E402

from halflife import ops  # noqa: E402
from halflife.files import write_text  # noqa: E402
from halflife.training.speed import gemm_rate  # noqa: E402

LENGTHS = (128, 512, 2048, 8192)
BACKENDS = ("native", "chunked", "reference")
TOKEN_LOOP = 128  # the longest sequence of the backend "reference"
AT = 2048  # the length of the tables
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SDPA, MAMBA, DELTA = "softmax attention (SDPA)", "transformers Mamba-2 scan", "transformers gated delta rule"
PEERS = (SDPA, DELTA, MAMBA)
MARK = "<!-- table -->"
RESULTS = Path(__file__).parent / "results" / "cpu_ops.json"
PICTURE = Path(__file__).parent.parent / "docs" / "images" / "benchmarks.png"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="also write the tables here, the picture and the file of results")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help=f"{AT} is always measured")
    parser.add_argument("--seconds", type=float, default=5.0, help="to measure for, each length, dtype and direction")
    parser.add_argument("--memory", nargs=2, metavar=("BACKEND", "NAME"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory:
        print(_grown(*arguments.memory))
        return
    results = measure(sorted({*arguments.lengths, AT}), arguments.seconds)
    text = "\n".join(report(results))
    print(text)
    if arguments.write:
        RESULTS.parent.mkdir(exist_ok=True)
        write_text(RESULTS, json.dumps(results, indent=1) + "\n")
        draw(results)
        timing.write_section(arguments.write, MARK, text)


# --------------------------------------------------------------------------------------------- measurement


def measure(lengths: list[int], seconds: float) -> dict:
    """Return the machine, the floors and one row for each op, backend, length, dtype and number of threads."""
    rows, floors, one_head = [], {}, {}
    for threads in (2, 1):
        torch.set_num_threads(threads)
        floors[threads], one_head[threads] = _floors(), _one_head()
        for length in lengths if threads == 2 else [AT]:
            for dtype in DTYPES:
                rows += _rows(length, dtype, threads, seconds)
                print(f"T {length}, {dtype}, {threads} threads: done", file=sys.stderr)
    torch.set_num_threads(2)
    names = [row["op"] for row in rows if row["length"] == AT and row["backend"] == "native"]
    memory = {name: {b: _memory(b, name) for b in BACKENDS[:2]} for name in dict.fromkeys(names)}
    return {"machine": _machine(), "floors": floors, "rows": rows, "memory": memory, "one_head": one_head}


def _one_head(length: int = 100_000) -> float:
    """Seconds of forward and backward on one head, whose chunks the threads share."""
    case = cases.ours(cases.inputs(length, heads=1))[1]
    return timing.medians({"": lambda: case.forward().sum().backward()}, 1.0)[""]


def _floors() -> dict[str, float]:
    """Rates of matrix products in FLOP/s and of a copy in bytes/s; the best of three, because others may be at work."""
    cpu = torch.device("cpu")
    found = {f"torch {name}": max(gemm_rate(cpu, dtype) for _ in range(3)) for name, dtype in DTYPES.items()}
    for name, dtype in DTYPES.items():
        if dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported():
            found[f"oneDNN {name}"] = max(timing.onednn_rate(dtype) for _ in range(3))
    return found | {"copy": max(timing.copy_rate() for _ in range(3))}


def _rows(length: int, dtype: str, threads: int, seconds: float) -> Iterator[dict]:
    x = cases.inputs(length, dtype=DTYPES[dtype])
    found = {("", SDPA): cases.sdpa(x)}
    for backend in BACKENDS:
        if backend in ops.available_backends("linear_attention") and (backend != "reference" or length <= TOKEN_LOOP):
            found |= {(backend, case.name): case for case in _ours(x, backend)}
    if dtype == "float32" and threads == 2:
        found |= {("", case.name): case for case in cases.transformers_peers(x)}
    weight = torch.randn_like(x["v"])

    def forward(case: cases.Case):
        with torch.no_grad():
            case.forward()

    one = timing.medians({key: lambda c=case: forward(c) for key, case in found.items()}, seconds, rounds=3)
    two = timing.medians(
        {key: lambda c=case: c.forward().backward(weight) for key, case in found.items()}, seconds, rounds=3
    )
    for key, case in found.items():
        bytes_in, bytes_out = _bytes(case.name, x)
        yield {
            "op": key[1], "backend": key[0], "length": length, "dtype": dtype, "threads": threads,
            "forward": one[key], "both": two[key], "flops": case.flops,
            # Forward reads the inputs; backward reads them again and the gradient, and writes gradients of the inputs.
            "bytes": (bytes_in + bytes_out, 3 * bytes_in + 2 * bytes_out),
        }  # fmt: skip


def _ours(x: dict, backend: str) -> list[cases.Case]:
    gated = [case for case in cases.gated(x, backend) if case.name.startswith("gate_rank")]
    return [*cases.ours(x, backend), *gated, cases.koopman(x, backend)]


def _bytes(name: str, x: dict) -> tuple[int, int]:
    """Bytes of the inputs and of the outputs."""
    used = ["q", "k", "v"]
    decays = {"scalar": ["g"], "vector": ["gv"], "linear": ["g", "g_slow"], "delta": ["g", "g_slow"]}
    used += decays.get(name.split(", ")[-1], [])
    used += ["beta"] if name.startswith(("delta_rule", "dplr", "gate_rank, delta")) else []
    used += ["k", "k"] if name.startswith("dplr") else []
    return sum(x[n].nbytes for n in used), x["v"].nbytes


def _memory(backend: str, name: str) -> float:
    """Return the MB by which a fresh process grows in one forward and backward pass."""
    command = [sys.executable, __file__, "--memory", backend, name]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def _grown(backend: str, name: str) -> float:
    torch.set_num_threads(2)
    for length in (64, AT):  # a first product loads libraries
        x = cases.inputs(length)
        case = next(case for case in _ours(x, backend) if case.name == name)
        if length == 64:
            case.forward().sum().backward()
    return timing.peak_memory(lambda: case.forward().sum().backward()) / 1e6


# -------------------------------------------------------------------------------------------------- report


def report(results: dict) -> Iterator[str]:
    """Yield the Markdown lines."""
    floors = results["floors"][2]
    yield results["machine"]
    yield (
        "Rates with two threads: "
        + ", ".join(
            f"{name} {rate / 1e9:,.0f} {'GB/s' if name == 'copy' else 'GFLOP/s'}" for name, rate in floors.items()
        )
        + "."
    )
    yield ""
    yield from _table(results, floors)
    yield ""
    yield from _peers(results)
    yield ""
    yield from _targets(results, floors)


class _Times:
    """Look up rows: `times("delta_rule, scalar", "native").both`."""

    def __init__(self, results: dict) -> None:
        self.rows = {(r["op"], r["backend"], r["length"], r["dtype"], r["threads"]): r for r in results["rows"]}

    def __call__(self, op: str, backend: str = "", length: int = AT, dtype: str = "float32", threads: int = 2) -> dict:
        return self.rows[op, backend, length, dtype, threads]


def _table(results: dict, floors: dict) -> Iterator[str]:
    times = _Times(results)
    yield f"Native kernels at T {AT:,}, float32, two threads. *f* is the forward pass and *f+b* both. A ratio to a"
    yield "floor says how many times as long as the floor an op takes. The columns *bf16* and *one thread* hold the"
    yield "time of float32 with two threads divided by theirs. Memory is the growth of a fresh process in one f+b."
    yield ""
    yield (
        "| op | f ms | f+b ms | ÷ torch GEMM, f and f+b | ÷ oneDNN GEMM | ÷ bytes | × chunked, f and f+b "
        "| bf16, f+b | one thread, f+b | MB (chunked) |"
    )
    yield "|---|" + "---:|" * 9
    for name, memory in results["memory"].items():
        row, chunked = times(name, "native"), times(name, "chunked")
        both = [(row["forward"], 0), (row["both"], 1)]
        cells = [f"{1e3 * seconds:.1f}" for seconds, _ in both]
        for rate in ("torch float32", "oneDNN float32"):
            cells.append(", ".join(f"{seconds * floors[rate] / row['flops'][i]:.1f}" for seconds, i in both))
        cells.append(", ".join(f"{seconds * floors['copy'] / row['bytes'][i]:.1f}" for seconds, i in both))
        cells.append(", ".join(f"{chunked[part] / row[part]:.1f}" for part in ("forward", "both")))
        cells.append(f"{row['both'] / times(name, 'native', dtype='bfloat16')['both']:.2f}")
        cells.append(f"{row['both'] / times(name, 'native', threads=1)['both']:.2f}")
        cells.append(f"{memory['native']:.0f} ({memory['chunked']:.0f})")
        yield f"| {name} | {' | '.join(cells)} |"


def _peers(results: dict) -> Iterator[str]:
    times = _Times(results)
    lengths = sorted({row["length"] for row in results["rows"]})
    yield "Other libraries, float32, two threads: ms of f+b, and in brackets the multiple of our native op's time."
    yield ""
    yield "| peer | " + " | ".join(f"T {length:,}" for length in lengths) + " |"
    yield "|---|" + "---:|" * len(lengths)
    for peer in PEERS:
        own = "delta_rule, scalar" if peer == DELTA else "linear_attention, scalar"
        found = [(times(peer, length=n)["both"], times(own, "native", n)["both"]) for n in lengths]
        yield f"| {peer} | {' | '.join(f'{1e3 * theirs:.1f} ({theirs / ours:.1f} ×)' for theirs, ours in found)} |"


def _targets(results: dict, floors: dict) -> Iterator[str]:
    rows = list(_measured_targets(results, floors))
    yield f"{sum(met for *_, met in rows)} of {len(rows)} targets are met."
    yield ""
    yield "Not met: " + "; ".join(f"{target} ({measured})" for target, measured, met in rows if not met) + "."


def _measured_targets(results: dict, floors: dict) -> Iterator[tuple[str, str, bool]]:
    """Yield each target, what was measured, and whether that meets it."""
    times = _Times(results)
    linear, delta = "linear_attention, scalar", "delta_rule, scalar"
    lengths = sorted({row["length"] for row in results["rows"]})
    gemm = floors["torch float32"]
    for length, least in ((AT, 1.7), (8192, 1.5)):
        if length in lengths:
            row = times(linear, "native", length)
            share = row["flops"][0] / row["forward"] / gemm
            yield f"{linear}, forward, T {length:,}: ≥ {least} × torch's GEMM rate", f"{share:.2f} ×", share >= least
    row = times(linear, "native")
    share = row["flops"][1] / row["both"] / gemm
    yield f"{linear}, f+b: ≥ 1.4 × torch's GEMM rate", f"{share:.2f} ×", share >= 1.4
    ratio = times("linear_attention, vector", "native")["both"] / row["both"]
    yield "vector ÷ scalar decay, f+b: ≤ 1.6", f"{ratio:.2f}", ratio <= 1.6
    for name in (delta, "delta_rule, vector", "gate_rank, linear", "gate_rank, delta", "dplr, scalar", "dplr, vector"):
        ratio = times(name, "chunked")["both"] / times(name, "native")["both"]
        yield f"{name}, f+b: ≥ 4 × chunked", f"{ratio:.1f} ×", ratio >= 4
    ratio = row["both"] / times(linear, "native", dtype="bfloat16")["both"]
    yield f"{linear}, bf16 ÷ fp32, f+b: ≥ 1.6 ×", f"{ratio:.2f} ×", ratio >= 1.6
    for peer, own, least in ((MAMBA, linear, 12), (DELTA, delta, 8), (SDPA, linear, 10)):
        ratio = times(peer)["both"] / times(own, "native")["both"]
        yield f"{own}, f+b: ≥ {least} × {peer}", f"{ratio:.1f} ×", ratio >= least
    first = next((n for n in lengths if times(SDPA, length=n)["both"] > times(linear, "native", n)["both"]), None)
    yield f"{linear} faster than SDPA from T 128, f+b", f"from T {first}", first is not None and first <= 128
    ratio = results["one_head"][1] / results["one_head"][2]
    yield "one head of 100,000 tokens uses both cores, f+b", f"{ratio:.2f} × as fast as one", ratio > 1.25


def draw(results: dict) -> None:
    """Draw time against length, all backends and peers."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    times = _Times(results)
    lengths = sorted({row["length"] for row in results["rows"]})
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    panels = (("linear_attention, scalar", (MAMBA, SDPA)), ("delta_rule, scalar", (DELTA, SDPA)))
    for axis, (op, peers) in zip(axes, panels, strict=True):
        for backend, style in zip(BACKENDS, ("o-", "s-", "^-"), strict=True):
            found = [n for n in lengths if (op, backend, n, "float32", 2) in times.rows]
            axis.plot(found, [1e3 * times(op, backend, n)["both"] for n in found], style, label=backend)
        for peer in peers:
            axis.plot(lengths, [1e3 * times(peer, length=n)["both"] for n in lengths], "--", marker=".", label=peer)
        floor = results["floors"][2]["torch float32"]
        axis.plot(lengths, [1e3 * times(op, "native", n)["flops"][1] / floor for n in lengths], ":", color="gray",
                  label="its FLOPs at torch's GEMM rate")  # fmt: skip
        axis.set(title=op, xlabel="length T", xscale="log", yscale="log", xticks=lengths)
        axis.set_xticklabels([f"{n:,}" for n in lengths])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    axes[0].set_ylabel("forward + backward, ms")
    figure.savefig(PICTURE, dpi=110, metadata={"Software": None})


def _machine() -> str:
    import transformers

    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return (
        f"{name}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"{torch.backends.cpu.get_cpu_capability()}; {time.strftime('%Y-%m-%d')}."
    )


if __name__ == "__main__":
    main()
