"""A column: the mean brightness of the frames of each chunk."""
