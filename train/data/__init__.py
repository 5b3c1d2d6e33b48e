"""Batches from shards: sample order, clip arithmetic, decoding, cropping, loading."""
