"""transformers' Trainer with our parameter groups."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Trainer

from halflife.models import param_groups
from halflife.training.data import only
from halflife.training.fit import TrainConfig


class OwnOptimizer(Trainer):
    """A Trainer whose items are whole batches and whose optimiser is AdamW on `param_groups`.

    The optimiser is made when the Trainer asks for it, since sharded parameters take another than the ones it is given.
    """

    def __init__(self, config: TrainConfig, **settings: Any) -> None:
        self.config = config
        super().__init__(data_collator=only, **settings)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            trained: Any = self.model if model is None else model
            groups = param_groups(trained, self.config.weight_decay)
            self.optimizer = torch.optim.AdamW(groups, lr=self.config.learning_rate, betas=self.config.betas)
        return self.optimizer
