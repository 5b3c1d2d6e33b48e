"""`train doctor`: examine a machine, what training would use of it, and its problems."""
