"""Running evaluations: what all of them share, and probes of frozen features."""
