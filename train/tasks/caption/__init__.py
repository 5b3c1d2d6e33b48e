"""Captioning: train a captioner, generate and score captions, caption any video file."""
