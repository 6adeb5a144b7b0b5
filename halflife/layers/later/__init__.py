"""Layers that were published after the papers of this library, as presets to compare with."""

from halflife.layers.later import delta, fox, longhorn, mesa  # noqa: F401 (each registers its layers)
