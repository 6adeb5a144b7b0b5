"""A warning where an optimiser decays parameters of a decay.

`transformers.Trainer` decays every parameter whose name has neither "bias" nor "norm" in it, and a model has no way to
say more. Rates that shrink towards 0 change what a model remembers, whatever its data say.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from halflife.models.parameters import without_weight_decay

_watched: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_checked: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def watch(model: nn.Module) -> None:
    """Warn at the first step of each optimiser of this model that decays what it should not."""
    _watched.add(model)


def _check(optimizer: Optimizer, *_: Any) -> None:
    if optimizer in _checked:
        return
    _checked.add(optimizer)
    decayed = {id(x) for group in optimizer.param_groups if group.get("weight_decay") for x in group["params"]}
    for model in [*_watched] if decayed else []:
        wrong = decayed & without_weight_decay(model)
        if not wrong:
            continue
        name = next(name for name, x in model.named_parameters() if id(x) in wrong)
        warnings.warn(
            f"{type(optimizer).__name__} has weight decay on {len(wrong)} parameters that should have none, such as "
            f"{name}: it changes how long the model remembers. Give the Trainer optimizers=(torch.optim.AdamW("
            "halflife.param_groups(model, weight_decay, learning_rate), lr=learning_rate), None)",
            stacklevel=2,
        )
        return


register_optimizer_step_pre_hook(_check)
