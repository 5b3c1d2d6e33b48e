"""What the commands of `train` do, once their flags are read."""
