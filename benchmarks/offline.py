"""GPU kernels judged without a GPU: `make gpu-offline` writes `docs/gpu.md` and `benchmarks/results/offline.json`.

Every kernel that the package launches is compiled for the targets of `offline_kernels.TARGETS`, at the head sizes of
`CASES`. Registers, spills, tensor-core instructions, launches and bytes are facts of compiled code and of calls.
All times are predictions, by the static model of `offline_code` and the rates that a GPU measured in `results/`.

A row that misses a limit is listed under "missed_today" in the file and may not get worse. New misses need `--accept`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent
sys.path[:0] = [str(FOLDER), str(ROOT)]

import offline_code  # noqa: E402
import offline_fla  # noqa: E402
import offline_kernels  # noqa: E402
import offline_loss  # noqa: E402
import offline_models  # noqa: E402
import offline_page  # noqa: E402
import offline_passes  # noqa: E402
import offline_sources  # noqa: E402
import offline_tokens  # noqa: E402
from offline_kernels import TARGETS, Launch  # noqa: E402
from offline_limits import COUNTED, Row, least, missed_bytes, misses, more, worse  # noqa: E402

RESULTS = FOLDER / "results" / "offline.json"
LAUNCH_MS = 0.003  # the least that a launch takes
KERNELS = 1.17e12  # bytes/s that an H100 gave our kernels of 2026-11-26; later ones await their timing
MODELS = [
    "mamba2", "mamba2+post", "mamba2+gate_rank", "mamba2+post+gate_rank", "gated_deltanet", "gated_deltanet+gate_rank",
    "gla", "rwkv7", "llama", "mamba2+ska", "retnet", "tnl", "tnl_released", "tnl_l", "simple", "hgrn2", "lightnet",
    "longhorn", "longhorn_paper", "mamba3", "mamba3_mimo", "mamba3_echo", "deltanet", "kda", "gdn2", "comba",
    "deltaproduct", "mesa", "fox",
]  # fmt: skip
OPTIONAL = ("out", "states", "leaving")  # tensors that a walk writes if it is given them
NARROW = (torch.bfloat16, torch.float16)


PARTS = (
    "versions", "rates", "sources", "kernels", "facts", "missed_today", "ops", "ops_today", "models", "models_today",
    "loss", "fla",
)  # fmt: skip


class Case(NamedTuple):
    """A call of an op whose kernels are compiled, forward and backward."""

    op: str
    mode: str  # none, scalar, vector, gate_rank
    key: int = 64
    value: int = 64
    dtype: torch.dtype = torch.bfloat16
    heads: int = 16
    shared: int = 16  # heads of queries and keys
    gain: bool = False  # whether values have factors, and outputs a skip
    shapes: tuple[tuple[int, int], ...] = ((1, 32768), (16, 2048))  # (B, T)


CASES = {
    f"linear, {mode}, {size}": Case("linear_attention", mode, size, size)
    for mode, size in (
        ("none", 64), ("scalar", 64), ("scalar", 128), ("vector", 64), ("gate_rank", 64), ("gate_rank", 128),
    )
}  # fmt: skip
CASES |= {f"delta, {mode}, 64": Case("delta_rule", mode) for mode in ("scalar", "vector", "gate_rank")}
CASES |= {
    f"dplr, {mode}, {size}": Case("dplr", mode, size, size)
    for mode, size in (("vector", 64), ("vector", 128), ("scalar", 64))
}
CASES["koopman, 64"] = Case("koopman_attention", "none")
CASES["linear, gla"] = Case("linear_attention", "vector", 128, 256, heads=4, shared=4, shapes=((16, 2048), (1, 32768)))
for name, mode in (("mamba2", "scalar"), ("mamba2+gate_rank", "gate_rank")):
    CASES[f"linear, {name}"] = Case(
        "linear_attention", mode, 128, 64, heads=32, shared=1, gain=True, shapes=((8, 2048),)
    )  # fmt: skip
# Bytes ÷ floor that kernels should reach, forward and with the backward pass, by case and batch size. The floor is the
# bytes of q, k, v and o, and three times those of both passes.
BYTES = {
    ("linear, none, 64", 16): (1.2, 1.7), ("linear, none, 64", 1): (1.7, 2.0),
    ("linear, scalar, 64", 16): (1.2, 1.7), ("linear, scalar, 64", 1): (1.7, 2.0),
    ("linear, vector, 64", 16): (1.5, 2.3),
    ("linear, gate_rank, 64", 16): (1.2, 1.8), ("linear, gate_rank, 64", 1): (1.7, 2.2),
    ("delta, scalar, 64", 16): (1.9, 3.0), ("delta, gate_rank, 64", 16): (2.5, 3.5),
}  # fmt: skip


def tensors_of(case: Case, batch: int, length: int) -> dict[str, Tensor | None]:
    """The arguments of a call, without data."""

    def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=True)

    at = (batch, length)
    tensors: dict[str, Tensor | None] = {
        "q": leaf(*at, case.shared, case.key, dtype=case.dtype),
        "k": leaf(*at, case.shared, case.key, dtype=case.dtype),
        "v": leaf(*at, case.heads, case.value, dtype=case.dtype),
    }
    op = "gate_rank" if case.mode == "gate_rank" else case.op
    if op == "gate_rank":
        tensors |= {"g_slow": leaf(*at, case.heads), "g_fast": leaf(*at, case.heads)}
    else:
        channels = (case.key,) if case.mode == "vector" else ()
        tensors["g"] = None if case.mode == "none" else leaf(*at, case.heads, *channels)
    if case.gain:
        tensors |= {"gain": leaf(*at, case.heads), "skip": leaf(case.heads)}
    if op == "dplr":
        tensors |= {name: leaf(*at, case.heads, case.key, dtype=case.dtype) for name in "ab"}
    elif op != "linear_attention":
        tensors["beta"] = leaf(*at, case.heads) if case.op == "delta_rule" else None
    return tensors


def call_of(case: Case, batch: int, length: int) -> Any:
    from halflife.ops.call import Call

    op = "gate_rank" if case.mode == "gate_rank" else case.op
    return Call.of(op, tensors_of(case, batch, length))


def output_of(case: Case, batch: int, length: int) -> Tensor:
    """What our kernels return."""
    from halflife.ops import koopman_attention
    from halflife.ops.backends.triton import run, run_dplr

    if case.op != "koopman_attention":
        return (run_dplr if case.op == "dplr" else run)(call_of(case, batch, length))[0]
    with offline_models.on_a_gpu():
        return koopman_attention(**tensors_of(case, batch, length), power=1)[0]  # type: ignore[arg-type]


def launches_of(
    case: Case, batch: int, length: int, target: str = "sm_90"
) -> tuple[list[Launch], list[Launch]]:  # fmt: skip
    """The kernels that a call launches on a target, whose tiles may be its own, forward and then backward."""
    forward: list[Launch] = []
    backward: list[Launch] = []
    with offline_kernels.captured(forward, target):
        o = output_of(case, batch, length)
    with offline_kernels.captured(backward, target):
        o.float().sum().backward()
    return forward, backward


def launches_by_target(case: Case) -> list[dict[str, Launch]]:
    """Each launch of a case, for each target. One that only the tiles of other targets need counts for all."""
    found: dict[str, dict[str, Launch]] = {}
    for target in TARGETS:
        for launch in [x for shape in case.shapes for part in launches_of(case, *shape, target) for x in part]:
            found.setdefault(name_of(launch, ""), {}).setdefault(target, launch)
    return [dict.fromkeys(TARGETS, next(iter(launches.values()))) | launches for launches in found.values()]


def name_of(launch: Launch, case: str) -> str:
    """ "walks.walk_kernel BACK out, linear, scalar, 64": the kernel, its flags and what it writes, and the case."""
    flags = [name for name, value in launch.constants().items() if value is True]
    flags += [name for name in OPTIONAL if isinstance(launch.arguments.get(name), Tensor)]
    flags += ["identity"] if launch.arguments.get("v", launch) is None else []
    return f"{' '.join((offline_sources.name_of(launch.function.fn.__module__, launch.name), *flags))}, {case}"


def trips(launch: Launch) -> int:
    """How many chunks a program of a walk passes, one after another; for a program of one chunk its blocks of rows, or
    the levels of its pairs of tokens (with several blocks this counts the code around the levels too often)."""
    given = launch.arguments
    if "LENGTH" in given and "entering" in given:
        return math.ceil(given["LENGTH"] / given["C"])
    if "LEVELS" in given:
        return given["LEVELS"] * (math.ceil(given["K"] / given["BK"]) if "reads" in given else 1)
    if "HEADS" in given:  # a program has one of three loops, whose times are added
        return math.ceil(given["HEADS"] / 3)
    if "LENGTH" in given:
        return math.ceil(given.get("K", 1) / given.get("BK", 1))
    return given.get("PER", 1)


def row_of(launch: Launch, copy: float, others: dict[str, Launch] | None = None) -> tuple[Row, dict[str, Any]]:
    """The row of a kernel, and facts about it: which limits it has, and its cycles by the static model.

    `launch` is that of an H100, and `others` are those of targets with other tiles.
    """
    text = offline_kernels.intermediate(launch)
    does = offline_kernels.roles(text)
    row: Row = {}
    for target in TARGETS:
        own = (others or {}).get(target, launch)
        kernel = offline_kernels.compiled(own, target)
        row[target] = {**offline_code.resources(kernel), "bytes": offline_kernels.moved(own, does)}
        if target == "sm_90":
            blocks = "LENGTH" in launch.arguments and not {"LEVELS", "entering"} & launch.arguments.keys()
            cycles = offline_code.timing(offline_code.disassembled(kernel.asm["cubin"])[0], every=blocks)
    given = launch.arguments
    tensors = [x for x in given.values() if isinstance(x, Tensor)]
    facts = {
        "products": "tt.dot" in text and any(x.dtype in NARROW for x in tensors),
        "walk": "tt.dot" in text and ("entering" in given or "LEVELS" not in given) and trips(launch) > 1,
        "timing": [round(x) for x in (cycles.cycles, cycles.issued, cycles.outside, cycles.outside_issued)],
        "moves": {name: sorted(kinds) for name, kinds in does.items() if kinds},
    }
    row["sm_90"]["predicted_ms"] = round(predicted_ms(launch, row, facts, copy), 4)
    return row, facts


def predicted_ms(launch: Launch, row: Row, facts: dict[str, Any], copy: float) -> float:
    """Predict the milliseconds of a launch on an H100 from its kernel's row, which may be of another batch size."""
    size = offline_kernels.moved(launch, facts["moves"])
    figures, one = row["sm_90"], offline_code.Timing(*facts["timing"])
    return offline_code.predicted_ms(
        one, figures["warps"], figures["programs"], launch.programs, trips(launch), size, copy
    )


