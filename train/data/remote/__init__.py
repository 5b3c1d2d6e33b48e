"""Remote data folders and tars, read through fsspec."""
