"""One file per paper or question, each at the scales smoke, small and paper."""

from halflife.experiments import decay_design, echo, gate_rank, mqar, recall  # noqa: F401 (they register themselves)
from halflife.experiments.base import EXPERIMENTS, SCALES, ExperimentSettings, paper_experiments

__all__ = ["EXPERIMENTS", "SCALES", "ExperimentSettings", "paper_experiments"]
