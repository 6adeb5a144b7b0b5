"""The implementations of the ops, and the choice of the one that runs."""
