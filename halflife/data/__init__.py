"""Data for training: text as token batches, and tasks as streams of batches."""
