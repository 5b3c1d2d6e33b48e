"""Exports of columns to formats that other tools read."""
