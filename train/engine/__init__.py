"""The training loop and what it consists of: state, synchronisation of ranks, failures, metrics, throughput."""
