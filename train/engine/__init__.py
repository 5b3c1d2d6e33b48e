"""The training loop: its state, how ranks agree, throughput."""
