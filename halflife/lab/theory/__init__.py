"""What spectra and operators can do, computed from formulas."""
