"""Captioners with a causal language model of transformers: a video's tokens are the prefix of its text."""
