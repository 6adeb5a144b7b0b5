"""The figures, a file a subject."""
