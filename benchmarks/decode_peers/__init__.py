"""The ways to get clips out of chunks that `benchmarks.decode` compares: one program each, in a Python of its own."""
