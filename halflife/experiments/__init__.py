"""One file per paper or question, each at the scales smoke, small and paper."""

from halflife.experiments import (  # noqa: F401 (they register themselves)
    decay_design,
    echo,
    echo_tiers,
    gate_rank,
    mqar,
    recall,
)
from halflife.experiments.base import EXPERIMENTS, SCALES, ExperimentSettings, paper_experiments

__all__ = ["EXPERIMENTS", "SCALES", "ExperimentSettings", "paper_experiments"]
