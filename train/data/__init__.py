"""Batches from shards: sample order, frame sampling, decoding, cropping, loading."""
