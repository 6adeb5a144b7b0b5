"""The Decay paper's grid (Tables 2–4): one block, one budget, every way to decay."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halflife.experiments.decay_findings import report
from halflife.files import read_json, write_json, write_text
from halflife.models import ModelConfig, preset
from halflife.registry import unknown
from halflife.report.figures.decays import against_paper
from halflife.report.figures.matplotlib_renderer import save
from halflife.runs.sweep import create
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
    variants: Sequence[str] = ("core",),
    scale: str = "small",
    seeds: int = 2,
    text: Sequence[Path] = (),
    overrides: Mapping[str, Any] | None = None,
    output: Path,
    command: str = "",
) -> Path:
    """Sets up the experiment in `output`; give the folder to `execute`.

    Args:
        variants: names of `VARIANTS`; "core" and "all" stand for several.
        scale: a name of `SCALES`.
        seeds: how many, from 0.
        text: files to train on; none means Python's own library.
        overrides: fields of `Sizes` that replace the scale's.

    Raises:
        ValueError: an unknown name, too little text. FileExistsError: `output` holds a run already.
    """
    if scale not in SCALES:
        raise unknown("scale", scale, list(SCALES))
    variants = [name for given in variants for name in {"core": CORE, "all": VARIANTS}.get(given, (given,))]
    for name in variants:
        if name not in VARIANTS:
            raise unknown("variant", name, ["core", "all", *VARIANTS])
    if seeds < 1 or not variants or len(set(variants)) != len(variants):
        raise ValueError(f"need at least one seed and one variant, each once; got {seeds} and {len(variants)}")
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


def execute(folder: Path, *, seeds: Sequence[int] | None = None, show: bool = True) -> None:
    """Runs, or goes on with, the experiment in `folder`, seed by seed, and tabulates after each.

    Args:
        seeds: only these, so that several processes can share the work; None means all.
        show: whether to draw progress bars.

    Raises:
        FileNotFoundError, ValueError: no experiment in the folder, or the text is not what it was.
    """
    config, sizes, text = _read(folder)
    for seed in config["seeds"] if seeds is None else seeds:
        for name in config["variants"]:
            settings = configure(name, seed, sizes, text.digest)
            run(settings, text, _place(folder, name, seed), name=f"{name} seed {seed}", show=show)
        tabulate(folder)


def tabulate(folder: Path) -> Path:
    """Writes `results.md`, `.json`, `.png` and `.svg` of the runs that are finished; returns the first."""
    config, sizes, text = _read(folder)
    results = {
        name: {
            str(seed): read_json(found) for seed in config["seeds"]
            if (found := _place(folder, name, seed) / "result.json").exists()
        }
        for name in config["variants"]
    }  # fmt: skip
    papers = {name: VARIANTS[name].paper for name in results}
    write_json(folder / "results.json", {"results": results, "paper": papers})
    write_text(folder / "results.md", report(results, papers, setting(sizes, text)))
    save(against_paper(read_json(folder / "results.json")), folder, "results")
    return folder / "results.md"


def _read(folder: Path) -> tuple[dict[str, Any], Sizes, Text]:
    if not (folder / "config.json").exists():
        raise FileNotFoundError(f"{folder} holds no experiment (no config.json)")
    config = read_json(folder / "config.json")
    if config.get("experiment") != "decay_design":
        raise ValueError(f"{folder} holds another kind of run")
    text = Text.of_files(map(Path, config["text"]))
    if text.digest != config["digest"]:
        raise ValueError(f"the text in {folder}/config.json has changed since the experiment began")
    return config, Sizes(**config["sizes"]), text


def _place(folder: Path, name: str, seed: int) -> Path:
    return folder / name.replace("/", "-") / f"seed{seed}"


def setting(sizes: Sizes, text: Text) -> str:
    """The text and the budget in words."""
    tokens = sizes.steps * sizes.batch_size * sizes.length
    return (
        f"Text: {text.size:,} bytes (SHA-256 {text.digest[:12]}…). Model: {sizes.num_layers} layers, hidden size "
        f"{sizes.hidden_size}, {sizes.num_heads} heads. Training: {sizes.steps} steps of {sizes.batch_size} × "
        f"{sizes.length} bytes ({tokens / 1e6:.2f} M), learning rate {sizes.learning_rate:g}"
        f"{', bfloat16 autocast' if sizes.bf16 else ''}."
    )
