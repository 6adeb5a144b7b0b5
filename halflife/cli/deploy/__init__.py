"""Commands that bring a trained model to its users."""
