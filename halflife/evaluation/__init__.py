"""Measurements of what a trained model can do."""
