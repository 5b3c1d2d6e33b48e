"""From shards to batches: sample order, clip arithmetic, decoding, cropping, loading."""
