"""Frames out of chunks: from packets, by way of the container, or cropped in a filter graph."""
