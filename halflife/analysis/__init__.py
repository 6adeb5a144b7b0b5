"""What trained models do inside: their decays, masks and operators, and how far they remember."""
