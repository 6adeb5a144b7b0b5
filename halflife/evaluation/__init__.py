"""Measurements of what a trained model can do."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from halflife.ops.linear import fast_linears


@contextmanager
def evaluating(model: object) -> Iterator[None]:
    """Switch a model to evaluation mode and to the fastest linear maps; afterwards all is as before.

    A model of transformers that is read in place is no module. It is loaded in evaluation mode and stays in it.
    """
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
