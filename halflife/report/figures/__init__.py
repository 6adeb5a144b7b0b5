"""Figures: data functions, renderers, and figures that are drawn with matplotlib directly."""
