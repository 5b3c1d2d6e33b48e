"""Implementations of the `train` commands."""
