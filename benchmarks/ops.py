"""Speed of the chunked ops, their peers and a floor: `python benchmarks/ops.py [--write docs/benchmarks.md]`.

B 1, H 12, K = V = 64, float32. The candidates run in turn in one process, and the table has medians. The floor is the
time of the same FLOPs at the rate of one 2048³ matrix product, measured in the same run.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import cases  # noqa: E402
import timing  # noqa: E402

LENGTHS = (512, 1024, 2048, 4096, 8192)
MARK = "<!-- table -->"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="also write the tables here")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--memory", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory:
        print(_grown(arguments.memory[0], int(arguments.memory[1])))
        return
    torch.set_num_threads(2)
    rate = max(timing.gemm_rate() for _ in range(3))  # on a busy machine, a low rate would improve the ratios
    import transformers

    lines = [
        f"Machine: {_processor()}, {torch.get_num_threads()} threads; torch {torch.__version__}, transformers "
        f"{transformers.__version__}. fp32 GEMM {rate / 1e9:.0f} GFLOP/s (2048³). {time.strftime('%Y-%m-%d')}.",
        "",
    ]
    results = {length: _times(length) for length in arguments.lengths}
    lines += [*_table(results, rate), "", *_targets(results, rate), "", *_layer(), "", *_mqar()]
    text = "\n".join(lines)
    print(text)
    if arguments.write:
        head, _, rest = arguments.write.read_text().partition(MARK) if arguments.write.exists() else ("", "", "")
        after = rest.partition("<!-- ")
        arguments.write.write_text(f"{head}{MARK}\n\n{text}\n\n{''.join(after[1:])}")


def _times(length: int) -> dict[str, tuple[float, float, tuple[float, float], float]]:
    """Map each name to (forward s, forward + backward s, FLOPs of both, growth of the process in MB)."""
    x = cases.inputs(length)
    found = [*_ours(x), cases.sdpa(x), *cases.transformers_peers(x)]
    weight = torch.randn_like(x["v"])

    def no_grad(case: cases.Case):
        def run() -> None:
            with torch.no_grad():
                case.forward()

        return run

    forward = timing.medians({case.name: no_grad(case) for case in found}, 4)
    both = timing.medians({case.name: lambda case=case: case.forward().backward(weight) for case in found}, 8)
    return {c.name: (forward[c.name], both[c.name], c.flops, _memory(c.name, length)) for c in found}


def _ours(x: dict) -> list[cases.Case]:
    gated = [case for case in cases.gated(x) if case.name.startswith("gate_rank")]
    return [*cases.ours(x), *gated]


def _memory(name: str, length: int) -> float:
    """Return the MB by which a fresh process grows in one forward + backward of the case."""
    command = [sys.executable, __file__, "--memory", name, str(length)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def _grown(name: str, length: int) -> float:
    x = cases.inputs(length)
    every = [*_ours(x), cases.sdpa(x), *(cases.transformers_peers(x) if name.startswith("transformers") else [])]
    case = next(case for case in every if case.name == name)
    small = cases.inputs(64)  # a first product loads libraries
    cases.ours(small)[3].forward().sum().backward()
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak to the resident memory
    before = _status("VmRSS")
    case.forward().backward(torch.ones_like(x["v"]))
    return (_status("VmHWM") - before) / 1024


def _status(field: str) -> int:
    """Return a memory field of this process in kB (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def _table(results: dict, rate: float) -> list[str]:
    lines = [
        "| T | op | forward ms | ÷ floor | forward + backward ms | ÷ floor | peak memory MB |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for length, found in results.items():
        for name, (forward, both, flops, grown) in found.items():
            lines.append(
                f"| {length} | {name} | {1e3 * forward:.1f} | {forward * rate / flops[0]:.1f} | {1e3 * both:.1f} | "
                f"{both * rate / flops[1]:.1f} | {grown:.0f} |"
            )
    return lines


def _targets(results: dict, rate: float) -> list[str]:
    ours, delta, softmax = "linear_attention, scalar", "delta_rule, scalar", "softmax attention (SDPA)"
    at = results.get(2048)
    lines = ["| target | measured |", "|---|---|"]
    if at:
        share = _share()
        lines.append(f"| linear_attention (scalar) forward at T 2048: ≥ 25 % of the GEMM rate | {share:.0%} |")
        if "transformers Mamba-2 scan" in at:
            ratio = at["transformers Mamba-2 scan"][1] / at[ours][1]
            lines.append(f"| ≥ 100 × transformers' Mamba-2 forward + backward at T 2048 | {ratio:.1f} × |")
        ratio = at["transformers gated delta rule"][1] / at[delta][1]
        lines.append(f"| delta_rule ≥ 1.5 × transformers' forward + backward at T 2048 | {ratio:.2f} × |")
        for first, second, most in (
            ("linear_attention, vector", ours, 2.5), ("delta_rule, vector", delta, 2.5), ("dplr, scalar", delta, 2),
            ("dplr, vector", "delta_rule, vector", 2), ("gate_rank, linear", ours, 1.6),
            ("gate_rank, delta", delta, 1.6),
        ):  # fmt: skip
            forward, both = (at[first][i] / at[second][i] for i in (0, 1))
            lines.append(
                f"| {first} ≤ {most} × {second} at T 2048 | {forward:.2f} × forward, {both:.2f} × with backward |"
            )
    for length, found in results.items():
        ratio = found[softmax][1] / found[ours][1]
        lines.append(f"| faster than SDPA forward + backward at T {length} | {ratio:.2f} × |")
    return lines + _growth()


def _share() -> float:
    """Return forward FLOP/s at T 2048 divided by those of a GEMM; the two run in turn."""
    case = cases.ours(cases.inputs(2048))[1]
    a, b = torch.randn(2, 2048, 2048)

    def forward() -> None:
        with torch.no_grad():
            case.forward()

    found = timing.medians({"op": forward, "gemm": lambda: a @ b}, 6)
    return (case.flops[0] / found["op"]) / (2 * 2048**3 / found["gemm"])


def _growth() -> list[str]:
    """Measure the cost of four times the length. The two lengths run in turn, and nothing else empties the caches."""
    short, long = cases.inputs(2048), cases.inputs(8192)
    weights = torch.randn_like(short["v"]), torch.randn_like(long["v"])
    lines = []
    for index in (1, 3):
        pair = cases.ours(short)[index], cases.ours(long)[index]

        def forward(case: cases.Case) -> None:
            with torch.no_grad():
                case.forward()

        one = timing.medians({"short": lambda p=pair: forward(p[0]), "long": lambda p=pair: forward(p[1])}, 6)
        two = timing.medians(
            {
                "short": lambda p=pair: p[0].forward().backward(weights[0]),
                "long": lambda p=pair: p[1].forward().backward(weights[1]),
            },
            10,
        )
        lines.append(
            f"| {pair[0].name}: T 8192 costs ≤ 4.4 × T 2048 forward, ≤ 5 × forward + backward (alone, in turn) "
            f"| {one['long'] / one['short']:.2f} ×, {two['long'] / two['short']:.2f} × |"
        )
    return lines


def _layer() -> list[str]:
    """Measure the cost of PoST on a Mamba-2 layer, d 768, T 2048."""
    from halflife import layers

    def layer(post: dict | None):
        torch.manual_seed(0)
        return layers.build("mamba2", hidden_size=768, num_heads=24, state_size=64, post=post)

    plain, post = layer(None), layer({"train_length": 2048})
    x = torch.randn(1, 2048, 768, requires_grad=True)
    found = timing.medians(
        {"plain": lambda: plain(x)[0].sum().backward(), "post": lambda: post(x)[0].sum().backward()}, 20
    )
    share = found["post"] / found["plain"] - 1
    return [
        f"Mamba-2 layer, d 768, T 2048, forward + backward: {1e3 * found['plain']:.0f} ms, with PoST "
        f"{1e3 * found['post']:.0f} ms: {share:+.1%} (target < 2 %)."
    ]


def _mqar() -> list[str]:
    from halflife import tasks

    task = tasks.build("mqar", vocab_size=8192, length=512, num_pairs=128)
    seconds = timing.medians({"mqar": lambda: task.generate(2048, 0)}, 3)["mqar"]
    return [f"MQAR, V 8192, T 512, K 128: {2048 / seconds:,.0f} examples/s (target ≥ 20,000)."]


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.processor()


if __name__ == "__main__":
    main()
