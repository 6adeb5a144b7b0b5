"""A cascade of states, of which each passes its content on to the next, slower one."""

from halflife.ops.cascade import forms  # noqa: F401 (registers its forms)
from halflife.ops.cascade.op import cascade

__all__ = ["cascade"]
