"""Producers of sample tables: one module for each kind of data and what its samples hold in addition to frames."""
