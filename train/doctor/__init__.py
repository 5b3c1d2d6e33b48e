"""`train doctor`: report about a machine, the defaults that training would use on it, and its problems."""
