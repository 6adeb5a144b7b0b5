"""States that take the place of a mixer's single state."""
