"""Other libraries, without work that they repeat at each call, and with the numbers of a GPU."""

from functools import cache

import numpy as np


def parser():
    """tyro reads the source of a command's class once, not for each command line."""
    from tyro._docstrings import _ClassTokenization

    _ClassTokenization.make = staticmethod(cache(_ClassTokenization.make))


def shapes():
    """What Triton's blocks and tensors know of their shapes is computed once for each type."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic

    make_block, make_tensor, same = core.block_type.__init__, core.tensor.__init__, core.dtype.__eq__
    spread, blocks, tensors = TritonSemantic.broadcast_impl_value, {}, {}

    def block(self, element_ty, shape):
        key = (element_ty.name, *[getattr(size, "value", size) for size in shape])
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = self.shape, self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = blocks[key]

    def tensor(self, handle, type):
        key = type.name if type.is_block() else ""
        if key not in tensors:
            make_tensor(self, handle, type)
            tensors[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = tensors[key]

    def broadcast(self, left, right):
        return (left, right) if left.type.name == right.type.name else spread(self, left, right)

    TritonSemantic.broadcast_impl_value = broadcast
    core.block_type.__init__, core.tensor.__init__ = block, tensor
    core.block_type.__eq__ = lambda self, other: isinstance(other, core.block_type) and self.name == other.name
    core.dtype.__eq__ = lambda self, other: self is other or same(self, other)


def rounding():
    """bfloat16 is rounded to the nearest number, as a GPU does, where the interpreter cuts bits off."""
    from triton.runtime import interpreter

    other = interpreter._convert_float

    def convert(x, given, wanted, mode):
        if (given.name, wanted.name) == ("bf16", "fp32"):
            return x.view(np.uint16).astype(np.uint32) << 16
        if (given.name, wanted.name) != ("fp32", "bf16"):
            return other(x, given, wanted, mode)
        bits = x.view(np.uint32)
        nearest = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
        return np.where(np.isnan(x), 0x7FC0, nearest).astype(np.uint16)

    interpreter._convert_float = convert


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
    # The larger of two numbers is that which is no NaN, as on a GPU. Triton 3.6 has NaN here.
    interpreter.InterpreterBuilder.create_maxnumf = lambda self, x, y: self.binary_op(x, y, np.fmax)
    interpreter.InterpreterBuilder.create_minnumf = lambda self, x, y: self.binary_op(x, y, np.fmin)
    shapes()
    rounding()
