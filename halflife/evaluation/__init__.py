"""Measurements of what a trained model can do."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: object) -> Iterator[None]:
    """Switch a model to evaluation mode, and every module back to its previous mode afterwards.

    A model of transformers that is read in place is no module. It is loaded in evaluation mode and stays in it.
    """
    modes = {module: module.training for module in model.modules()} if isinstance(model, nn.Module) else {}
    for module in modes:
        module.training = False
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