# --------------------------------------------------------------------------------------------------- the file


def rates() -> dict[str, float]:
    """The rates that a GPU measured: bytes/s of a copy, operations/s of a product in bfloat16, and of what card."""
    file = max((FOLDER / "results").glob("nvidia-*.md"))
    text = file.read_text(encoding="utf-8")
    return {
        "copy": 1e12 * float(re.search(r"([\d.]+) TB/s copy", text)[1]),
        "product": 1e12 * float(re.search(r"([\d.]+) TFLOP/s", text)[1]),
    }


def write(data: dict[str, Any]) -> None:
    """Write the file in one line for each row, so that a change of one is a change of one line."""
    lines = []
    for part, rows in data.items():
        inner = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
        lines.append(f" {json.dumps(part)}: {{\n{inner}\n }}")
    new = RESULTS.with_suffix(".new")
    new.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    os.replace(new, RESULTS)


def read() -> dict[str, Any]:
    if RESULTS.exists():
        return json.loads(RESULTS.read_text(encoding="utf-8"))
    return {part: {} for part in PARTS}


def kernel_of(row: str) -> str:
    """ "states._outputs_kernel" of the name of a row."""
    return row.split(",")[0].split(" ")[0]


def key_of(launches: dict[str, Launch], code: str) -> str:
    """A hash of a kernel's code and of all that its launches hand over, for each target."""
    parts = [code]
    for target, launch in launches.items():
        given = {
            name: (x.dtype, tuple(x.shape), x.stride()) if isinstance(x, Tensor) else x
            for name, x in launch.arguments.items()
        }
        parts.append(repr((target, launch.grid, given, sorted(launch.options.items()))))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def compile_all(data: dict[str, Any]) -> None:
    """Compile what has no row, or one of other code or of other launches, and save each row at once."""
    import triton

    codes = offline_sources.sources(hosts=False)
    versions = {"torch": torch.__version__.split("+")[0], "triton": triton.__version__}
    versions["fla-core"] = metadata.version("fla-core")
    if any(data["versions"].get(name) != versions[name] for name in ("triton", "fla-core")):
        data["fla"] = {}
    if data["versions"].get("triton") != versions["triton"]:
        data["facts"] = {}
    data["versions"] = versions
    copy, wanted = rates()["copy"], set()
    calls = {case: launches_by_target(call) for case, call in CASES.items()}
    alike = offline_tokens.launches()
    calls |= {case: [dict.fromkeys(TARGETS, launch) for launch in found] for case, found in alike.items()}
    calls |= offline_passes.launches_by_target()
    for case, found in calls.items():
        for launches in found:
            name = name_of(launches["sm_90"], case)
            if name in wanted:  # of another shape
                continue
            key = key_of(launches, codes[kernel_of(name)])
            if data["facts"].get(name, {}).get("key") != key:
                print(f"compiles {name}", file=sys.stderr, flush=True)
                data["kernels"][name], facts = row_of(launches["sm_90"], copy, launches)
                data["facts"][name] = {**facts, "key": key}
                write(data)
            wanted.add(name)
    for part in ("kernels", "facts"):
        data[part] = {name: row for name, row in data[part].items() if name in wanted}
    data["sources"] = offline_sources.sources()


