"""The Decay paper's grid (Tables 2–4): one block, one budget, every way to decay; its findings, checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from halflife.files import read_json, write_text
from halflife.models import ModelConfig, preset
from halflife.registry import unknown
from halflife.training.sweep import create
from halflife.training.text import Text, TextConfig, run, standard_library


@dataclass(frozen=True)
class Variant:
    """One row of the paper's tables: how the block decays, and the paper's loss with 160M parameters."""

    paper: float | None
    options: dict[str, Any]
    preset: str = "simple"


def _variant(paper: float | None, decay: str | None, granularity: str = "vector", **options: Any) -> Variant:
    modifier, settings = options.pop("modifier", ""), options.pop("decay_options", {})
    chosen = {"decay": decay, "granularity": granularity, "decay_options": settings, **options}
    return Variant(paper, chosen, f"simple{modifier}")


def _simple(paper: float, p: float, granularity: str = "vector", **options: Any) -> Variant:
    return _variant(paper, "simple", granularity, decay_options={"p": p}, **options)


# Losses: the paper's Tables 6, 8 and 9.
VARIANTS: dict[str, Variant] = {
    "vector/mamba2": _variant(2.947, "mamba2"),
    "vector/gla": _variant(2.975, "gla"),
    "vector/hgrn2": _variant(2.966, "hgrn2"),
    "vector/lightnet": _variant(3.027, "lightnet"),
    "ablation/mamba2-no-A": _variant(2.946, "mamba2_no_a"),
    "ablation/mamba2-no-Δ": _variant(3.019, "mamba2_no_dt"),
    "ablation/mamba2-no-A-Δ": _variant(2.973, "mamba2_no_a_dt"),
    "share/mamba2": _variant(2.947, "mamba2", share_keys=True),
    "share/gla": _variant(3.048, "gla", share_keys=True),
    "share/hgrn2": _variant(2.966, "hgrn2", share_keys=True),
    "share/lightnet": _variant(3.104, "lightnet", share_keys=True),
    "scalar/mamba2": _variant(2.960, "mamba2", "scalar"),
    "scalar/gla": _variant(3.008, "gla", "scalar"),
    "scalar/hgrn2": _variant(2.987, "hgrn2", "scalar"),
    "scalar/lightnet": _variant(3.032, "lightnet", "scalar"),
    "scalar/tnl": _variant(2.985, "tnl", "scalar"),
    "scalar/tnl-l": _variant(2.970, "tnl_l", "scalar"),
    "rope/mamba2": _variant(2.959, "mamba2", "scalar", position="rope"),
    "rope/gla": _variant(3.010, "gla", "scalar", position="rope"),
    "rope/hgrn2": _variant(2.990, "hgrn2", "scalar", position="rope"),
    "rope/lightnet": _variant(3.002, "lightnet", "scalar", position="rope"),
    "rope/tnl": _variant(2.975, "tnl", "scalar", position="rope"),
    "rope/tnl-l": _variant(2.972, "tnl_l", "scalar", position="rope"),
    "tpe/mamba2": _variant(2.931, "mamba2", "scalar", modifier="+tpe"),
    "tpe/gla": _variant(2.986, "gla", "scalar", modifier="+tpe"),
    "tpe/hgrn2": _variant(2.969, "hgrn2", "scalar", modifier="+tpe"),
    "tpe/lightnet": _variant(2.988, "lightnet", "scalar", modifier="+tpe"),
    "tpe/tnl": _variant(None, "tnl", "scalar", modifier="+tpe"),
    "tpe/tnl-l": _variant(2.948, "tnl_l", "scalar", modifier="+tpe"),
    "simple/0.8": _simple(2.954, 0.8),
    "simple/0.9": _simple(2.949, 0.9),
    "simple/0.95": _simple(2.939, 0.95),
    "simple/0.99": _simple(2.940, 0.99),
    "dplr/none": _variant(3.000, None, update="dplr"),
    "dplr/scalar-0": _simple(2.965, 0, "scalar", update="dplr"),
    "dplr/scalar-0.99": _simple(2.941, 0.99, "scalar", update="dplr"),
    "dplr/vector-0": _simple(2.937, 0, update="dplr"),
    "dplr/vector-0.99": _simple(2.920, 0.99, update="dplr"),
    "llama": Variant(2.921, {}, "llama"),
}


@dataclass(frozen=True)
class Finding:
    """A statement of the paper as comparisons: in each pair the first has the lower loss, or the two are equal."""

    statement: str
    pairs: tuple[tuple[str, str], ...]
    equal: bool = False


FINDINGS = (
    Finding(
        "vector decay is better than scalar",
        tuple((f"vector/{decay}", f"scalar/{decay}") for decay in ("mamba2", "gla", "hgrn2", "lightnet")),
    ),
    Finding("Mamba-2 needs its Δ", (("vector/mamba2", "ablation/mamba2-no-Δ"),)),
    Finding("Mamba-2 does not need its A", (("vector/mamba2", "ablation/mamba2-no-A"),), equal=True),
    Finding("Simple Decay with p = 0.99 is at least as good as Mamba-2", (("simple/0.99", "vector/mamba2"),)),
    Finding(
        "sharing k = 1 − λ hurts GLA and LightNet",
        (("vector/gla", "share/gla"), ("vector/lightnet", "share/lightnet")),
    ),
    Finding(
        "sharing is harmless for Mamba-2 and HGRN2",
        (("vector/mamba2", "share/mamba2"), ("vector/hgrn2", "share/hgrn2")), equal=True,
    ),
    Finding(
        "RoPE and TPE are negligible",
        (("rope/mamba2", "scalar/mamba2"), ("tpe/mamba2", "scalar/mamba2")), equal=True,
    ),
    Finding(
        "DPLR: vector decay is best, then scalar, then none",
        (("dplr/vector-0.99", "dplr/scalar-0.99"), ("dplr/scalar-0.99", "dplr/none")),
    ),
    Finding(
        "vector DPLR is the best of all",
        (("dplr/vector-0.99", "simple/0.99"), ("dplr/vector-0.99", "vector/mamba2")),
    ),
)  # fmt: skip

EQUAL = 0.01  # nats: two losses closer than this count as equal

# Enough for every finding; the rest of the grid adds more of the same.
CORE = (
    "vector/mamba2", "scalar/mamba2", "simple/0.99", "dplr/vector-0.99", "vector/gla", "scalar/gla", "share/gla",
    "ablation/mamba2-no-Δ", "vector/lightnet", "share/lightnet", "rope/mamba2", "tpe/mamba2", "dplr/scalar-0.99",
    "dplr/none", "ablation/mamba2-no-A", "share/mamba2",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """One budget for every variant."""

    hidden_size: int
    num_layers: int
    num_heads: int
    length: int
    batch_size: int
    steps: int
    learning_rate: float
    save_every: int = 100
    bf16: bool = False
    test_windows: int = 256


SCALES = {
    "smoke": Sizes(
        hidden_size=64, num_layers=2, num_heads=2, length=128, batch_size=8, steps=60, learning_rate=3e-3,
        test_windows=32,
    ),
    "small": Sizes(
        hidden_size=256, num_layers=4, num_heads=4, length=256, batch_size=4, steps=800, learning_rate=2e-3, bf16=True
    ),
    # The 160M row of Table 5 on bytes; its tokens a step and its steps.
    "paper": Sizes(
        hidden_size=768, num_layers=12, num_heads=12, length=2048, batch_size=256, steps=20_000, learning_rate=3e-4,
        save_every=1000, bf16=True, test_windows=1024,
    ),
}  # fmt: skip


def model(name: str, sizes: Sizes) -> ModelConfig:
    """The Decay Linear Transformer of a variant, on bytes."""
    variant = VARIANTS[name]
    config = preset(
        variant.preset, hidden_size=sizes.hidden_size, num_layers=sizes.num_layers, num_heads=sizes.num_heads,
        vocab_size=256, train_length=sizes.length, mixer_options=variant.options,
    )  # fmt: skip
    return dataclasses.replace(config, name=name)


def configure(name: str, seed: int, sizes: Sizes, digest: str) -> TextConfig:
    """The run of one variant and seed: AdamW and a warm-up, stable, decay schedule, as in the paper (§5)."""
    return TextConfig(
        model=model(name, sizes),
        digest=digest,
        length=sizes.length,
        steps=sizes.steps,
        batch_size=sizes.batch_size,
        learning_rate=sizes.learning_rate,
        betas=(0.9, 0.999),
        schedule="warmup_stable_decay",
        schedule_options={"num_decay_steps": sizes.steps // 3},
        bf16=sizes.bf16,
        seed=seed,
        validate_every=max(1, sizes.steps // 4),
        save_every=sizes.save_every,
        test_windows=sizes.test_windows,
    )


def new(
    *,
    variants: Sequence[str] = CORE,
    scale: str = "small",
    seeds: int = 2,
    text: Sequence[Path] = (),
    overrides: Mapping[str, Any] | None = None,
    output: Path,
    command: str = "",
) -> Path:
    """Sets up the experiment in `output`; give the folder to `execute`.

    Args:
        variants: names of `VARIANTS`.
        scale: a name of `SCALES`.
        seeds: how many, from 0.
        text: files to train on; none means Python's own library.
        overrides: fields of `Sizes` that replace the scale's.

    Raises:
        ValueError: an unknown name, too little text. FileExistsError: `output` holds a run already.
    """
    if scale not in SCALES:
        raise unknown("scale", scale, list(SCALES))
    for name in variants:
        if name not in VARIANTS:
            raise unknown("variant", name, list(VARIANTS))
    if seeds < 1 or not variants:
        raise ValueError(f"need at least one variant and one seed; got {len(variants)} and {seeds}")
    sizes = dataclasses.replace(SCALES[scale], **(overrides or {}))
    files = [str(Path(file).resolve()) for file in text or standard_library()]
    digest = Text.of_files(map(Path, files)).digest
    for name in variants:
        configure(name, 0, sizes, digest)
    config = {
        "command": command, "experiment": "decay_design", "variants": list(variants), "scale": scale,
        "seeds": list(range(seeds)), "sizes": dataclasses.asdict(sizes), "text": files, "digest": digest,
    }  # fmt: skip
    return create(output, config)


def execute(
    folder: Path, *, seeds: Sequence[int] | None = None, show: bool = True
) -> dict[str, list[dict[str, Any]]]:
    """Runs, or goes on with, the experiment in `folder`, seed by seed; then writes `results.md`.

    Args:
        seeds: only these, so that several processes can share the work; None means all.

    Returns:
        Each variant's results, one a seed.
    """
    config = read_json(folder / "config.json")
    sizes, text = Sizes(**config["sizes"]), Text.of_files(map(Path, config["text"]))
    if text.digest != config["digest"]:
        raise ValueError(f"the text in {folder}/config.json has changed since the experiment began")
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in config["variants"]}
    for seed in config["seeds"] if seeds is None else seeds:
        for name in config["variants"]:
            place = folder / name.replace("/", "-") / f"seed{seed}"
            title = f"{name} seed {seed}"
            results[name].append(
                run(configure(name, seed, sizes, text.digest), text, place, name=title, show=show)
            )
        write_text(folder / "results.md", report(results, sizes, text))
    return results


def report(results: Mapping[str, Sequence[Mapping[str, Any]]], sizes: Sizes, text: Text) -> str:
    """The loss table beside the paper's, and what became of each finding, as Markdown."""
    tokens = sizes.steps * sizes.batch_size * sizes.length
    lines = [
        f"Text: {text.size:,} bytes (SHA-256 {text.digest[:12]}…). Model: {sizes.num_layers} layers, hidden size "
        f"{sizes.hidden_size}, {sizes.num_heads} heads. Training: {sizes.steps} steps of {sizes.batch_size} × "
        f"{sizes.length} bytes ({tokens / 1e6:.2f} M), learning rate {sizes.learning_rate:g}"
        f"{', bfloat16 autocast' if sizes.bf16 else ''}.",
        "",
        "## Loss",
        "",
        "Test loss in nats a byte; the paper's is nats a token, 160M parameters (Tables 6, 8, 9).",
        "",
        "| variant | parameters | tokens/s | loss, by seed | mean | paper |",
        "|---|--:|--:|---|--:|--:|",
    ]
    for name, runs in results.items():
        if runs:
            losses, speed = [run["test"] for run in runs], fmean(run["tokens_per_second"] for run in runs)
            paper = VARIANTS[name].paper
            lines.append(
                f"| {name} | {runs[0]['parameters']:,} | {speed:,.0f} | {', '.join(f'{x:.4f}' for x in losses)} "
                f"| {fmean(losses):.4f} | {'–' if paper is None else f'{paper:.3f}'} |"
            )
    lines += [
        "", "## Findings", "",
        f"Difference: loss of the second minus loss of the first, by seed. Order: the sign is right on every seed; "
        f"equality: the mean is within ±{EQUAL} nats.", "",
        "| finding | first, second | difference here | paper | holds here | in the paper |",
        "|---|---|---|--:|---|---|",
    ]  # fmt: skip
    for finding in FINDINGS:
        lines += [row for pair in finding.pairs if (row := _compared(finding, pair, results))]
    return "\n".join(lines) + "\n"


def _compared(finding: Finding, pair: tuple[str, str], results: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """A row of the findings' table; nothing if one of the two was not run."""
    first, second = (results.get(name) or () for name in pair)
    differences = [b["test"] - a["test"] for a, b in zip(first, second, strict=False)]
    if not differences:
        return ""
    papers = [VARIANTS[name].paper for name in pair]
    paper = None if None in papers else papers[1] - papers[0]  # type: ignore[operator]
    shown = ", ".join(f"{x:+.4f}" for x in differences)
    cells = (
        finding.statement, f"{pair[0]}, {pair[1]}", shown, "–" if paper is None else f"{paper:+.3f}",
        verdict(differences, finding.equal), "–" if paper is None else verdict([paper], finding.equal),
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def verdict(differences: Sequence[float], equal: bool) -> str:
    """Whether losses of several seeds are ordered, or equal, as a finding says: "yes", "no" or "seeds differ"."""
    if equal:
        return "yes" if abs(fmean(differences)) <= EQUAL else "no"
    right = [x > 0 for x in differences]
    return "yes" if all(right) else "seeds differ" if any(right) else "no"
