"""Captions out of a captioner, token by token."""
