"""The run-time checks that `conftest.py` puts on halflife: shapes by jaxtyping, other types by beartype alone.

An int is a float (PEP 484). What is wrong is a TypeError. jaxtyping binds the arguments of each call and stores their
shapes, which takes 5 µs where beartype takes 0.3 µs, and only a few dozen functions have shapes in their annotations.
"""

import inspect
from functools import partial
from types import SimpleNamespace
from typing import Any, get_type_hints

import jaxtyping
from beartype import BeartypeConf, beartype

_shapes = jaxtyping.jaxtyped  # before `install` puts `_check` in its place
check = beartype(conf=BeartypeConf(is_pep484_tower=True, violation_type=TypeError))


def install(package):
    """Check every function and dataclass of a package that is imported from now on."""
    jaxtyping.install_import_hook(package, "typecheck.check")
    jaxtyping.jaxtyped = _check


def _check(function=None, *, typechecker):
    """What the hook puts on every function and class."""
    if function is None:
        return partial(_check, typechecker=typechecker)
    if not inspect.isfunction(function):
        return _shapes(function, typechecker=typechecker)
    written = function.__annotations__
    known = {name: _resolve(annotation, function.__globals__) for name, annotation in written.items()}
    if "jaxtyping." in repr(known):
        return _shapes(function, typechecker=typechecker)
    function.__annotations__ = known
    checked = typechecker(function)
    function.__annotations__ = checked.__annotations__ = written
    return checked


def _resolve(annotation, names):
    """The type that an annotation names, or Any if it cannot be known when the module is imported."""
    try:
        return get_type_hints(SimpleNamespace(__annotations__={"it": annotation}), names, include_extras=True)["it"]
    except (NameError, TypeError, AttributeError):
        return Any
