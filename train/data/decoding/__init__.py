"""Decoding of chunks and clips: from packets, through the container, or cropped in a filter graph."""
