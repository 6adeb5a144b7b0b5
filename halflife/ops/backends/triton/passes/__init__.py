"""Passes of a layer over memory, each one launch forward and one backward; gradients of parameters are summed after."""
