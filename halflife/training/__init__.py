"""Data, optimiser and callbacks around `transformers.Trainer`; runs, and sweeps of runs."""
