"""Masked autoencoders of videos (VideoMAE)."""
