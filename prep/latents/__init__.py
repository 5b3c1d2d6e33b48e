"""The `latents` column: VAE latents of the frames of chunks."""
