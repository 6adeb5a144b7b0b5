"""Folders of runs: one run, many runs, and what their files hold."""
