"""Benchmarks. The docstring of each program describes its method, and README.md lists the results."""
