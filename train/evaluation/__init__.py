"""Evaluation of trained weights: the code that all evaluations share, and probes of frozen features."""
