"""Families of presets and modifiers, by which `halflife list` orders them."""

from __future__ import annotations

from collections.abc import Iterable

FAMILIES: dict[str, tuple[str, ...]] = {
    "state space": ("mamba2", "mamba3", "mamba3_mimo", "mamba3_echo", "longhorn", "longhorn_paper"),
    "linear attention": ("gla", "retnet", "hgrn2", "lightnet", "tnl", "tnl_released", "tnl_l", "simple"),
    "delta rule": ("deltanet", "gated_deltanet", "kda", "gdn2", "comba", "deltaproduct", "mesa", "rwkv7"),
    "softmax attention": ("llama", "fox"),
    "Koopman attention": ("echo", "echo_paper"),
    "time-scales": ("post", "post_norm", "post_optimal", "post_paper", "post_released", "vector", "scalar", "share"),
    "update": ("delta", "dplr", "dplr_released", "gate_rank", "gate_rank_paper", "log_linear"),
    "positions": ("rope", "lrpe", "rope_released", "tpe", "tpe_paper", "tpe_released"),
    "hybrids": ("ska", "ska_decay", "ska_post", "ska_paper", "attention", "swa", "nope"),
    "MLP": ("koopman_mlp",),
}


def by_family(names: Iterable[str]) -> dict[str, list[str]]:
    """Group names, `": family" → names`. Names without a family, such as those of users, come first, under `""`."""
    family = {name: f": {family}" for family, members in FAMILIES.items() for name in members}
    groups: dict[str, list[str]] = {"": []}
    for name in names:
        groups.setdefault(family.get(name, ""), []).append(name)
    return {title: members for title, members in groups.items() if members}
