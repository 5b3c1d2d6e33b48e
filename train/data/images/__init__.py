"""Tars of images with texts, as img2dataset writes them, with random access to their members."""
