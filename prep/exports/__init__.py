"""Exports: what has been made, in the formats of other tools."""
