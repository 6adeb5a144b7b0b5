"""What a compiled kernel says: registers, spills, shared memory, instructions, and the time that they predict.

The static model plays the instructions of one warp in order, with the stall counts and scoreboards that the
instructions of NVIDIA's cards carry. Its latencies are estimates, so its times are predictions: of the steps of the
delta rule's walks it gave 2.1 and 4.4 µs where an H100 took 1.9 and 4.6, and of a scan 0.3 µs in place of 1.6.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
SHARED_KIB = {80: (164, 163), 90: (228, 227)}  # of an SM, and the most of one program
SMS, CLOCK = 132, 1.755e9  # an H100 SXM


@dataclass(frozen=True)
class Instruction:
    """One instruction of an NVIDIA kernel with the control bits of its 128."""

    address: int
    opcode: str  # HGMMA.64x64x16.F32.BF16
    text: str
    stall: int  # cycles until the next one of the warp
    written: int  # the scoreboard that its result frees, 7 for none
    read: int  # the scoreboard that its operands free, 7 for none
    awaits: int  # a bit for each scoreboard
    always: bool  # no predicate

    @property
    def kind(self) -> str:
        return self.opcode.split(".")[0]


_LOW = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?);\s*/\* 0x([0-9a-f]{16}) \*/")
_HIGH = re.compile(r"/\* 0x([0-9a-f]{16}) \*/")


def instructions(text: str) -> list[Instruction]:
    """Parse the output of `cuobjdump -sass`."""
    lines, found = text.splitlines(), []
    for line, after in itertools.pairwise(lines):
        low, high = _LOW.match(line), _HIGH.search(after)
        if low and high:
            bits = int(high[1], 16) << 64 | int(low[3], 16)
            body = re.sub(r"^@!?U?P\w+\s+", "", low[2].strip())
            found.append(Instruction(
                int(low[1], 16), body.split()[0], body, bits >> 105 & 15, bits >> 110 & 7, bits >> 113 & 7,
                bits >> 116 & 63, body == low[2].strip(),
            ))  # fmt: skip
    return found


@functools.lru_cache(maxsize=256)
def disassembled(cubin: bytes) -> tuple[list[Instruction], int]:
    """The instructions of a kernel and its registers a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(TOOLS / "cuobjdump"), "-sass", "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return instructions(text), int(re.search(r"REG:(\d+)", text)[1])


def resources(kernel: Any) -> dict[str, int]:
    """Registers a thread, spill instructions, shared memory, programs an SM, and instructions by kind."""
    target = kernel.metadata.target
    return _nvidia(kernel) if target.backend == "cuda" else _amd(kernel)


