"""Gradients of heads that share queries and keys."""
