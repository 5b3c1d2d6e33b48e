"""Trained weights of any kind, ready for use."""
