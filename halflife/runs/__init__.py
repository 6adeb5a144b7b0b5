"""Runs in folders: one run, many runs, and the files that they write."""
