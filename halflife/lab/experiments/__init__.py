"""One file per paper or question, each at the scales smoke, small and paper."""

from halflife.lab.experiments import (  # noqa: F401 (they register themselves)
    decay_design,
    echo,
    echo_tiers,
    gate_rank,
    mqar,
    recall,
)
from halflife.lab.experiments.base import EXPERIMENTS, SCALES, ExperimentSettings, paper_experiments
from halflife.lab.experiments.evidence import koopman_powers, overview, post_parts, reassigned  # noqa: F401
from halflife.lab.experiments.language_models import decay as decay_lm  # noqa: F401
from halflife.lab.experiments.language_models import echo as echo_lm  # noqa: F401
from halflife.lab.experiments.language_models import gate_rank as gate_rank_lm  # noqa: F401
from halflife.lab.experiments.language_models import post as post_lm  # noqa: F401

__all__ = ["EXPERIMENTS", "SCALES", "ExperimentSettings", "paper_experiments"]
