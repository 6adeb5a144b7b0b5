"""One file per paper or question, each at the scales smoke, small and paper."""

from halflife.lab.experiments.base import EXPERIMENTS, SCALES, ExperimentSettings, paper_experiments

__all__ = ["EXPERIMENTS", "SCALES", "ExperimentSettings", "paper_experiments"]
