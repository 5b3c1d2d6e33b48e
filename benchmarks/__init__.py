"""Benchmarks; README.md in this folder describes them and lists the results."""
