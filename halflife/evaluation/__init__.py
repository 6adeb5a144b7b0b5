"""Measurements of what a trained model can do."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from halflife.ops.linear import fast_linears


@contextmanager
def evaluating(model: object) -> Iterator[None]:
    """Inside, a model (unless it is read in place) is in evaluation mode with the fastest linear maps."""
    if not isinstance(model, nn.Module):
        yield
        return
    modes = {module: module.training for module in model.modules()}
    for module in modes:
        module.training = False
    try:
        with fast_linears(model):
            yield
    finally:
        for module, training in modes.items():
            module.training = training
