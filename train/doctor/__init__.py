"""`train doctor`: report on a machine, the defaults of training on it, and its problems."""
