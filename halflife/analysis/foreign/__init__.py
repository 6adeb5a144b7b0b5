"""Models of transformers, read in place by hooks: nothing is converted."""
