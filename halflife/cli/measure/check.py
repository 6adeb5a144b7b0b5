"""`halflife check`."""

from __future__ import annotations

from dataclasses import dataclass

from tyro.conf import Positional


@dataclass(frozen=True)
class Check:
    """Check that a layer keeps its contract: it does not look ahead, streams, packs, pads, and has right gradients.

    Each check has a line. With --import, every command makes the first three checks of the layers that a module adds:
    it refuses a layer that looks ahead, and warns of the other faults.

    examples:
      halflife check gated_deltanet
      halflife check my_module:my_layer
    """

    layer: Positional[str]
    """A layer, or module:layer with the module of yours that registers it."""
    hidden_size: int = 32
    """Width of the layer. It gets 4 heads and chunks of 4 tokens, as far as it takes such options."""

    def run(self) -> None:
        from halflife import extensions
        from halflife.evaluation.layer_check import check_layer

        module, _, name = self.layer.rpartition(":")
        if module:
            extensions.add(module)
        found = check_layer(name, hidden_size=self.hidden_size)
        for check, fault in found:
            print(f"{check:<12} {fault or 'right'}")
        if faults := [check for check, fault in found if fault]:
            raise ValueError(f"layer {name} fails {len(faults)} of {len(found)} checks: {', '.join(faults)}")
