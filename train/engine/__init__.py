"""The training loop and its parts: state, synchronisation of ranks, failures, metrics, throughput."""
