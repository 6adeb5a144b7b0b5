"""Mamba-3 MIMO: heads with several queries, keys and outputs."""
