"""The implementations of the commands of `train`."""
