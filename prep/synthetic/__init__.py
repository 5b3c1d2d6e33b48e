"""Synthetic videos, for the demo and for tests that must identify individual frames."""
