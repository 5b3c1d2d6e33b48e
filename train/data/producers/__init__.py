"""Producers of sample tables: one module for each kind of data, and for the content of its samples besides frames."""
