"""Tars read from front to back: without an index, ours or other tools'."""
