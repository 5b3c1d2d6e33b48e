"""Batches of latents, with the text embeddings of their captions, at the speed of copying memory."""
