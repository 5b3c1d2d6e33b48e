"""Masked autoencoders of videos: learning by reconstructing what is hidden."""
