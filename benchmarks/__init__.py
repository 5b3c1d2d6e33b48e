"""Benchmarks: the docstring of each program describes its method, README.md lists the results."""
