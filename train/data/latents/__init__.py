"""Batches of latents: segments mapped from tars and gathered into buffers, with captions or labels."""
