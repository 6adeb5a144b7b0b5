"""Names of version 0.1.0: the error for each one gives a name that exists."""

import importlib
import sys

import pytest

from halflife import renamed
from halflife.decay import minimax


def find(name):
    """Return the module, class or attribute `name`, which is below `halflife`."""
    module, rest = name, []
    while True:
        try:
            found = importlib.import_module(f"halflife.{module}")
            break
        except ModuleNotFoundError:
            module, _, attribute = module.rpartition(".")
            rest.insert(0, attribute)
    for attribute in rest:
        found = getattr(found, attribute)
    return found


def use(owner, name):
    """Take a name from a module, or call a method or property of a class."""
    value = getattr(owner, name)
    value.fget(None) if isinstance(value, property) else value()


def test_every_new_module_exists_and_no_old_one_does():
    for old, new in renamed.MODULES.items():
        assert importlib.import_module(f"halflife.{new}")
        with pytest.raises(ModuleNotFoundError, match=f"halflife.{old} is now halflife.{new}"):
            importlib.import_module(f"halflife.{old}")


def test_every_new_name_exists_and_every_old_one_is_answered():
    for old, new in renamed.NAMES.items():
        assert find(new) is not None
        owner, _, name = old.rpartition(".")
        if owner.rpartition(".")[2][0].isupper():
            with pytest.raises(AttributeError, match=f" is now .*{new.rpartition('.')[2]}$"):
                use(find(owner), name)
        elif owner not in renamed.MODULES:
            assert name not in vars(importlib.import_module(f"halflife.{owner}"))
            with pytest.raises(ImportError, match=f"halflife.{old} is now halflife.{new}$"):
                exec(f"from halflife.{owner} import {name}")


def test_imports_and_attributes_give_the_new_name():
    for statement, message in {
        "import halflife.models.io": "halflife.models.io is now halflife.models.checkpoint",
        "from halflife.models.io import load_any": "models.io.load_any is now halflife.models.load.load_any",
        "from halflife.models import io": "is now halflife.models.checkpoint",
        "from halflife.ops.triton.delta import x": "is now halflife.ops.backends.triton",
        "from halflife.training.corpus import Corpus": "is now halflife.data.corpus",
        "from halflife.evaluation.memory import survey": "is now halflife.evaluation.memory.measure_memory",
        "from halflife.decay.power_law import best_ends": "best_ends is now halflife.decay.minimax.best_endpoints",
        "import halflife; halflife.decay.base.inverse_softplus": "is now halflife.precision.inverse_softplus",
    }.items():
        with pytest.raises((ImportError, AttributeError), match=message):
            exec(statement)


def test_other_wrong_names_are_answered_as_ever():
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'halflife\.nowhere'"):
        exec("import halflife.nowhere")
    with pytest.raises(AttributeError, match=r"module 'halflife\.decay\.minimax' has no attribute 'nothing'$"):
        minimax.nothing  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(AttributeError, match=r"module 'halflife\.decay\.base' has no attribute 'nothing'$"):
        find("decay.base").nothing


def test_installed_once():
    renamed.install()
    assert sum(type(finder).__name__ == "RenamedFinder" for finder in sys.meta_path) == 1
