"""Benchmarks for a machine with a GPU: `python -m benchmarks.gpu`. README.md describes the methods."""
