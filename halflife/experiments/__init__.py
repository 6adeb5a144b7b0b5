"""One file a paper, each at the scales smoke, small and paper."""

from halflife.experiments import echo, gate_rank, mqar, recall  # noqa: F401 (they register themselves)
from halflife.experiments.base import EXPERIMENTS, SCALES, Settings

__all__ = ["EXPERIMENTS", "SCALES", "Settings"]
