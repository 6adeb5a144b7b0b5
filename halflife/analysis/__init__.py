"""What a run shows: its results read back, drawn as figures and told on one page."""
