"""`train doctor`: report on a machine, its problems, and the training defaults on this machine."""
