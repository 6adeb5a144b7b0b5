"""The memory lens: what every token of a text reads from the others, and what is left of what each one wrote."""

from halflife.analysis.look.foreign import load_for_lens
from halflife.analysis.look.lens import HeadLens, Lens, Measured, look

__all__ = ["HeadLens", "Lens", "Measured", "load_for_lens", "look"]
