"""Fitting one model: the configuration, `transformers.Trainer` with our optimiser, callbacks and checkpoints."""
