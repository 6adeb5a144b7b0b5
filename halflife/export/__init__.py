"""Models as graphs of fixed shapes for other programs."""
