"""The `latents` column: VAE latents of the chunks."""
