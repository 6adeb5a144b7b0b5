"""Other libraries, without work that they repeat at each call."""

from functools import cache


def parser():
    """tyro reads the source of a command's class once, not for each command line."""
    from tyro._docstrings import _ClassTokenization

    _ClassTokenization.make = staticmethod(cache(_ClassTokenization.make))


def interpreter():
    """Prepare `triton.language` once a launch, not at each call inside it too, and look up each type once."""
    from triton.runtime import interpreter

    prepare, call = interpreter._patch_lang, interpreter.GridExecutor.__call__
    find, types = interpreter._get_np_dtype, {}
    prepared = set()  # the modules whose functions have seen it prepared in this launch

    def once(fn):
        if fn.__module__ in prepared:
            return None
        prepared.add(fn.__module__)
        return prepare(fn)

    def launch(self, *arguments, **options):
        prepared.clear()
        return call(self, *arguments, **options)

    def find_once(dtype):
        name = dtype.scalar.name
        if name not in types:
            types[name] = find(dtype.scalar)
        return types[name]

    interpreter._patch_lang = once
    interpreter.GridExecutor.__call__ = launch
    interpreter._get_np_dtype = find_once
