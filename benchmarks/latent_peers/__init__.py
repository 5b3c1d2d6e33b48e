"""The ways to load latents that `benchmarks.latents` compares: one program each, in a Python of its own."""
