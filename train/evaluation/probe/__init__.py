"""Probes of frozen features: nearest neighbours and a linear layer on the features of any run's video tower."""
