"""`train bench`: measure the input pipeline and the training step, and report the bottleneck."""