def ops(data: dict[str, Any], copy: float) -> dict[str, Any]:
    """Case → launches, bytes ÷ floor and predicted ms, each forward and with the backward pass, by shape."""
    found: dict[str, Any] = {}
    for case, call in CASES.items():
        if call.op == "koopman_attention":  # much of it are passes of torch, which the counts of models have
            continue
        found[case] = {}
        for batch, length in call.shapes:
            parts = launches_of(call, batch, length)
            scores = batch * length * call.dtype.itemsize
            floor = scores * 2 * (call.shared * call.key + call.heads * call.value)
            does = [[data["facts"][name_of(x, case)]["moves"] for x in part] for part in parts]
            size = [sum(map(offline_kernels.moved, *both)) for both in zip(parts, does, strict=True)]
            times = [
                sum(
                    max(LAUNCH_MS, predicted_ms(x, data["kernels"][name], data["facts"][name], copy))
                    for x in part if (name := name_of(x, case))
                )
                for part in parts
            ]  # fmt: skip
            found[case][f"{batch} × {length}"] = {
                "launches": [len(parts[0]), len(parts[0]) + len(parts[1])],
                "bytes_over_floor": [round(size[0] / floor, 2), round(sum(size) / (3 * floor), 2)],
                "target": BYTES.get((case, batch)),
                "predicted_ms": [round(times[0], 3), round(sum(times), 3)],
            }
    return found


