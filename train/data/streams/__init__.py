"""Streams of tars that are read from front to back, without an index: ours or other tools'."""
