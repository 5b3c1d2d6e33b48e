"""Evaluation of trained weights: the shared part of all evaluations, and probes of frozen features."""
