"""The choice of several states that take the place of a mixer's single one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from halflife.layers.gate_rank import GateRank
from halflife.layers.memory.log_linear import LogLinear
from halflife.ops.gate_rank import check_reset_law

KINDS: dict[str, type[nn.Module]] = {"gate_rank": GateRank, "log_linear": LogLinear}
UPDATES = {"gate_rank": ("linear", "delta"), "log_linear": ("linear",)}
Options = Mapping[str, Any] | None


def build_states(
    sizes: tuple[int, int], *, decay: str | None, granularity: str, update: str, **options: Options
) -> tuple[nn.Module | None, ...]:
    """Build the states of a mixer, in the order of `KINDS`. At most one is not None.

    Args:
        sizes: hidden_size and num_heads of the mixer.
        decay, granularity, update: as in `LinearMixer`.
        **options: the options of each kind, or None.

    Raises:
        ValueError: two kinds are given, or the decay or the update does not fit.
    """
    given = [name for name, value in options.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"a mixer has one kind of states; got {' and '.join(given)}")
    for name in given:
        if decay is None or granularity != "scalar" or update not in UPDATES[name]:
            raise ValueError(
                f"{name} needs a scalar decay and the {' or the '.join(UPDATES[name])} update; got "
                f"decay {decay!r}, granularity {granularity!r}, update {update!r}"
            )
    if (chosen := options.get("gate_rank")) is not None:
        check_reset_law(chosen.get("reset_law", "mask"), delta=update == "delta")
    return tuple(
        None if (chosen := options.get(name)) is None else kind(*sizes, **chosen) for name, kind in KINDS.items()
    )
