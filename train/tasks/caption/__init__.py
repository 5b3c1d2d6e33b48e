"""Captioning: training of captioners, generation and scores of captions, and captions of any video file."""
