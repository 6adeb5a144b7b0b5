"""One file a paper, each at the scales smoke, small and paper."""

from halflife.experiments import post  # noqa: F401 (registers its tasks)
from halflife.experiments.base import EXPERIMENTS, SCALES, Settings

__all__ = ["EXPERIMENTS", "SCALES", "Settings"]
