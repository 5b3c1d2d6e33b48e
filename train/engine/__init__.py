"""The training loop and its parts: state, agreement between ranks, failed samples, metrics, throughput."""
