"""Which parameters an optimiser decays, and at which rate it trains them."""

from __future__ import annotations

from typing import Any

from torch import nn

from halflife import layers
from halflife.precision import Float32Module


def without_weight_decay(model: nn.Module) -> set[int]:
    """The ids of the parameters that no optimiser should decay.

    They are all of one axis (norms, biases), convolution taps, and those of `Float32Module`s (decays, D, PoST spectra).
    """
    whole = (module for module in model.modules() if isinstance(module, (Float32Module, layers.ShortConv)))
    kept = {id(parameter) for module in whole for parameter in module.parameters()}
    return kept | {id(parameter) for parameter in model.parameters() if parameter.ndim < 2}


def param_groups(model: nn.Module, weight_decay: float, learning_rate: float | None = None) -> list[dict[str, Any]]:
    """Return parameter groups for an optimiser: matrices with weight decay, and `without_weight_decay` without.

    A further group holds the parameters of the modules that have an attribute `learning_rate_factor` other than 1
    (`decay.PoST`). Its "lr" is that factor times the rate.

    Raises:
        ValueError: a module has such a factor, and `learning_rate` is None.
    """
    factors = {
        id(parameter): factor
        for module in model.modules()
        if (factor := getattr(module, "learning_rate_factor", 1.0)) != 1.0
        for parameter in module.parameters(recurse=False)
    }
    if factors and learning_rate is None:
        raise ValueError("this model has learning-rate factors, so param_groups needs the learning rate")
    without = without_weight_decay(model)
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    scaled: dict[float, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad and id(parameter) in factors:
            scaled.setdefault(factors[id(parameter)], []).append(parameter)
        elif parameter.requires_grad:
            groups[id(parameter) not in without].append(parameter)
    return [
        {"params": groups[True], "weight_decay": weight_decay},
        {"params": groups[False], "weight_decay": 0.0},
        *(
            {"params": parameters, "weight_decay": 0.0, "lr": factor * (learning_rate or 0.0)}
            for factor, parameters in scaled.items()
        ),
    ]
