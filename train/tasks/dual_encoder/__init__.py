"""CLIP-style dual encoders of clips and captions."""
