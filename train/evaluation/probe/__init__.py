"""What frozen features are worth: nearest neighbours and a linear layer on the features of any run's video tower."""