def _nvidia(kernel: Any) -> dict[str, int]:
    code, registers = disassembled(kernel.asm["cubin"])
    kinds, warps, shared = Counter(x.kind for x in code), kernel.metadata.num_warps, kernel.metadata.shared
    whole, most = SHARED_KIB[kernel.metadata.target.arch]
    programs = min(65536 // (-(-registers // 8) * 256 * warps), 64 // warps, 32, whole * 1024 // (shared + 1024))
    return {
        "registers": registers, "spills": kinds["LDL"] + kinds["STL"], "shared": shared,
        "programs": programs if shared <= most * 1024 else 0, "wgmma": kinds["HGMMA"], "mma": kinds["HMMA"],
        "cp_async": kinds["LDGSTS"] + kinds["UTMALDG"], "fma": kinds["FFMA"], "warps": warps,
    }  # fmt: skip


def _amd(kernel: Any) -> dict[str, int]:
    """On CDNA 3, a SIMD has 512 vector registers a lane, and four SIMDs share 64 KiB."""
    text, warps, shared = kernel.asm["amdgcn"], kernel.metadata.num_warps, kernel.metadata.shared
    registers, spills = (int(re.search(rf"\.{key}:\s+(\d+)", text)[1]) for key in ("vgpr_count", "vgpr_spill_count"))
    waves = min(8, 512 // max(8, -(-registers // 8) * 8))
    return {
        "registers": registers, "spills": spills, "shared": shared,
        "programs": min(waves * 4 // warps, 65536 // max(shared, 1)), "wgmma": 0,
        "mma": len(re.findall(r"^\s*v_mfma_", text, re.M)),
        "cp_async": len(re.findall(r"^\s*(?:global|buffer)_load_\w+.* lds", text, re.M)),
        "fma": len(re.findall(r"^\s*v_(?:pk_)?fma", text, re.M)), "warps": warps,
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------ the static model

# Cycles until a result can be used, of instructions that take a scoreboard.
LATENCY = {
    "LDG": 700, "LDGSTS": 700, "LDS": 30, "LDSM": 33, "STS": 25, "SHFL": 24, "MUFU": 22, "LDC": 40, "S2R": 30,
    "R2UR": 12, "HMMA": 33, "LDL": 60, "DADD": 48, "DFMA": 48, "DMUL": 48, "F2F": 20, "I2F": 20, "F2I": 20,
}  # fmt: skip
OPERANDS = {"MUFU": 8, "LDS": 8, "SHFL": 8}  # cycles until operands are read
LONG_LOOP = 16  # instructions; shorter loops are not over chunks


def loops(code: list[Instruction]) -> dict[int, int]:
    """Index of a branch backwards → index of its target."""
    at = {x.address: n for n, x in enumerate(code)}
    found = {n: at.get(goal, n) for n, x in enumerate(code) if (goal := _goal(x)) is not None}
    return {n: start for n, start in found.items() if start < n}


def _goal(x: Instruction) -> int | None:
    found = re.search(r"0x([0-9a-f]+)", x.text) if x.kind == "BRA" else None
    return int(found[1], 16) if found else None


def play(code: list[Instruction], branch: int = -1, trips: int = 1) -> tuple[float, int]:
    """Cycles and instructions of a warp that is alone. It takes the branch at index `branch` trips − 1 times."""
    back, at_address = loops(code), {x.address: n for n, x in enumerate(code)}
    time, tensor, at, issued, taken, ready = 0.0, 0.0, 0, 0, 1, [0.0] * 8
    while at < len(code) and issued < 2_000_000:
        x = code[at]
        time = max([time, *(ready[n] for n in range(6) if x.awaits >> n & 1)])
        latency, operands = LATENCY.get(x.kind, 8), OPERANDS.get(x.kind, 20)
        if x.kind == "HGMMA":
            n, k = map(int, re.search(r"64x(\d+)x(\d+)", x.opcode).groups())
            tensor = max(tensor, time) + 64 * n * k / (1024 if "TF32" in x.opcode else 2048)
            latency, operands = tensor - time + 30, tensor - time
        elif x.kind == "WARPGROUP" and "DEPBAR" in x.opcode:
            time = max(time, tensor + 30)
        if x.written != 7:
            ready[x.written] = max(ready[x.written], time + latency)
        if x.read != 7:
            ready[x.read] = max(ready[x.read], time + operands)
        time += max(1, x.stall) + (15 if x.kind == "BAR" else 0)
        issued += 1
        goal = at_address.get(_goal(x) or -1, -1)
        if x.always and (x.kind == "EXIT" or (x.kind == "BRA" and goal == at)):
            break
        if at == branch and taken < trips:
            taken, at = taken + 1, back[at]
        else:
            at = goal if x.kind == "BRA" and x.always and goal > at else at + 1
    return time, issued


@dataclass(frozen=True)
class Timing:
    """Cycles and instructions a warp, of one trip of the loops that were played and of the rest."""

    cycles: float
    issued: float
    outside: float
    outside_issued: float


def timing(code: list[Instruction], every: bool = False) -> Timing:
    """Play a kernel with 4 and with 24 trips of its longest loop, or of each of its long loops, one after another."""
    long = {end: end - start for end, start in loops(code).items() if end - start > LONG_LOOP}
    if not long:
        return Timing(0.0, 0.0, *play(code))
    cycles = issued = once = once_issued = 0.0
    for end in long if every else [max(long, key=long.__getitem__)]:
        (few, few_issued), (many, many_issued) = play(code, end, 4), play(code, end, 24)
        one, one_issued = (many - few) / 20, (many_issued - few_issued) / 20
        cycles, issued = cycles + one, issued + one_issued
        once, once_issued = few - 3 * one, few_issued - 3 * one_issued
    return Timing(cycles, issued, once - cycles, once_issued - issued)


def predicted_ms(one: Timing, warps: int, fit: int, programs: int, trips: int, moved: int, rate: float) -> float:
    """Milliseconds on an H100 of `programs` programs, of which `fit` fit an SM: the largest of three bounds.

    They are the memory's rate, the latency of programs one after another, and the rate at which an SM issues.
    """
    waves = math.ceil(programs / (SMS * max(1, fit)))
    latency = waves * (one.outside + trips * one.cycles) / CLOCK
    issue = programs * warps * (one.outside_issued + trips * one.issued) / (SMS * 4 * CLOCK)
    return 1e3 * max(moved / rate, latency, issue)
