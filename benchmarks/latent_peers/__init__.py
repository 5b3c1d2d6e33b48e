"""The latent loaders compared by `benchmarks.latents`: one program each, possibly in its own Python environment."""
