"""Stored embeddings of clips and captions, and search in them."""
