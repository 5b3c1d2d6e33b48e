"""Captions of any video files: cut into windows, decoded once, captioned in batches, written as CSV, JSON or SRT."""