def limited(data: dict[str, Any], accept: bool) -> list[str]:
    """Keep "missed_today" to what is missed, and return what may not be: a new miss, or a worse one."""
    allowed, complaints, missed = data["missed_today"], [], {}
    for name, row in data["kernels"].items():
        facts = data["facts"][name]
        wrong = worse(row, facts, allowed.get(name, {}))
        complaints += [f"{name}: {', '.join(wrong)}"] if wrong and not accept else []
        if now := misses(row, facts):
            missed[name] = now if accept or not wrong else allowed.get(name, {})
    data["missed_today"] = {name: row for name, row in missed.items() if row}
    return complaints


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accept", action="store_true", help="list what newly misses a limit under missed_today")
    parser.add_argument("--models", nargs="*", default=MODELS, help="count these presets again (default: all)")
    arguments = parser.parse_args()
    data = read()
    compile_all(data)
    complaints = limited(data, arguments.accept)
    roofs = rates()
    data["ops"] = ops(data, roofs["copy"])
    write(data)
    roofs["triton"] = min(roofs["copy"], KERNELS)
    data["rates"] = {name: float(f"{value:.4g}") for name, value in roofs.items()}
    for name in arguments.models:
        print(f"counts {name}", file=sys.stderr, flush=True)
        data["models"][name] = offline_models.row_of(name, roofs)
        write(data)
    reached = {
        "ops_today": missed_bytes(data["ops"]),
        "models_today": {
            name: {key: row[key] for key in COUNTED if row[key] is not None} for name, row in data["models"].items()
        },
    }
    for part, now in reached.items():
        old = {} if arguments.accept else data.get(part, {})
        new = [name for name in now if name not in old] if part == "ops_today" and old else []
        complaints += more(now, old) + [f"{name}: misses its bytes now" for name in new]
        data[part] = least({name: row for name, row in now.items() if name not in new}, old)
    data["loss"] = offline_loss.rows(roofs)
    data["fla"] = offline_fla.rows(roofs["copy"], data["fla"])
    write(data)
    offline_fla.write_choice(data)
    offline_page.write(data, ROOT)
    print(offline_page.rows(data))
    if complaints:
        sys.exit("worse than a limit (--accept takes it into missed_today):\n" + "\n".join(complaints))


if __name__ == "__main__":
    main()
