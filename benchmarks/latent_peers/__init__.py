"""Programs of the loaders that `benchmarks.latents` compares. Each may use a separate Python environment."""
