"""The latent loaders compared by `benchmarks.latents`: one program each, which may use a separate Python environment.
"""
