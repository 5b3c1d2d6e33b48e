"""Programs of the decoders that `benchmarks.decode` compares. Each may use a separate Python environment."""
