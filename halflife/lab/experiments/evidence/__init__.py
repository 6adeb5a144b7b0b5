"""Experiments for open claims of the papers (docs/claims.md)."""
