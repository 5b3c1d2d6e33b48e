"""`train bench`: profile the input pipeline and training step, and report the bottleneck."""
