"""Data folders and tars that lie elsewhere, read by way of fsspec."""
