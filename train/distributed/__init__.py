"""Distributed training: ranks, collectives, data and pipeline parallelism, distributed checkpoints."""
