"""Embeddings of clips and captions on disk, and search in them."""
