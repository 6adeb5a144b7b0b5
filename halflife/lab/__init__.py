"""The laboratory: the papers' experiments and what their statements say, computed. The library does not import it."""
