"""Producers of sample tables: one module for each kind of data and annotations."""
