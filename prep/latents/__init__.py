"""The `latents` column: frames of chunks as a VAE sees them."""
