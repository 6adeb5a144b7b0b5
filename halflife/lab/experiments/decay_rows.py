"""The rows of the Decay paper's tables: as it prints them, as its authors ran them, and their losses."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from halflife.models import ModelConfig, preset
from halflife.registry import unknown


@dataclass(frozen=True)
class Variant:
    """One row of the paper's tables."""

    paper: float | None  # the paper's loss with 160M parameters, nats per token; None where it gives none
    options: dict[str, Any]  # options of the mixer, which select its decay
    preset: str = "simple"  # the preset of the block


def _variant(paper: float | None, decay: str | None, granularity: str = "vector", **options: Any) -> Variant:
    modifier, settings = options.pop("modifier", ""), options.pop("decay_options", {})
    chosen = {"decay": decay, "granularity": granularity, "decay_options": settings, **options}
    return Variant(paper, chosen, f"simple{modifier}")


def _simple(paper: float, p: float, granularity: str = "vector", **options: Any) -> Variant:
    return _variant(paper, "simple", granularity, decay_options={"p": p}, **options)


# Groups whose rows differ in their decay: options of the mixer, and decay → the paper's loss (Tables 6, 8, 9).
SCALAR = {"granularity": "scalar"}
DECAYS: dict[str, tuple[dict[str, Any], dict[str, float | None]]] = {
    "vector": ({}, {"mamba2": 2.947, "gla": 2.975, "hgrn2": 2.966, "lightnet": 3.027}),
    "ablation": ({}, {"mamba2-no-A": 2.946, "mamba2-no-Δ": 3.019, "mamba2-no-A-Δ": 2.973}),
    "share": ({"share_keys": True}, {"mamba2": 2.947, "gla": 3.048, "hgrn2": 2.966, "lightnet": 3.104}),
    "scalar": (
        SCALAR, {"mamba2": 2.960, "gla": 3.008, "hgrn2": 2.987, "lightnet": 3.032, "tnl": 2.985, "tnl-l": 2.970}
    ),
    "rope": (
        SCALAR | {"position": "rope"},
        {"mamba2": 2.959, "gla": 3.010, "hgrn2": 2.990, "lightnet": 3.002, "tnl": 2.975, "tnl-l": 2.972},
    ),
    "tpe": (
        SCALAR | {"modifier": "+tpe_paper"},
        {"mamba2": 2.931, "gla": 2.986, "hgrn2": 2.969, "lightnet": 2.988, "tnl": None, "tnl-l": 2.948},
    ),
}  # fmt: skip
VARIANTS: dict[str, Variant] = {
    **{
        f"{group}/{decay}": _variant(paper, decay.lower().replace("-", "_").replace("δ", "dt"), **options)
        for group, (options, losses) in DECAYS.items()
        for decay, paper in losses.items()
    },
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


GROUPS = ("core", "all", "all-ours", "released", "as-run")
# What the authors' code has in place of the paper's (docs/fidelity.md). Mamba-2 differs where it shares its keys.
RELEASED = {
    "decay": {name: f"{name}_released" for name in ("gla", "hgrn2", "lightnet", "tnl", "tnl_l")},
    "position": {"rope": "half_lrpe"},
    "update": {"dplr": "dplr_released"},
}


def find_variant(name: str) -> Variant:
    """The variant `name`, or `name:released`, the same row as the paper's authors ran it.

    `tpe/gla:ours` and the others with TPE have our Toeplitz layer, for which the paper has no loss.
    """
    row, _, form = name.partition(":")
    if row not in VARIANTS or form not in ("", "released", *(["ours"] if row.startswith("tpe/") else [])):
        raise unknown("variant", name, [*GROUPS, *VARIANTS])
    printed = VARIANTS[row]
    if not form:
        return printed
    if form == "ours":
        return Variant(None, printed.options, printed.preset.replace("+tpe_paper", "+tpe"))
    options = {key: RELEASED.get(key, {}).get(str(value), value) for key, value in printed.options.items()}
    if row == "share/mamba2":
        options["decay"] = "mamba2_released"
    released = Variant(printed.paper, options, printed.preset.replace("+tpe_paper", "+tpe_released"))
    if released == printed:
        raise ValueError(f"{row} was run as the paper prints it")
    return released


def differs(name: str) -> bool:
    """Whether the paper's authors ran a row in another form than the paper prints."""
    try:
        find_variant(f"{name}:released")
    except ValueError:
        return False
    return True


def as_run(name: str) -> str:
    """The name of the form of a row that the paper's authors ran."""
    return f"{name}:released" if differs(name) else name


def paper_loss(name: str) -> float | None:
    """The paper's loss of a variant in nats per token, which belongs to the form that its authors ran.

    None for a printed form that they did not run, and for a control or a preset, which the paper's tables have not.
    """
    ran = "@" not in name and name.partition(":")[0] in VARIANTS and not differs(name)
    return find_variant(name).paper if ran else None


def row_or_preset(name: str, **sizes: Any) -> ModelConfig:
    """The configuration of a row of the grid, `vector/gla` or `rope/tnl:released`, or of a preset."""
    if "/" not in name:
        return preset(name, **sizes)
    variant = find_variant(name)
    options = {**variant.options, **sizes.pop("mixer_options", {})}
    return dataclasses.replace(preset(variant.preset, mixer_options=options, **sizes), name=name)


def row_model(name: str, **sizes: Any) -> ModelConfig:
    """The configuration of a row of the grid. Raises: ValueError: an unknown row; the message lists them."""
    find_variant(name)
    return row_or_preset(name, **sizes)
