"""Kernels that are several passes at once."""
