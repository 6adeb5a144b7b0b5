"""Experiments that train language models: one file a paper, on FineWeb-Edu or on the user's text."""
